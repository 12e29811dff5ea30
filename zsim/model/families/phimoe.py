"""Phi-3.5-MoE: two experts drawn one after the other (SparseMixer), LayerNorms, noise on what experts read.

Module and parameter names, and the order of calls, are those of transformers 5.24 (`modeling_phimoe.py`).
"""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model import products as P
from zsim.model.families import llama, moe, relatives
from zsim.model.graph import Tensor
from zsim.model.layers import LayerNorm, Linear, Module, Net
from zsim.model.views import clone


def drawn(scores: Tensor, among: Tensor) -> tuple[Tensor, Tensor]:
    """`sparsemixer`, one of its two rounds: the weight [t, 1] of an expert that is drawn, and which. PhimoeMultiplier
    hands a gradient to `scores` alone, past all that led to its other arguments and was saved for them."""
    tape, source, one = scores.tape, among.detach(), (scores.shape[0], 1)
    largest = F.pointwise(source, shape=one)
    factor = F.pointwise(F.pointwise(scores.detach()), largest)  # abs, clamp
    distance = F.pointwise(F.pointwise(source, largest), factor)
    far = F.pointwise(distance, dtype="bool")
    del distance
    gates = F.pointwise(source, far)
    noise = F.pointwise(F.pointwise(gates))  # exponential_, log
    chosen = F.pointwise(F.pointwise(gates, noise), shape=one, dtype="int64")
    del noise
    gates = P.softmax(gates)
    weight = P.gather_last(gates, chosen)
    largest, place = F.pointwise(gates, shape=one), F.pointwise(gates, shape=one, dtype="int64")
    is_largest = F.pointwise(F.pointwise(largest), place, chosen, dtype="bool")
    factor_of_third_order = F.to(F.pointwise(is_largest, dtype="float32"), gates.dtype)
    saved = tape.save(weight, chosen, gates, far)
    out = F.pointwise(weight, factor_of_third_order)

    def backward(g: Tensor) -> tuple[Tensor]:
        weight, _chosen, gates, *_ = saved()
        g = F.pointwise(g, weight)
        grad = F.pointwise(gates, F.pointwise(g))
        tape.memory(2 * g.nbytes, g.nbytes)  # scatter_add_
        return (grad,)

    tape.link((scores,), backward, out)
    return out, chosen


class Router(Linear):
    kind = "router"
    several_results = True
    class_name = "PhimoeTopKRouter"

    def __init__(self, net: Net) -> None:
        super().__init__(net, net.arch.hidden, net.arch.experts.experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        scores = super().forward(x)
        first, one = drawn(scores, scores)
        others = F.pointwise(scores.detach(), one)  # without the first
        second, two = drawn(scores, others)
        return scores, F.cat((first, second)), F.cat((one, two))


class MoE(Module):
    kind = "experts"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}SparseMoeBlock"
        self.router = Router(net)
        self.experts = moe.Experts(net, prefix)

    def forward(self, x: Tensor) -> Tensor:
        noise = self.net.arch.experts.noise
        x = noisy(x) if noise else x
        flat = F.reshape(x, -1, x.shape[-1])
        flat = noisy(flat, view=True) if noise else flat  # the router's own
        _scores, weights, chosen = self.router(flat)
        return F.reshape(self.experts(flat, chosen, weights), *x.shape)


def noisy(x: Tensor, view: bool = False) -> Tensor:
    """`x *= noise`. Of a view, backward goes through the whole (CopySlices): its copy, and one of the part."""
    tape = x.tape
    noise = F.pointwise(x)
    saved = tape.save(noise)
    del noise
    out = F.view_of(x, x.shape, x.strides)
    tape.memory(2 * x.nbytes, x.nbytes)

    def backward(g: Tensor) -> tuple[Tensor]:
        if not view:
            return (F.pointwise(g, *saved()),)
        whole = clone(g)
        part = F.pointwise(clone(whole), *saved())
        tape.memory(part.nbytes, part.nbytes)
        return (whole,)

    tape.link((x,), backward, out)
    return out


class Block(llama.Block):
    def __init__(self, net: Net, prefix: str, index: int) -> None:
        super().__init__(net, prefix, index)
        self.input_layernorm = LayerNorm(net, net.arch.hidden)
        self.post_attention_layernorm = LayerNorm(net, net.arch.hidden)

    def feed_forward(self, prefix: str, index: int) -> Module:
        return MoE(self.net, prefix)


class Model(relatives.Model):
    def block(self, prefix: str, index: int) -> Module:
        return Block(self.net, prefix, index)

    def final_norm(self, prefix: str) -> Module:
        return LayerNorm(self.net, self.net.arch.hidden)


class PhimoeForCausalLM(relatives.RelativeForCausalLM):
    models = {"phimoe": ("Phimoe", Model)}
