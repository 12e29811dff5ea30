"""bf16_master_weights_and_grads and torch_autocast: who may have them. Their bytes and calls: validation/oracles."""

from __future__ import annotations

from typing import Any

import pytest

from tests.program.offloaded import MODEL, WORKLOAD
from zsim.cluster.spec import Host
from zsim.cost.host import cpu_seconds
from zsim.cost.profile import load_profile
from zsim.document import Document
from zsim.errors import InputError, NotModeled
from zsim.model.huggingface import from_config
from zsim.model.kernels import Gemm
from zsim.model.spec import ModelSpec, Workload
from zsim.model.trace import trace
from zsim.plan.deepspeed import read_document
from zsim.plan.spec import DeepSpeedPlan, Optimizer
from zsim.program.deepspeed import check, master_dtype, state_dtype
from zsim.program.lower import lower, under
from zsim.program.ops import Alloc, Compute, Copy, CpuWork, Launch, Op, Program

BOTH = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}

CPU_ADAM, LION = Optimizer(impl="cpu"), Optimizer("lion", impl="cpu")


@pytest.mark.parametrize(
    ("fields", "kind", "says"),
    [
        ({"stage": 2, "bf16_master_weights_and_grads": True}, InputError, "requires offloading with DeepSpeedCPUAdam"),
        ({"stage": 2, "bf16_optimizer_states": True}, InputError, "requires bf16_master_weights_and_grads"),
        ({"stage": 0, **BOTH}, InputError, "needs bf16 and stage 1, 2 or 3"),
        ({"stage": 3, "dtype": "float16", **BOTH}, InputError, "needs bf16"),
        ({"stage": 3, "offload_optimizer": "cpu", **BOTH}, InputError, "requires DeepSpeedCPUAdam"),
        ({"stage": 2, "offload_optimizer": "cpu", "optimizer": LION, **BOTH}, InputError, "requires DeepSpeedCPUAdam"),
        ({"stage": 3, "offload_optimizer": "nvme", "optimizer": CPU_ADAM, **BOTH}, InputError, "back from NVMe"),
        (
            {"stage": 3, "offload_optimizer": "cpu", "offload_optimizer_super_offload": True, "optimizer": CPU_ADAM}
            | BOTH,
            NotModeled,
            "SuperOffload",
        ),
        ({"stage": 2, "optimizer": Optimizer("muon"), **BOTH}, NotModeled, "Muon beside"),
    ],
)
def test_refused(fields: dict[str, Any], kind: type[InputError], says: str) -> None:
    with pytest.raises(kind, match=says):
        check(DeepSpeedPlan(world_size=2, **fields))


def test_the_type_of_master_weights() -> None:
    assert master_dtype(DeepSpeedPlan(world_size=2, stage=3, **BOTH)) == "bfloat16"  # type: ignore[arg-type]
    assert master_dtype(DeepSpeedPlan(world_size=2, stage=3)) == "float32"


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({}, "float32"),
        ({"bf16_optimizer_states": True}, "bfloat16"),
        ({"bf16_optimizer_states": True, "version": "0.18.3"}, "float32"),
    ],
)
def test_the_type_of_moments_on_the_host(fields: dict[str, Any], dtype: str) -> None:
    plan = DeepSpeedPlan(
        world_size=2, stage=3, offload_optimizer="cpu", bf16_master_weights_and_grads=True, optimizer=CPU_ADAM, **fields
    )
    check(plan)
    assert state_dtype(plan) == dtype


def on_the_cpu(stage: int, masters: str, states: str = "float32", **fields: Any) -> Program:
    low = {"bf16_master_weights_and_grads": masters == "bfloat16", "bf16_optimizer_states": states == "bfloat16"}
    plan = DeepSpeedPlan(
        world_size=2, stage=stage, offload_optimizer="cpu", optimizer=CPU_ADAM, grad_clip=1.0, **low, **fields
    )
    return lower(MODEL, trace(MODEL, WORKLOAD), plan, WORKLOAD)


def ops(program: Program) -> list[Op]:
    return [item.op for item in program.steps[-1] if isinstance(item, Launch)]


def moved(program: Program, label: str) -> float:
    return sum(op.work.nbytes for op in ops(program) if isinstance(op.work, Copy) and op.label == label)


def owned(program: Program) -> int:
    """Elements that the rank's optimizer steps."""
    return sum(op.work.numel for op in ops(program) if op.label == "adamw" and isinstance(op.work, CpuWork))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("masters", "states", "adam"),
    [("float32", "float32", 28), ("bfloat16", "float32", 22), ("bfloat16", "bfloat16", 14)],
)
def test_bytes_that_the_host_works_through(stage: int, masters: str, states: str, adam: int) -> None:
    """csrc/adam/cpu_adam_impl.cpp reads weight, gradient and two moments and writes all but the gradient, each in its
    type; scaling reads and writes gradients, the copy back reads weights."""
    program = on_the_cpu(stage, masters, states)
    numel, size = owned(program), 4 if masters == "float32" else 2
    work = [op.work for op in ops(program) if isinstance(op.work, CpuWork)]
    nbytes = {label: sum(item.nbytes for item in work if item.label == label) for label in ("adamw", "scale", "cast")}
    assert nbytes["adamw"] == adam * numel
    assert nbytes["scale"] == 2 * size * numel
    # stage 3 copies equal types straight to the GPU; stages 1 and 2 by way of a pinned buffer
    assert nbytes["cast"] == (0 if stage == 3 and size == 2 else (size + 2) * numel)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_go_to_the_host_as_they_are(stage: int) -> None:
    low, full = (on_the_cpu(stage, masters) for masters in ("bfloat16", "float32"))
    assert any(isinstance(item, Alloc) and "cast" in item.key for item in full.steps[-1])
    assert not any(isinstance(item, Alloc) and "cast" in item.key for item in low.steps[-1])
    down = [moved(program, "offload gradient") for program in (full, low)]
    numel = sum(parameter.numel for parameter in MODEL.parameters) // 2
    again = 2 * numel if stage == 3 else 0  # to the buffer of gradient shards
    assert down[0] - again == pytest.approx(4 * numel, rel=0.01)
    assert down[1] - again == pytest.approx(2 * numel, rel=0.01)


