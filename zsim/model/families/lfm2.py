"""LFM2 and its mixture of experts: short convolutions in most layers, attention in the others.

Module and parameter names, and the order of calls, are those of transformers 5.24 (`modeling_lfm2.py`,
`modeling_lfm2_moe.py`).
"""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model import products as P
from zsim.model.attention import Rotary, causal_mask, positions
from zsim.model.causal_conv import causal_conv1d
from zsim.model.decoder import run_block
from zsim.model.families import llama, moe
from zsim.model.graph import Tensor
from zsim.model.layers import Blocks, Convolution, Embedding, Linear, Module, Net, RMSNorm, Weight

PREFIX = {"lfm2": "Lfm2", "lfm2_moe": "Lfm2Moe"}


class Attention(llama.Attention):
    def __init__(self, net: Net, prefix: str) -> None:
        Module.__init__(self, net)
        arch, d = net.arch, net.arch.head_dim
        self.class_name, self.window, self.rotates = f"{prefix}Attention", None, True
        self.q_proj = Linear(net, arch.hidden, arch.heads * d)
        self.k_proj = Linear(net, arch.hidden, arch.kv_heads * d)
        self.v_proj = Linear(net, arch.hidden, arch.kv_heads * d)
        self.out_proj = Linear(net, arch.heads * d, arch.hidden)
        self.q_layernorm = RMSNorm(net, d, f"{prefix}RMSNorm")
        self.k_layernorm = RMSNorm(net, d, f"{prefix}RMSNorm")

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (b, s, _), d = x.shape, self.net.arch.head_dim
        q = F.transpose(self.q_layernorm(F.reshape(self.q_proj(x), b, s, -1, d)), 1, 2)
        k = F.transpose(self.k_layernorm(F.reshape(self.k_proj(x), b, s, -1, d)), 1, 2)
        return q, k, llama.split_heads(self.v_proj(x), d)

    def projected(self, out: Tensor) -> Tensor:
        return self.out_proj(out)


class ShortConv(Module):
    """Reads the weight of its convolution, which is never called."""

    kind = "convolution"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        width, bias = net.arch.hidden, net.arch.conv_bias
        self.class_name = f"{prefix}ShortConv"
        self.conv = Convolution(net, width, net.arch.conv_kernel, bias)
        self.in_proj = Linear(net, width, 3 * width, bias)
        self.out_proj = Linear(net, width, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        width = self.net.arch.hidden
        projected = F.transpose(self.in_proj(x), -1, -2)
        before, after, x = F.split(projected, [width] * 3, dim=-2)
        mixed = F.mul(before, x)
        self.net.tape.read(self.conv.weight, self.conv.bias)
        mixed = causal_conv1d(mixed, self.conv.weight, self.conv.bias)
        y = F.mul(after, mixed)
        y = F.contiguous(F.transpose(y, -1, -2))
        return self.out_proj(y)


class MLP(Module):
    kind = "activation"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        hidden, width = net.arch.hidden, net.arch.intermediate
        self.class_name = f"{prefix}MLP"
        self.w1 = Linear(net, hidden, width)
        self.w3 = Linear(net, hidden, width)
        self.w2 = Linear(net, width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.mul(F.activation(self.w1(x)), self.w3(x)))


class Router(Module):
    """Sigmoid scores; a bias that no gradient reaches takes part in the choice."""

    kind = "router"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}TopKRouter"
        self.weight = Weight(net, net.arch.experts.experts, net.arch.hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        experts = self.net.arch.experts
        logits = P.linear(x, self.weight)
        values = F.activation_by_result(logits)
        if experts.bias:
            choice = F.pointwise(values.detach(), dtype="float32")
            _best, chosen = P.topk(choice, experts.top_k)
            values = F.to(P.gather_last(values, chosen), logits.dtype)
        else:
            values, chosen = P.topk(values, experts.top_k)
        if experts.norm_top_k:
            values = F.divide(values, F.shift(F.sum_last(values)))
        return logits, F.scale(values), chosen


class Experts(moe.Experts):
    """Their activation is a function, not a module."""

    def __init__(self, net: Net, prefix: str) -> None:
        Module.__init__(self, net)
        hidden, experts = net.arch.hidden, net.arch.experts
        self.class_name = f"{prefix}Experts"
        self.gate_up_proj = Weight(net, experts.experts, 2 * experts.intermediate, hidden, expert=True)
        self.down_proj = Weight(net, experts.experts, hidden, experts.intermediate, expert=True)

    def gated(self, out: Tensor) -> Tensor:
        gate, up = F.split(out, [self.net.arch.experts.intermediate] * 2)
        return F.mul(F.activation(gate), up)


class SparseMoeBlock(Module):
    kind = "experts"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}SparseMoeBlock"
        self.experts = Experts(net, prefix)
        self.gate = Router(net, prefix)

    def forward(self, x: Tensor) -> Tensor:
        flat = F.reshape(x, -1, x.shape[-1])
        _logits, weights, chosen = self.gate(flat)
        out = self.experts(flat, chosen, weights)
        return F.reshape(out, *x.shape)


