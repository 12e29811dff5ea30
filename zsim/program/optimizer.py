"""The optimizer step of torch.optim on the tensors that one rank owns: states, temporaries, kernels, clipping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zsim.errors import NotModeled
from zsim.model.kernels import DTYPE_BYTES, Memory
from zsim.plan.spec import Optimizer
from zsim.program.builder import Builder
from zsim.program.foreach import foreach
from zsim.program.ops import COMPUTE, CPU, Compute, CpuWork


@dataclass(frozen=True, slots=True)
class Pass:
    """One elementwise kernel of an update: tensors read and written, in units of one parameter."""

    reads: int
    writes: int


@dataclass(frozen=True, slots=True)
class Rule:
    """`states` tensors like the parameter, kept from the first step on. `fused` is one kernel that does it all.

    `passes` are the foreach kernels (torch/optim/<name>.py, _multi_tensor_<name>), `temporaries` how many copies of
    the parameters they hold at their peak; `loop_temporaries` the same per tensor in _single_tensor_<name>.
    """

    states: int
    fused: Pass | None
    passes: tuple[Pass, ...]
    temporaries: int
    loop_temporaries: int
    counters: bool = True  # a float32 `step` per tensor


# torch 2.13 torch/optim/adam.py. foreach: decay, lerp m, mul v, addcmul v, sqrt (new list), div, add eps, addcdiv.
_ADAM = (Pass(1, 1), Pass(2, 1), Pass(1, 1), Pass(2, 1), Pass(1, 1), Pass(1, 1), Pass(1, 1), Pass(3, 1))
RULES = {
    "adamw": Rule(2, Pass(4, 3), _ADAM, 1, 2),
    "adam": Rule(2, Pass(4, 3), _ADAM[1:], 1, 2),
    # torch/optim/sgd.py: momentum buffer mul, add, then the parameter.
    "sgd": Rule(1, Pass(3, 2), (Pass(1, 1), Pass(2, 1), Pass(2, 1)), 0, 0, counters=False),
    "sgd_plain": Rule(0, Pass(2, 1), (Pass(2, 1),), 0, 0, counters=False),
    # lion-pytorch / timm Lion: sign of an interpolation, then the momentum.
    "lion": Rule(1, None, (Pass(1, 1), Pass(2, 1), Pass(1, 1), Pass(2, 1), Pass(2, 1)), 1, 2, counters=False),
    # torch/optim/adagrad.py: addcmul sum, sqrt (new list), add eps, addcdiv.
    "adagrad": Rule(1, Pass(3, 2), (Pass(2, 1), Pass(1, 1), Pass(1, 1), Pass(3, 1)), 1, 2),
}


def rule_of(optimizer: Optimizer) -> Rule:
    name = "sgd_plain" if optimizer.name == "sgd" and not optimizer.momentum else optimizer.name
    if name not in RULES:
        raise NotModeled(f"optimizer {optimizer.name}", field="optimizer", accepted=", ".join(sorted(RULES)))
    return RULES[name]


def update(
    builder: Builder,
    optimizer: Optimizer,
    numels: Sequence[int],
    dtype: str,
    *,
    first: bool,
    device: str = "gpu",
    key: str = "optimizer",
) -> None:
    """`optimizer.step()` on tensors of `numels` elements; the first one creates the states, named after `key`."""
    rule, size = rule_of(optimizer), int(DTYPE_BYTES[dtype])
    total = sum(numels)
    impl = "cpu" if device == "host" else optimizer.impl
    if first and rule.states:
        builder.alloc(f"{key}_states", "optimizer_states", rule.states * size * total, device)
    if first and rule.counters:
        # adam.py _init_group: on the device if fused or capturable, else on the CPU
        builder.alloc(f"{key}_steps", "optimizer_states", 4 * len(numels), "gpu" if impl == "fused" else "host")
    if not total:
        return
    everything = rule.fused or Pass(sum(p.reads for p in rule.passes), sum(p.writes for p in rule.passes))
    if impl == "cpu":
        nbytes = (everything.reads + everything.writes) * size * total
        builder.launch(CPU, optimizer.name, "optimizer", CpuWork(optimizer.name, total, nbytes))
        return
    if impl == "fused" and rule.fused:
        lists = min(rule.fused.reads, 5)
        kernels: tuple[Memory, ...] = (
            foreach("optimizer", numels, rule.fused.reads * size, rule.fused.writes * size, lists),
        )
        temporary = 0
    elif impl == "loop":
        kernels = tuple(
            Memory("optimizer", p.reads * size * total, p.writes * size * total, len(numels)) for p in rule.passes
        )
        temporary = rule.loop_temporaries * size * max(numels)
    else:
        kernels = tuple(foreach("optimizer", numels, p.reads * size, p.writes * size, p.reads) for p in rule.passes)
        temporary = rule.temporaries * size * total
    builder.launch(
        COMPUTE, optimizer.name, "optimizer", Compute(kernels), temp_peak=temporary, temp_category="workspace"
    )


def grad_norm(builder: Builder, numels: Sequence[int], dtype: str) -> None:
    """torch.nn.utils.clip_grad.get_total_norm: a norm per tensor, then one of the stacked norms."""
    kernel = foreach("grad_norm", numels, DTYPE_BYTES[dtype], 0, 1)
    builder.launch(COMPUTE, "grad norm", "optimizer", Compute((kernel,)))


def clip(builder: Builder, numels: Sequence[int], dtype: str) -> None:
    """torch.nn.utils.clip_grad.clip_grads_with_norm_: scales every gradient, without asking whether it has to."""
    size = DTYPE_BYTES[dtype]
    builder.launch(COMPUTE, "clip", "optimizer", Compute((foreach("grad_norm", numels, size, size, 1),)))