def test_sums_of_micro_steps_are_of_the_part_that_the_rank_owns() -> None:
    """stage_1_and_2.py, async_accumulate_grad_in_cpu_via_gpu: not whole gradients, and in no buffer of their own."""
    low, full = (on_the_cpu(2, masters, grad_accum=2) for masters in ("bfloat16", "float32"))
    assert any("summed" in item.key for item in full.steps[0] if isinstance(item, Alloc))
    assert not any("summed" in item.key for item in low.steps[0] if isinstance(item, Alloc))
    assert moved(low, "fetch gradient") == pytest.approx(2 * owned(low), rel=0.01)
    assert moved(full, "fetch gradient") >= moved(low, "fetch gradient")


def test_float32_sums_are_cast_for_the_host() -> None:
    program = on_the_cpu(3, "bfloat16", grad_accum_dtype="float32", grad_accum=2)
    casts = [item for item in program.steps[-1] if isinstance(item, Alloc) and item.key.endswith("cast")]
    assert sum(item.nbytes for item in casts) == pytest.approx(2 * owned(program), rel=0.01)


@pytest.mark.parametrize(("avx512", "seconds"), [(True, 0.61e-9), (False, 2.9e-9)])
def test_a_core_converts_every_weight(avx512: bool, seconds: float) -> None:
    """Of one thread the arithmetic is the limit, of many what they read and write."""
    host = Host(1, 64, 1 << 40, 200e9, vendor="amd", avx512=avx512)
    work = next(op.work for op in ops(on_the_cpu(3, "bfloat16")) if isinstance(op.work, CpuWork) and op.work.moments)
    cost = load_profile("H100-SXM").cpu
    alone = cpu_seconds(work, cost, host, 1, 1)
    assert alone == pytest.approx(work.numel * max(seconds, 22 / cost.thread_bandwidth["amd"]))
    assert cpu_seconds(work, cost, host, 1, 64) == pytest.approx(work.nbytes / (200e9 * cost.dram_efficiency))
    plain = next(op.work for op in ops(on_the_cpu(3, "float32")) if op.label == "adamw")
    assert isinstance(plain, CpuWork)
    assert plain.moments is None


def test_autocast_over_the_models_own_type_widens_operators() -> None:
    """GPT-2's norms: their input is cast to float32, and what they return to bf16 again for the products."""
    plan = DeepSpeedPlan(world_size=2, stage=3, torch_autocast="bfloat16")
    workload = under(plan, WORKLOAD)
    assert (workload.weights, workload.dtype) == ("bfloat16", "bfloat16")
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": 16}
    model = from_config({"model_type": "gpt2", **sizes}, "small")
    counts = [
        sum(len(kernels(op)) for op in ops(lower(model, trace(model, work), plan, work)) if op.phase == "forward")
        for work in (WORKLOAD, workload)
    ]
    assert counts[1] - counts[0] >= 5  # one for each norm, at least
    assert kernels_of_products(plan, model, WORKLOAD) == kernels_of_products(plan, model, workload)


def kernels_of_products(plan: DeepSpeedPlan, model: ModelSpec, workload: Workload) -> list[str]:
    found = [kernel for op in ops(lower(model, trace(model, workload), plan, workload)) for kernel in kernels(op)]
    return [str(kernel) for kernel in found if isinstance(kernel, Gemm)]


def kernels(op: Op) -> tuple[Any, ...]:
    return op.work.kernels if isinstance(op.work, Compute) else ()


def read(**sections: Any) -> Any:
    return read_document(Document("ds.json", {"train_micro_batch_size_per_gpu": 1, **sections}))


def test_autocast_over_its_own_type_is_said_and_over_another_refused() -> None:
    autocast = {"enabled": True, "dtype": "torch.bfloat16"}
    said = read(bf16={"enabled": True}, torch_autocast=autocast)
    assert (said.fields["zero", "torch_autocast"], said.not_modeled) == ("bfloat16", [])
    for precision in ({}, {"fp16": {"enabled": True}}):
        with pytest.raises(NotModeled, match="parameters travel in two types"):
            read(torch_autocast=autocast, **precision)


def test_immediate_updates_belong_to_one_optimizer() -> None:
    section = {"bf16": {"enabled": True, "immediate_grad_update": True}}
    assert any("immediate_grad_update" in text for text in read(**section).without_effect)
    with pytest.raises(NotModeled, match="added to float32 ones by hooks"):
        read(**section, zero_optimization={"stage": 1}, data_types={"grad_accum_dtype": "fp32"})
