"""Adapters on the parameters of stacked experts: parameters, calls, gradients, bytes and FLOPs are peft's."""

from __future__ import annotations

import gzip
import json

import pytest

from tests.model import test_families
from tests.model.ledger import Ledger, flops
from zsim.errors import InputError, NotModeled
from zsim.model.huggingface import from_config
from zsim.model.lora import Lora, Tuning, tune
from zsim.model.spec import ModelSpec, Workload
from zsim.model.trace import trace
from zsim.plan.spec import Fsdp1Plan, Fsdp2Plan
from zsim.program.lower import lower

MODELS = json.loads(gzip.decompress((test_families.FOLDER / "families.json.gz").read_bytes()))["models"]
MODELS |= json.loads(gzip.decompress((test_families.FOLDER / "hybrids.json.gz").read_bytes()))["models"]
RECORDED = json.loads(gzip.decompress((test_families.FOLDER / "param_adapters.json.gz").read_bytes()))["models"][
    "steps"
]

UNSEEN = 7_184  # of 905,280 bytes, where one of two tensors is adapted: what the second run of a block holds besides


def adapted(name: str, targets: tuple[str, ...], parameters: tuple[str, ...] = (), **more: object) -> ModelSpec:
    lora = Lora(4, targets, parameters=parameters, **more)  # type: ignore[arg-type]
    return tune(from_config(MODELS[name]["config"], name), Tuning(lora))


@pytest.mark.parametrize(
    "number", range(len(RECORDED)), ids=[f"{n}-{each['model']}" for n, each in enumerate(RECORDED)]
)
def test_a_step_is_the_recorded_one(number: int) -> None:
    recorded = RECORDED[number]
    spec = adapted(recorded["model"], tuple(recorded["targets"]), tuple(recorded["target_parameters"] or ()))
    assert [[p.name, list(p.shape), p.module_class] for p in spec.parameters] == recorded["parameters"]
    for run in recorded["runs"]:
        ledger = Ledger.of_run(spec, run)
        assert ledger.calls == [tuple(call) for call in recorded["calls"]]
        assert ledger.ready == recorded["ready"]
        assert flops(ledger.forward_kernels) == run["flops"]["forward"]
        assert flops(ledger.backward_kernels) == run["flops"]["backward"]
        assert ledger.after_forward == run["after_forward"]
        unseen = UNSEEN if run["checkpointing"] == "full" and len(recorded["target_parameters"] or "23") == 1 else 0
        assert {"forward": ledger.peak_forward, "backward": ledger.peak_backward + unseen} == run["peak"]


def test_names_of_experts_become_parameters_and_nothing_else() -> None:
    """Two halves are one tensor, of twice the rank; dense layers and shared experts of that name get no adapter."""
    spec = adapted("glm4_moe", ("q_proj", "gate_proj", "up_proj", "down_proj"))
    halves = {p.name: p.shape for p in spec.parameters if ".lora_A." in p.name and ".mlp." in p.name}
    assert all(".experts." in name for name in halves)
    experts = spec.arch.moe.experts  # type: ignore[union-attr]
    assert {shape[0] for shape in halves.values()} == {8 * experts, 4 * experts}


@pytest.mark.parametrize(
    ("targets", "parameters", "error", "says"),
    [
        (("q_proj", "w1"), (), InputError, "w1 with w3 alone"),
        (("q_proj", "gate"), (), NotModeled, "on its router"),
        (("q_proj",), ("experts.gate_proj",), None, "no experts.gate_proj"),
        (("q_proj",), ("gate.weight",), NotModeled, "no stack of experts"),
        (("q_proj",), ("layers.0.mlp.experts.down_proj",), NotModeled, "some layers only"),
    ],
)
def test_what_is_refused_or_passed_over(
    targets: tuple[str, ...], parameters: tuple[str, ...], error: type[InputError] | None, says: str
) -> None:
    if error is None:
        assert says in adapted("mixtral", targets, parameters).notes[-1]
        return
    with pytest.raises(error, match=says):
        adapted("mixtral", targets, parameters)


def test_fsdp1_and_units_of_adapters_fail_on_them() -> None:
    spec, workload = adapted("mixtral", ("q_proj", "w1", "w2", "w3")), Workload(1, 16)
    tree = trace(spec, workload)
    with pytest.raises(InputError, match="on which FSDP1 fails") as caught:
        lower(spec, tree, Fsdp1Plan(world_size=2), workload)
    assert caught.value.accepted == "fsdp2, deepspeed, ddp"
    with pytest.raises(NotModeled, match="as units"):
        lower(spec, tree, Fsdp2Plan(world_size=2, adapter_units=True), workload)


def test_names_that_were_never_experts_are_passed_over() -> None:
    """GLM-4.7 Flash has q_a_proj and q_b_proj; peft takes what it finds."""
    spec = adapted("glm4_moe_lite", ("q_proj", "o_proj"))
    assert spec.notes[-1] == "lora.targets: the model has no q_proj, which peft passes over"
    assert {p.name.split(".lora_")[0].rpartition(".")[2] for p in spec.parameters if p.trainable} == {"o_proj"}
