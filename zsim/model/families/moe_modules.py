"""Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V2 and V3, GLM-4.5, dots.llm1 and HunYuan-A13B before transformers 5:
a module for each expert, called one after the other.

Each expert picks its tokens by a mask, for which the host waits until the GPU has found them; DeepSeek-V2 sorts them by
expert, and waits for how many each has. Routing is taken as even, so every expert is called on every rank and has its
share of the rows, the first ones one more. Code of transformers 4.45 to 4.57 (modeling_mixtral.py
`MixtralSparseMoeBlock`, modeling_deepseek_v3.py `DeepseekV3MoE`, their copies, and modeling_deepseek_v2.py
`DeepseekV2MoE`).
"""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model import products as P
from zsim.model.families import deepseek, llama
from zsim.model.families.moe import Block as PackedBlock
from zsim.model.graph import Tensor
from zsim.model.kernels import WAIT
from zsim.model.layers import Activation, Linear, Module, ModuleList, Net
from zsim.model.views import clone


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
    gate: Module

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
        weights, chosen = self.best(logits, x.dtype)
        final, _mask = self.summed(x, chosen, weights)
        if moe.shared:
            shared = self.shared_expert(x)
            shared = F.mul(F.activation_by_result(self.shared_expert_gate(x)), shared)
            final = F.add(final, shared)
        return F.reshape(final, b, s, width), logits

    def best(self, logits: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
        moe = self.net.arch.experts
        weights, chosen = P.topk(P.softmax(F.to(logits, "float32")), moe.top_k)
        if moe.norm_top_k:
            weights = F.divide(weights, F.sum_last(weights), in_place=True)
        return F.to(weights, dtype), chosen

    def summed(self, x: Tensor, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """What experts make of the tokens, and the mask, which its caller's frame keeps."""
        width = x.shape[-1]
        final = self.zeros(x.shape[0], width, x.dtype)
        mask = F.permute(self.mask(chosen), 2, 1, 0)
        hit = self._hit(mask) if self.net.arch.experts.modules == "hit" else None
        for number, expert in enumerate(self.experts.children.values()):
            found = self.found(self._own(mask, hit), self.rows(chosen, number))
            current_state = F.reshape(P.gather(x, found[1]), -1, width)
            current_hidden_states = F.mul(expert(current_state), self._weights_of(weights, found))
            final = index_add(final, found[1], current_hidden_states)
        return final, mask

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


class HunYuanGate(Module):
    kind = "router"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}Gate"
        self.wg = Linear(net, net.arch.hidden, net.arch.experts.experts)

    def forward(self, x: Tensor) -> Tensor:
        return self.wg(F.reshape(x, -1, x.shape[-1]))


class HunYuanMoE(SparseMoeBlock):
    """Beside an expert that sees all tokens, first. Its gate has the run's dtype, as engines make it of all."""

    def __init__(self, net: Net, prefix: str) -> None:
        ExpertModules.__init__(self, net)
        self.class_name = f"{prefix}Moe"
        self.gate = HunYuanGate(net, prefix)
        self.experts = self._experts(prefix)
        self.shared_mlp = llama.MLP(net, prefix)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        shared = self.shared_mlp(x)
        logits = self.gate(x)
        weights, chosen = self.best(logits, x.dtype)
        final, _mask = self.summed(F.reshape(x, -1, x.shape[-1]), chosen, weights)
        return F.add(F.reshape(final, *x.shape), shared)


class GroupedMoE(ExpertModules):
    """DeepSeek-V3's, beside experts that see all tokens: weights and sums are float32."""

    router: type[deepseek.Router] = deepseek.Router

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}MoE"
        self.experts = self._experts(prefix)
        self.gate = self.router(net, prefix)
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


class V2Gate(deepseek.V2Router):
    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net, prefix)
        self.class_name = f"{prefix}MoEGate"


class V2MoE(GroupedMoE):
    """Rows are sorted by expert. Each expert gets a slice of them, whose gradient is as long as all rows; what they
    return is alive until all have run."""

    router = V2Gate

    def _sum(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        tokens, top_k = chosen.shape
        counts = F.pointwise(chosen, shape=(tokens, self.net.arch.experts.experts))
        per_expert = F.pointwise(counts, shape=(self.net.arch.experts.experts,))
        order = F.pointwise(chosen, shape=(tokens * top_k,))
        ordered = P.gather(x, F.pointwise(order))
        outputs, start, end = [], 0, F.pointwise(per_expert, shape=())
        for number, expert in enumerate(self.experts.children.values()):
            self.wait()  # for whether it has any
            end = F.pointwise(end)
            self.wait()  # for the end of its rows
            if number:
                self.wait()  # and their start
            rows = F.narrow(ordered, 0, self.rows(chosen, number))
            start += self.rows(chosen, number)
            outputs.append(expert(rows))
        out = F.cat(outputs, 0)
        back = put_rows(out, order)
        weights = F.reshape(weights, tokens, top_k, 1)
        weighted = F.sum_middle(multiplied(F.to(F.reshape(back, tokens, top_k, -1), weights.dtype), weights))
        return F.to(weighted, x.dtype)


def put_rows(x: Tensor, rows: Tensor) -> Tensor:
    """`empty[rows] = x`: saves the rows; backward picks them."""
    saved = x.tape.save(rows) if x.needs_grad else None
    out = F.pointwise(x, rows)
    if saved is not None:
        x.tape.link((x,), lambda g: (F.pointwise(g, *saved()),), out)
    return out


def multiplied(x: Tensor, by: Tensor) -> Tensor:
    """`x.mul_(by)`: saves a copy of what was there before."""
    if not (x.needs_grad or by.needs_grad):
        x.tape.memory(x.nbytes + by.nbytes, x.nbytes)
        return x
    before = clone(x)
    saved = x.tape.save(before, by)
    del before
    out = F.view_of(x, x.shape, x.strides)
    x.tape.memory(x.nbytes + by.nbytes, x.nbytes)

    def backward(g: Tensor) -> tuple[Tensor, Tensor]:
        before, by = saved()
        grad_by = F.binary(g, before)
        return F.binary(g, by), grad_by

    x.tape.link((x, by), backward, out)
    return out


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
