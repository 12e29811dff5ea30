"""Experts in 4 bits, as axolotl packs them with quantize_moe_experts (monkeypatch/moe_quant.py): bitsandbytes 0.50's
parametrization (nn/parametrize.py) on each tensor that stacks them.

A tensor is unpacked, outside the graph, when its module first asks for it, and stays until the module's call is over;
what the grouped products save of it stays until their backward.
"""

from __future__ import annotations

from zsim.errors import InputError, NotModeled
from zsim.model.graph import Tensor
from zsim.model.layers import Module, Net, Weight
from zsim.model.lora import unpacked

FIELD = "quantize.experts"


class Packing:
    """Of one module: what is unpacked during its call."""

    def __init__(self, net: Net, double_quant: bool) -> None:
        self.net, self.double_quant = net, double_quant
        self.cache: dict[str, Tensor] = {}

    def weight(self, name: str, weight: Weight) -> Tensor:
        if name not in self.cache:
            self.cache[name] = unpacked(self.net, weight.shape, self.net.dtype, self.double_quant)
        return self.cache[name]


def pack_experts(model: Module, net: Net, quantize: str | None, double_quant: bool) -> None:
    """Raises InputError for a model without stacked experts, NotModeled."""
    if quantize == "int8":
        what = "experts in 8 bits, which bitsandbytes unpacks to float32"
        raise NotModeled(what, field=FIELD, accepted="quantize.type: nf4 or fp4, or experts: false")
    if net.compile:
        raise NotModeled("torch.compile of experts in 4 bits", field="compile", accepted="false")
    stacked = [
        module
        for module in model.all_modules()
        if any(weight.expert and len(weight.shape) == 3 for weight in module.weights.values())
    ]
    if not stacked:
        accepted = "false, or framework.transformers: '5.0' where they are modules before"
        raise InputError("the model has no tensors that stack experts", field=FIELD, accepted=accepted)
    for module in stacked:
        if not hasattr(module, "packing") or module.class_name == "GptOssExperts":
            raise NotModeled(f"{module.class_name} in 4 bits", field=FIELD, accepted="false")
        module.packing = Packing(net, double_quant)
