"""The optimizer step of torch.optim and its kin on the tensors that one rank owns: states, temporaries, kernels."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod
from typing import NamedTuple

from zsim.errors import NotModeled
from zsim.model.kernels import DTYPE_BYTES, Memory
from zsim.model.spec import numbered
from zsim.plan.spec import PAGED, Optimizer
from zsim.program import paging
from zsim.program.builder import Builder
from zsim.program.foreach import foreach
from zsim.program.ops import COMPUTE, CPU, Compute, CpuWork

# torch's loop over host tensors, beyond its traffic: temporaries are fresh memory, whose pages the system clears first.
# 5.0 to 6.3 times DeepSpeedCPUAdam (arXiv 2101.06840, 1 to 10e9 parameters), 6.8 (DeepSpeed PR 735); by bytes 2.9.
LOOP_ON_CPU = 1.95
# So a byte of fresh memory takes as long as moving this many: the loop makes two tensors among 80 bytes per parameter.
# Measured, torch 2.13 on one core of an EPYC: float32 to bfloat16 takes 3.9 times as long into a new tensor as into an
# old one; (6 + 2 * 9.5) / 6 is 4.2.
FRESH_ON_CPU = (LOOP_ON_CPU - 1) * 80 / 8


class Pass(NamedTuple):
    """One elementwise kernel of an update: how many tensors like the parameter it reads and writes."""

    reads: float
    writes: float


class Rule(NamedTuple):
    """An update of torch.optim.

    `states`: tensors like the parameter, kept from the first step on. `fused`: the one kernel that does it all.
    `passes`: the kernels of `_multi_tensor_<name>` and `_single_tensor_<name>`. `temporaries` of all parameters at
    once in the first, of one tensor at a time in the second (`loop_temporaries`).
    """

    states: int
    fused: Pass | None
    passes: tuple[Pass, ...]
    temporaries: int
    loop_temporaries: int
    counters: bool = True  # a float32 `step` per tensor


# torch 2.13 torch/optim/adam.py: decay, lerp m, mul v, addcmul v, sqrt (a new list), div, add eps, addcdiv. Per tensor
# the quotient is a second temporary.
_ADAM = (Pass(1, 1), Pass(2, 1), Pass(1, 1), Pass(2, 1), Pass(1, 1), Pass(1, 1), Pass(1, 1), Pass(3, 1))
# transformers 5.24 Adafactor without momentum: rms of the parameter, square, eps, row and column means, their outer
# product, times gradient, rms, clip, times rate, negative, add. One tensor at a time.
_ADAFACTOR = (
    Pass(1, 0), Pass(1, 1), Pass(1, 1), Pass(1, 0), Pass(1, 0), Pass(0, 1), Pass(2, 1), Pass(1, 0), Pass(1, 1),
    Pass(1, 1), Pass(1, 1), Pass(2, 1),
)  # fmt: skip
RULES = {
    "adamw": Rule(2, Pass(4, 3), _ADAM, 1, 2),
    "adam": Rule(2, Pass(4, 3), _ADAM[1:], 1, 2),
    # torch/optim/sgd.py: the momentum times its decay, plus the gradient, then the parameter
    "sgd": Rule(1, Pass(3, 2), (Pass(1, 1), Pass(2, 1), Pass(2, 1)), 0, 0, counters=False),
    "plain sgd": Rule(0, Pass(2, 1), (Pass(2, 1),), 0, 0, counters=False),
    # bitsandbytes lion_32bit is one kernel per tensor; otherwise decay, interpolation, sign, add, momentum
    "lion": Rule(1, Pass(3, 2), (Pass(1, 1), Pass(2, 1), Pass(1, 1), Pass(2, 1), Pass(2, 1)), 1, 2, counters=False),
    # two states of a byte; one kernel per tensor reads and writes them
    "adamw8bit": Rule(0, Pass(2.5, 1.5), (), 0, 0, counters=False),
    # torchao: a compiled kernel per tensor, two states of half a byte
    "adamw4bit": Rule(0, Pass(2.25, 1.25), (), 0, 0, counters=False),
    "adafactor": Rule(0, None, _ADAFACTOR, 0, 2, counters=False),
}
# bitsandbytes functional.py, optimizer.py: smaller tensors keep float32 states; a float32 maximum per block and state
MIN_8BIT, BLOCK_8BIT = 4096, 256
# torchao 0.18 optim/adam.py _new_buffer, subclass_4bit.py: of whole blocks alone; two weights a byte, a float32 maximum
# per block, 16 float32 values
MIN_4BIT, BLOCK_4BIT, MAP_4BIT = 4096, 128, 64


def rule_of(optimizer: Optimizer) -> Rule:
    """Raises NotModeled for an optimizer that has no rule here."""
    name = "plain sgd" if optimizer.name == "sgd" and not optimizer.momentum else optimizer.name
    if name not in RULES:
        accepted = ", ".join(sorted(RULES.keys() - {"plain sgd"}))
        raise NotModeled(f"optimizer {optimizer.name}", field="optimizer", accepted=accepted)
    return RULES[name]


def state_bytes(
    optimizer: Optimizer, numels: Sequence[int], size: int, shapes: Sequence[tuple[int, ...]] | None = None
) -> int:
    """Bytes of the states, without step counters. `shapes`: of the tensors, where they are not flat pieces."""
    return sum(_state_tensors(optimizer, numels, size, shapes))


def _state_tensors(
    optimizer: Optimizer, numels: Sequence[int], size: int, shapes: Sequence[tuple[int, ...]] | None
) -> list[int]:
    """Bytes of each, in the order in which the first step makes them: parameter by parameter."""
    if optimizer.name == "adamw8bit":
        pairs = [(n, _maxima(n)) if n >= MIN_8BIT else (4 * n,) for n in numels]
        return [nbytes for pair in pairs for nbytes in pair * 2]
    if optimizer.name == "adamw4bit":
        packed = [n >= MIN_4BIT and n % BLOCK_4BIT == 0 for n in numels]
        parts = [
            (n // 2, 4 * (n // BLOCK_4BIT), MAP_4BIT) if is_packed else (size * n,)
            for n, is_packed in zip(numels, packed, strict=True)
        ]
        return [nbytes for part in parts for nbytes in part * 2]
    if optimizer.name == "adafactor":  # factored into rows and columns from two dimensions on
        pieces = shapes or [(n,) for n in numels]
        return [4 * n for s in pieces for n in ((prod(s) // s[-1], prod(s) // s[-2]) if len(s) > 1 else s)]
    return [size * n for n in numels for _ in range(rule_of(optimizer).states)]


def _maxima(numel: int) -> int:
    return 4 * ceil(numel / BLOCK_8BIT)


def _unpaged(optimizer: Optimizer, numels: Sequence[int]) -> list[int]:
    """Of `_state_tensors`, what a paged optimizer has in the GPU's own memory."""
    large = [_maxima(n) for n in numels if n >= paging.PAGED_NUMEL] if optimizer.name == "adamw8bit" else []
    small = [n for n in numels if n < paging.PAGED_NUMEL]
    return _state_tensors(optimizer, small, 4, None) + 2 * large


