"""Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V3, GLM-4.5 and dots.llm1 before transformers 5: a module for each
expert, called one after the other.

Each expert picks its tokens by a mask, for which the host waits until the GPU has found them. Routing is taken as
even, so every expert is called on every rank and has its share of the rows, the first ones one more. Code of
transformers 4.45 to 4.57 (modeling_mixtral.py `MixtralSparseMoeBlock`, modeling_deepseek_v3.py `DeepseekV3MoE`, and
their copies).
"""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model import products as P
from zsim.model.families import deepseek, llama
from zsim.model.families.moe import Block as PackedBlock
from zsim.model.graph import Tensor
from zsim.model.kernels import WAIT
from zsim.model.layers import Activation, Linear, Module, ModuleList, Net


class BlockSparseTop2MLP(Module):
    kind = "activation"
    class_name = "MixtralBlockSparseTop2MLP"

    def __init__(self, net: Net, width: int) -> None:
        super().__init__(net)
        hidden = net.arch.hidden
        self.w1 = Linear(net, hidden, width)
        self.w2 = Linear(net, width, hidden)
        self.w3 = Linear(net, hidden, width)
        self.act_fn = Activation(net, net.arch.activation)

    def forward(self, x: Tensor) -> Tensor:
        x = F.mul(self.act_fn(self.w1(x)), self.w3(x))
        return self.w2(x)


class ExpertModules(Module):
    kind = "experts"

    def _experts(self, prefix: str) -> ModuleList:
        return ModuleList(self.net, [self._expert(prefix) for _ in range(self.net.arch.experts.experts)])

    def _expert(self, prefix: str) -> Module:
        net, width = self.net, self.net.arch.experts.intermediate
        expert = BlockSparseTop2MLP(net, width) if prefix == "Mixtral" else llama.MLP(net, prefix, width)
        for child in expert.children.values():
            for weight in child.weights.values():
                weight.expert = True
        return expert

    def mask(self, chosen: Tensor) -> Tensor:
        """one_hot, [tokens, choices, experts] int64"""
        tape = self.net.tape
        mask = tape.empty((*chosen.shape, self.net.arch.experts.experts), "int64")
        tape.memory(chosen.nbytes, mask.nbytes + chosen.nbytes)
        return mask

    def rows(self, chosen: Tensor, number: int) -> int:
        experts = self.net.arch.experts.experts
        return (chosen.numel + experts - 1 - number) // experts

    def found(self, own: Tensor, rows: int) -> list[Tensor]:
        """torch.where: of each row that an expert gets its two places in the mask `own`."""
        tape = self.net.tape
        found = tape.empty((2, rows), "int64")  # as many as there are, side by side
        tape.memory(own.nbytes, found.nbytes)
        self.wait()
        return F.unbind(found, 0)

    def zeros(self, tokens: int, width: int, dtype: str) -> Tensor:
        final = self.net.tape.empty((tokens, width), dtype)
        self.net.tape.memory(0, final.nbytes)
        return final

    def wait(self) -> None:
        if self.net.tape.cuda:
            self.net.tape.kernel(WAIT)


