"""Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE: Llama blocks whose MLP is a router and experts, three-dimensional tensors.

The experts run as transformers' `grouped_mm` implementation does: tokens are sorted by expert, two grouped products,
back in order, summed over the chosen experts in float32. Routing is taken as even, which the shapes of all tensors do
not depend on; only the expert's shares of the products do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from zsim.model import functional as F
from zsim.model import products as P
from zsim.model.families import llama, relatives
from zsim.model.graph import Tensor
from zsim.model.layers import Activation, Linear, Module, Net, Weight

if TYPE_CHECKING:
    from zsim.model.packed_experts import Packing


class Router(Module):
    kind = "router"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}TopKRouter"
        self.weight = Weight(net, net.arch.experts.experts, net.arch.hidden)
        self.mixtral = prefix == "Mixtral"

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        moe = self.net.arch.experts
        logits = self.scored(x)
        probabilities = P.softmax(F.to(logits, "float32"))
        values, chosen = P.topk(probabilities, moe.top_k)
        if moe.norm_top_k:
            values = F.divide(values, F.sum_last(values), in_place=True)
        if not self.mixtral:
            values = F.to(values, logits.dtype)
        return logits, values, chosen

    def scored(self, x: Tensor) -> Tensor:
        return P.linear(x, self.weight)


class Experts(Module):
    kind = "experts"
    adapted: Mapping[str, Callable[[], Tensor]] = MappingProxyType({})  # what peft puts in a weight's place for a call
    packing: Packing | None = None  # of its weights in 4 bits

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        arch, moe = net.arch, net.arch.experts
        self.class_name = f"{prefix}Experts"
        self.gate_up_proj = Weight(net, moe.experts, 2 * moe.intermediate, arch.hidden, expert=True)
        self.down_proj = Weight(net, moe.experts, arch.hidden, moe.intermediate, expert=True)
        self.act_fn = Activation(net, arch.activation)

    def __call__(self, *args: Any) -> Any:
        try:
            return super().__call__(*args)
        finally:
            if self.packing:
                self.packing.cache.clear()

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        tape, moe = self.net.tape, self.net.arch.experts
        tokens, width = x.shape
        rows = tokens * moe.top_k
        sample_weights = F.reshape(weights, -1)
        expert_ids = F.reshape(chosen, -1)
        ordered, order = tape.empty((rows,), "int64"), tape.empty((rows,), "int64")
        tape.memory(expert_ids.nbytes, ordered.nbytes + order.nbytes)
        picked = P.gather(x, F.pointwise(order))
        picked_weights = P.gather(sample_weights, order)
        wide = F.pointwise(ordered, dtype="int32" if tape.cuda else "float32")
        per_expert = F.pointwise(wide, shape=(moe.experts,))
        offsets = F.pointwise(per_expert, dtype="int32")
        biases = self.biases("gate_up_proj", ordered)
        tape.part()
        out = self.product(picked, self.first(), offsets, biases)
        tape.part()
        out = self.gated(out)
        biases = self.biases("down_proj", ordered)
        tape.part()
        out = self.product(out, self.taken("down_proj"), offsets, biases)
        tape.part()
        weighted = F.mul(out, F.reshape(picked_weights, rows, 1))
        inverse = tape.empty((rows,), "int64")
        self._invert(order, inverse)
        weighted = P.gather(weighted, inverse)
        final = F.sum_middle(F.reshape(weighted, tokens, moe.top_k, width))
        return F.to(final, x.dtype)

    def first(self) -> Tensor:
        return self.taken("gate_up_proj")

    def taken(self, name: str) -> Tensor:
        if name in self.adapted:
            return self.adapted[name]()
        return self.packing.weight(name, self.weights[name]) if self.packing else self.weights[name]

    def biases(self, name: str, ordered: Tensor) -> Tensor | None:
        """Those of each row's expert."""
        return None

    def product(self, x: Tensor, weight: Tensor, offsets: Tensor, biases: Tensor | None) -> Tensor:
        return P.grouped_linear(x, weight, offsets)

    def gated(self, out: Tensor) -> Tensor:
        width = self.net.arch.experts.intermediate
        gate, up = F.split(out, [width, width])
        return F.mul(self.act_fn(gate), up)

    def _invert(self, order: Tensor, inverse: Tensor) -> None:
        """`inverse[order] = arange(rows)`."""
        tape = self.net.tape
        numbers = tape.empty(order.shape, "int64")
        tape.memory(0, numbers.nbytes)
        tape.memory(2 * order.nbytes + inverse.nbytes, inverse.nbytes)


class SparseMoeBlock(Module):
    kind = "experts"
    router: type[Module] = Router

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}SparseMoeBlock"
        if not prefix.startswith(("Qwen3Moe", "Qwen3VL", "Qwen3Omni", "Mellum")):
            self.gate = self.router(net, prefix)  # type: ignore[call-arg]
            self.experts = Experts(net, prefix)
        else:
            self.experts = Experts(net, prefix)
            self.gate = self.router(net, prefix)  # type: ignore[call-arg]

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        flat = F.reshape(x, -1, h)
        _logits, weights, chosen = self.gate(flat)
        out = self.experts(flat, chosen, weights)
        return F.reshape(out, b, s, h)


class SharedMoeBlock(SparseMoeBlock):
    """Next to the chosen experts one that all tokens go through, behind a gate (Qwen2-MoE)."""

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net, prefix)
        self.shared_expert = llama.MLP(net, prefix, net.arch.experts.shared)
        self.shared_expert_gate = Linear(net, net.arch.hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        flat = F.reshape(x, -1, h)
        shared = self.shared_expert(flat)
        _logits, weights, chosen = self.gate(flat)
        out = self.experts(flat, chosen, weights)
        shared = F.mul(F.activation_by_result(self.shared_expert_gate(flat)), shared)
        out = F.add(out, shared)
        return F.reshape(out, b, s, h)


class OlmoeAttention(llama.Attention):
    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self.net.arch.clip_qkv:
            return super().heads(x)
        d = self.net.arch.head_dim
        q, k, v = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x)), self.v_proj(x)
        q, k, v = (relatives.clamped(x) for x in (q, k, v))
        return llama.split_heads(q, d), llama.split_heads(k, d), llama.split_heads(v, d)


class Block(llama.Block):
    def attention(self, prefix: str, index: int) -> llama.Attention:
        return (OlmoeAttention if prefix == "Olmoe" else llama.Attention)(self.net, prefix, index)

    def feed_forward(self, prefix: str, index: int) -> Module:
        if self.net.arch.kinds[index].sparse:
            if self.net.arch.experts.autoep_size:
                from zsim.model.families import autoep

                return autoep.AutoEPMoELayer(self.net, prefix)
            return (SharedMoeBlock if self.net.arch.experts.shared else SparseMoeBlock)(self.net, prefix)
        return llama.MLP(self.net, prefix)


class Model(relatives.Model):
    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net, prefix)
        # it makes both masks, whichever its layers use, and before transformers 5 one
        self.types = prefix == "Qwen2Moe" and not net.arch.experts.modules

    def block(self, prefix: str, index: int) -> Module:
        if self.net.arch.experts.modules:
            from zsim.model.families import moe_modules

            return moe_modules.Block(self.net, prefix, index)
        return Block(self.net, prefix, index)


class MoeForCausalLM(llama.LlamaForCausalLM):
    def decoder(self, prefix: str) -> Model:
        return Model(self.net, prefix)