def _paged_bytes(optimizer: Optimizer, numels: Sequence[int], device: str) -> int:
    """Of the states in managed memory: those of 8-bit optimizers without the maxima of their blocks."""
    if not optimizer.paged:
        return 0
    if device == "host":
        raise NotModeled("a paged optimizer on host tensors", field="optimizer.paged", accepted="false")
    if optimizer.name not in PAGED:
        raise NotModeled(f"paged {optimizer.name}", field="optimizer.paged", accepted=", ".join(PAGED))
    return PAGED[optimizer.name] * sum(n for n in numels if n >= paging.PAGED_NUMEL)


def update(
    builder: Builder,
    optimizer: Optimizer,
    numels: Sequence[int],
    dtype: str,
    *,
    first: bool,
    device: str = "gpu",
    key: str = "optimizer",
    shapes: Sequence[tuple[int, ...]] | None = None,
    state_dtype: str | None = None,
    pinned: float = 0.0,
) -> None:
    """`optimizer.step()` on tensors of `numels` elements of `dtype`; the first one creates the states, named after
    `key`, of `state_dtype` or the same. `pinned`: the share of what it moves on the host that pinned buffers hold."""
    rule, size = rule_of(optimizer), int(DTYPE_BYTES[dtype])
    impl = "cpu" if device == "host" else optimizer.impl
    paged = _paged_bytes(optimizer, numels, device)
    # bitsandbytes' paged states are float32
    state_size = 4 if optimizer.paged else int(DTYPE_BYTES[state_dtype or dtype])
    wider = rule.states * (state_size - size)  # bytes per element that one pass over the states reads or writes more
    tensors = _unpaged(optimizer, numels) if optimizer.paged else _state_tensors(optimizer, numels, state_size, shapes)
    if first and tensors:
        builder.alloc(f"{key}_states", "optimizer_states", sum(tensors), device, tensors=tuple(tensors))
    if first and rule.counters and numels and optimizer.impl != "cpu":
        # adam.py _init_group: on the device if fused or capturable, else on the CPU; DeepSpeedCPUAdam's are Python's
        builder.alloc(f"{key}_steps", "optimizer_states", 4 * len(numels), "gpu" if impl == "fused" else "host")
    if paged and first:
        paging.allocate(builder, key, paged)
    elif paged:
        paging.fetch(builder, paged)
    total = sum(numels)
    if not total:
        return
    if impl == "cpu":
        if optimizer.name == "adamw8bit":  # bitsandbytes has kernels for it since pull request 1901 (March 2026) alone
            raise NotModeled("bitsandbytes' 8-bit Adam on host tensors", field="optimizer", accepted="adamw")
        if optimizer.name == "adamw4bit":
            raise NotModeled("torchao's 4-bit Adam on host tensors", field="optimizer", accepted="adamw")
        # DeepSpeedCPUAdam and torch's fused one pass once over the states; without them torch loops on the CPU
        single = rule.fused if optimizer.impl in ("cpu", "fused") else None
        if single:
            converted = (state_dtype or dtype) if optimizer.impl == "cpu" and dtype == "bfloat16" else None
            bytes_each = (single.reads + single.writes) * size + 2 * wider
            on_host(builder, optimizer.name, total, bytes_each * total, pinned, converted)
            return
        bytes_each = size * sum(p.reads + p.writes for p in rule.passes)
        temporary = _loop_temporaries(rule, numels, size)
        if not temporary:
            on_host(builder, optimizer.name, total, bytes_each * total, pinned)
            return
        builder.alloc(f"{key}_temporaries", "buffers", temporary, device)
        on_host(builder, optimizer.name, total, LOOP_ON_CPU * bytes_each * total, pinned)
        builder.free(f"{key}_temporaries")
        return
    kernels: tuple[Memory, ...]
    if rule.fused and (impl == "fused" or not rule.passes):
        reads, writes = rule.fused.reads * size + wider, rule.fused.writes * size + wider
        fused = foreach("optimizer", numels, reads, writes, ceil(rule.fused.reads))
        kernels, temporary, each = (fused,), 0, []
    elif impl == "foreach" and optimizer.name != "adafactor":
        kernels = tuple(
            foreach("optimizer", numels, p.reads * size, p.writes * size, ceil(p.reads)) for p in rule.passes
        )
        each = [size * n for n in numels] * rule.temporaries
        temporary = sum(each)
    else:
        kernels = tuple(
            Memory("optimizer", p.reads * size * total, p.writes * size * total, len(numels)) for p in rule.passes
        )
        temporary, each = _loop_temporaries(rule, numels, size), [size * max(numels)]
    builder.host_work("optimizer step", "optimizer")
    builder.host_work("optimizer tensor", "optimizer", len(numels))
    builder.launch(
        COMPUTE,
        optimizer.name,
        "optimizer",
        Compute(kernels),
        temp_peak=temporary,
        temp_category="workspace",
        temp_tensors=numbered(each),
    )


