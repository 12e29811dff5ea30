"""Muon's arithmetic against torch's own count of it; who refuses it. Its collectives and bytes: validation/oracles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import zsim
from zsim.errors import InputError, NotModeled
from zsim.model.kernels import Gemm
from zsim.plan.deepspeed import read_document
from zsim.plan.hjson import parse_hjson
from zsim.program.muon import newton_schulz

SCENARIO = Path(__file__).parents[2] / "scenarios" / "qwen7b_8xh100.yaml"
SHAPES = [(64, 64), (48, 96), (96, 48), (32, 160)]


def flops(shape: tuple[int, ...], method: str) -> float:
    return sum(kernel.flops for kernel in newton_schulz(shape, method) if isinstance(kernel, Gemm))


def counted(function: Any, shape: tuple[int, ...], *arguments: Any) -> int:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        function(torch.ones(shape), *arguments)
    return counter.get_total_flops()


@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_torch(shape: tuple[int, int]) -> None:
    muon = pytest.importorskip("torch.optim._muon")
    assert flops(shape, "standard") == counted(muon._zeropower_via_newtonschulz, shape, (3.4, -4.8, 2.0), 5, 1e-7)


@pytest.mark.parametrize("shape", [*SHAPES, (3, 32, 48)])
@pytest.mark.parametrize("method", ["gram", "standard"])
def test_products_of_deepspeed(shape: tuple[int, ...], method: str) -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.zero.muon import original_muon

    name = {"gram": "zeropower_via_gram_newtonschulz", "standard": "zeropower_via_newtonschulz5"}[method]
    function = getattr(original_muon, name)
    assert flops(shape, method) == counted(getattr(function, "_torchdynamo_orig_callable", function), shape, 5)


@pytest.mark.parametrize(
    ("overrides", "kind", "says"),
    [
        (["zero={stage: 3}"], InputError, "Muon and reduce scatter cannot be used together"),
        (["zero={stage: 2, offload_optimizer: cpu}"], NotModeled, "Muon with offloading"),
        (["zero={stage: 0}"], NotModeled, "Muon without ZeRO"),
        (["framework=fsdp2", "zero=null"], NotModeled, "DTensor picks the collectives"),
        (["framework=fsdp1", "zero=null"], InputError, "FSDP1 cuts flat vectors"),
    ],
)
def test_who_refuses_it(overrides: list[str], kind: type[InputError], says: str) -> None:
    with pytest.raises(kind, match=says):
        zsim.simulate(SCENARIO, ["optimizer=muon", *overrides])


def test_a_momentum_where_adam_has_two_states() -> None:
    """Stage 2 of 8 ranks: the momentum of bfloat16 matrices, twice and whole where their edge is another rank's;
    Adam's states of embedding and head."""
    states = {
        name: zsim.simulate(SCENARIO, [f"optimizer={name}", "zero={stage: 2}"]).gpu.by_category["optimizer_states"]
        for name in ("muon", "adamw")
    }
    params, embedding = 7_615_616_512, 2 * 152_064 * 3_584
    assert states["adamw"] == pytest.approx(8 * params / 8, rel=1e-3)
    even = (4 * (params - embedding) + 8 * embedding) / 8
    assert even < states["muon"] < even + 2 * 4 * 18_944 * 3_584


def test_deepspeeds_file() -> None:
    text = '{"optimizer": {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 1e-4, "ns_method": "standard"}}}'
    fields = read_document(parse_hjson(text, "ds.json")).fields
    assert (fields["optimizer", "name"], fields["optimizer", "ns_method"]) == ("muon", "standard")