class Block(Module):
    kind = "residual"

    def __init__(self, net: Net, prefix: str, index: int) -> None:
        super().__init__(net)
        kind = net.arch.kinds[index]
        self.class_name = f"{prefix}DecoderLayer"
        self.attends = kind.mixer == "attention"
        if self.attends:
            self.self_attn = Attention(net, prefix)
        else:
            self.conv = ShortConv(net, prefix)
        self.feed_forward = (SparseMoeBlock if kind.sparse else MLP)(net, prefix)
        self.operator_norm = RMSNorm(net, net.arch.hidden, f"{prefix}RMSNorm")
        self.ffn_norm = RMSNorm(net, net.arch.hidden, f"{prefix}RMSNorm")

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        residual = x
        if self.attends:
            x, _weights = self.self_attn(self.operator_norm(x), *context)
        else:
            x = self.conv(self.operator_norm(x))
        x = F.add(x, residual)
        return F.add(x, self.feed_forward(self.ffn_norm(x)))


class Model(Module):
    """All layers are given the rotary tables, those with attention the mask."""

    kind = "copy"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        arch = net.arch
        self.class_name = f"{prefix}Model"
        self.embed_tokens = Embedding(net, arch.vocab, arch.hidden)
        self.layers = Blocks(net, arch.kinds, lambda index: Block(net, prefix, index))
        tables = Rotary(net, arch.head_dim, f"{prefix}RotaryEmbedding")
        if prefix == "Lfm2":
            self.rotary_emb = tables
        else:
            self.pos_emb = tables
        self.tables = tables.__call__
        self.embedding_norm = RMSNorm(net, arch.hidden, f"{prefix}RMSNorm")
        self.embedding_norm.role = "norm"

    def forward(self, ids: Tensor) -> Tensor:
        net = self.net
        x = embeds = self.embed_tokens(ids)  # noqa: F841  the name outlives the blocks
        position_ids = positions(net, ids)
        mask = causal_mask(net, *ids.shape)
        cos, sin = self.tables(x, position_ids)
        for block in self.layers:
            x = run_block(net, block, x, cos, sin, mask if block.attends else None)  # type: ignore[attr-defined]
        return self.embedding_norm(x)

    def buffers_bytes(self) -> int:
        """Besides the rotary frequencies the float32 biases that take part in the choice of experts."""
        arch = self.net.arch
        biased = sum(kind.sparse for kind in arch.kinds) if arch.moe and arch.moe.bias else 0
        return super().buffers_bytes() + 4 * biased * (arch.experts.experts if biased else 0)


class Lfm2ForCausalLM(llama.LlamaForCausalLM):
    def __init__(self, net: Net) -> None:
        super().__init__(net, PREFIX[net.arch.family])

    def decoder(self, prefix: str) -> Model:  # type: ignore[override]
        return Model(self.net, prefix)