def _loop_temporaries(rule: Rule, numels: Sequence[int], size: int) -> int:
    """Bytes: `denom` of the tensor before is still bound while a tensor's own temporaries are made."""
    before = [0, *numels[:-1]] if rule.loop_temporaries else [0] * len(numels)
    return size * max(rule.loop_temporaries * n + b for n, b in zip(numels, before, strict=True))


# Of what Adam moves: weights and two moments are read and written, gradients read.
GRADIENT_SHARE, WEIGHT_SHARE = 1 / 7, 2 / 7


def on_host(
    builder: Builder, label: str, numel: int, nbytes: float, pinned: float = 0.0, moments: str | None = None
) -> None:
    """Arithmetic on host tensors, for which Python waits; `pinned`: the share of `nbytes` in pinned buffers."""
    work = CpuWork(label, numel, nbytes, moments=moments, pinned=pinned * nbytes)
    builder.host_wait(builder.launch(CPU, label, "optimizer", work))


def unscale(builder: Builder, numels: Sequence[int], dtype: str) -> int:
    """torch.amp.GradScaler.unscale_ (torch 2.13): _amp_foreach_non_finite_check_and_unscale_ on every gradient."""
    size = DTYPE_BYTES[dtype]
    return builder.launch(COMPUTE, "unscale", "optimizer", Compute((foreach("grad_norm", numels, size, size, 1),)))


def grad_norm(builder: Builder, numels: Sequence[int], dtype: str, device: str = "gpu", pinned: float = 0.0) -> None:
    """torch.nn.utils.clip_grad.get_total_norm: a norm per tensor, then one of the stacked norms."""
    if device == "host":
        on_host(builder, "grad norm", sum(numels), DTYPE_BYTES[dtype] * sum(numels), pinned)
    elif numels:
        builder.host_work("clip tensor", "optimizer", len(numels))
        kernel = foreach("grad_norm", numels, DTYPE_BYTES[dtype], 0, 1)
        builder.launch(COMPUTE, "grad norm", "optimizer", Compute((kernel,)))


def clip(builder: Builder, numels: Sequence[int], dtype: str, device: str = "gpu", pinned: float = 0.0) -> None:
    """torch.nn.utils.clip_grad.clip_grads_with_norm_: scales every gradient, without asking whether it has to."""
    size = DTYPE_BYTES[dtype]
    if device == "host":
        on_host(builder, "clip", sum(numels), 2 * size * sum(numels), pinned)
    elif numels:
        builder.launch(COMPUTE, "clip", "optimizer", Compute((foreach("grad_norm", numels, size, size, 1),)))


def zero(builder: Builder, numels: Sequence[int], dtype: str) -> None:
    """optimizer.zero_grad(set_to_none=False) on gradients in pinned host memory."""
    on_host(builder, "zero gradients", sum(numels), DTYPE_BYTES[dtype] * sum(numels), 1.0)