class SparseMoeBlock(ExpertModules):
    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        moe = net.arch.experts
        self.class_name = f"{prefix}SparseMoeBlock"
        self.gate = Linear(net, net.arch.hidden, moe.experts)
        self.experts = self._experts(prefix)
        if moe.shared:
            self.shared_expert = llama.MLP(net, prefix, moe.shared)
            self.shared_expert_gate = Linear(net, net.arch.hidden, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        moe = self.net.arch.experts
        b, s, width = x.shape
        x = F.reshape(x, -1, width)
        logits = self.gate(x)
        weights = P.softmax(F.to(logits, "float32"))
        weights, chosen = P.topk(weights, moe.top_k)
        if moe.norm_top_k:
            weights = F.divide(weights, F.sum_last(weights), in_place=True)
        weights = F.to(weights, x.dtype)
        final = self.zeros(x.shape[0], width, x.dtype)
        mask = F.permute(self.mask(chosen), 2, 1, 0)
        hit = self._hit(mask) if moe.modules == "hit" else None
        for number, expert in enumerate(self.experts.children.values()):
            found = self.found(self._own(mask, hit), self.rows(chosen, number))
            current_state = F.reshape(P.gather(x, found[1]), -1, width)
            current_hidden_states = F.mul(expert(current_state), self._weights_of(weights, found))
            final = index_add(final, found[1], current_hidden_states)
        if moe.shared:
            shared = self.shared_expert(x)
            shared = F.mul(F.activation_by_result(self.shared_expert_gate(x)), shared)
            final = F.add(final, shared)
        return F.reshape(final, b, s, width), logits

    def _hit(self, mask: Tensor) -> Tensor:
        """The numbers of the experts that have tokens: a list, whose length the host has to know."""
        per_expert = F.pointwise(mask, shape=(mask.shape[0],))
        more = F.pointwise(per_expert, dtype="bool")
        hit = F.pointwise(more, shape=(mask.shape[0], 1), dtype="int64")
        self.wait()
        return hit

    def _own(self, mask: Tensor, hit: Tensor | None) -> Tensor:
        """An expert's part of the mask: which choice, which token."""
        if hit is None:
            return F.select(mask, 0)
        self.wait()  # for its number
        return F.pointwise(hit, F.select(mask, 0))

    def _weights_of(self, weights: Tensor, found: list[Tensor]) -> Tensor:
        """`weights[top_x, idx, None]`"""
        return F.reshape(P.gather(F.reshape(weights, -1), found[0]), -1, 1)


class GroupedMoE(ExpertModules):
    """DeepSeek-V3's, beside experts that see all tokens: weights and sums are float32."""

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}MoE"
        self.experts = self._experts(prefix)
        self.gate = deepseek.Router(net, prefix)
        self.shared_experts = llama.MLP(net, prefix, net.arch.experts.shared)

    def forward(self, x: Tensor) -> Tensor:
        chosen, weights = self._routed(x)
        out = F.reshape(self._sum(F.reshape(x, -1, x.shape[-1]), chosen, weights), *x.shape)
        return F.add(out, self.shared_experts(x))

    def _routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        _logits, weights, chosen = self.gate(x)
        return chosen, weights

    def _sum(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        final = self.zeros(x.shape[0], x.shape[1], weights.dtype)
        mask = F.permute(self.mask(chosen), 2, 0, 1)
        for number, expert in enumerate(self.experts.children.values()):
            token, choice = self.found(F.select(mask, 0), self.rows(chosen, number))
            expert_weights = P.gather(F.reshape(weights, -1), choice)
            expert_output = expert(P.gather(x, token))
            final = index_add(final, token, F.mul(expert_output, F.reshape(expert_weights, -1, 1)))
        return F.to(final, x.dtype)


def index_add(out: Tensor, rows: Tensor, source: Tensor) -> Tensor:
    """`out.index_add_(0, rows, source)`: saves the rows and, if for its shape alone, `source`; backward picks the rows
    of the gradient."""
    tape = out.tape
    saved = tape.save(rows, source) if source.needs_grad else None
    tape.memory(rows.nbytes + 2 * source.nbytes, source.nbytes)
    before = F.view_of(out, out.shape, out.strides)
    before.node, before.index = out.node, out.index
    if saved is None:
        return out
    shape, dtype = source.shape, source.dtype

    def backward(g: Tensor) -> tuple[Tensor | None, Tensor]:
        rows, source = saved()  # noqa: RUF059
        mine = tape.empty(shape, dtype)
        tape.memory(rows.nbytes + mine.nbytes, mine.nbytes)
        return g, mine

    tape.link((before, source), backward, out)
    return out


class Block(PackedBlock):
    def __init__(self, net: Net, prefix: str, index: int) -> None:
        super().__init__(net, prefix, index)
        if prefix == "Mixtral":  # the same place in the order of registration
            self.children = {"block_sparse_moe" if name == "mlp" else name: m for name, m in self.children.items()}

    def feed_forward(self, prefix: str, index: int) -> Module:
        return (SparseMoeBlock if self.net.arch.kinds[index].sparse else llama.MLP)(self.net, prefix)

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        residual = x
        x = self.input_layernorm(x)
        x, _weights = self.self_attn(x, *context)
        x = F.add(residual, x)
        residual = x
        x = self.post_attention_layernorm(x)
        x = self.mlp(x)
        if isinstance(x, tuple):
            x, _logits = x  # which live to the end
        return F.add(residual, x)
