"""DBRX (transformers 5.24, modeling_dbrx.py): one product for queries, keys and values, which are clipped; norms and
attention in a module of their own; and experts that are slices of three weights, called one after the other.

Each slice's gradient is a tensor as large as all of the weight. For each expert the host waits until the GPU has found
its number and its rows. Routing is taken as even.
"""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model import products as P
from zsim.model.attention import Rotary, attend, causal_mask, positions, rotate, split_heads
from zsim.model.decoder import CausalLM, head, run_block
from zsim.model.families.moe_modules import ExpertModules, index_add
from zsim.model.families.phimoe import noisy
from zsim.model.graph import Tensor
from zsim.model.layers import Activation, Blocks, Embedding, LayerNorm, Linear, Module, Net, Weight


class Attention(Module):
    kind = "rotary"
    class_name = "DbrxAttention"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.Wqkv = Linear(net, arch.hidden, arch.hidden + 2 * arch.kv_heads * arch.head_dim)
        self.out_proj = Linear(net, arch.hidden, arch.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        arch, d = self.net.arch, self.net.arch.head_dim
        qkv = self.Wqkv(x)
        qkv = F.clamped(qkv, 2)
        q, k, v = F.split(qkv, [arch.hidden, arch.kv_heads * d, arch.kv_heads * d])
        q, k, v = split_heads(q, d), split_heads(k, d), split_heads(v, d)
        cos, sin = F.unsqueeze(cos, 1), F.unsqueeze(sin, 1)
        turned, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q = turned
        del turned
        out, weights = attend(self.net, q, k, v, mask, None, arch.attention_dropout)
        return self.out_proj(out), weights


class ExpertGLU(Module):
    """Holds the weights of all experts, and is called with one's slices."""

    kind = "experts"
    class_name = "DbrxExpertGLU"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        moe, width = net.arch.experts, net.arch.hidden
        for name in ("w1", "v1", "w2"):
            setattr(self, name, Weight(net, moe.experts * moe.intermediate, width, expert=True))
        self.activation_fn = Activation(net, net.arch.activation)

    def forward(self, x: Tensor, w1: Tensor, v1: Tensor, w2: Tensor) -> Tensor:
        gate = P.linear(x, w1)
        up = P.linear(x, v1)
        gate = self.activation_fn(gate)
        between = F.mul(gate, up)
        return P.linear(between, w2, conv1d=True)


class Experts(ExpertModules):
    class_name = "DbrxExperts"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.mlp = ExpertGLU(net)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        tape, moe, (b, s, width) = self.net.tape, self.net.arch.experts, x.shape
        flat = F.reshape(x, -1, width)
        out = self.zeros(b * s, width, x.dtype)
        mask = tape.empty((*chosen.shape, moe.experts + 1), "int64")
        tape.memory(chosen.nbytes, mask.nbytes + chosen.nbytes)
        mask = F.permute(mask, 2, 1, 0)
        hit = self._hit(mask)  # noqa: F841  lives to the end
        for number in range(moe.experts):
            self.wait()  # for its number, four times
            found = self.found(F.select(mask, 0), self.rows(chosen, number))
            tape.read(self.mlp.weights["v1"], self.mlp.weights["w1"], self.mlp.weights["w2"])
            v1, w1, w2 = (self._own(self.mlp.weights[name]) for name in ("v1", "w1", "w2"))
            states = self.mlp(P.gather(flat, found[1]), w1, v1, w2)
            row = F.reshape(P.gather(F.reshape(weights, -1), found[0]), -1, 1)
            states = F.mul(states, row)
            out = index_add(out, found[1], states)
        return F.reshape(out, b, s, width)

    def _own(self, weight: Tensor) -> Tensor:
        moe, width = self.net.arch.experts, self.net.arch.hidden
        self.wait()
        return F.select(F.reshape(weight, moe.experts, moe.intermediate, width), 0)

    def _hit(self, mask: Tensor) -> Tensor:
        per_expert = F.pointwise(mask, shape=(mask.shape[0],))
        more = F.pointwise(per_expert, dtype="bool")
        hit = F.pointwise(more, shape=(self.net.arch.experts.experts, 1), dtype="int64")
        self.wait()
        return hit


class Router(Module):
    kind = "router"
    class_name = "DbrxRouter"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.layer = Linear(net, net.arch.hidden, net.arch.experts.experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """And what it read, with noise, which experts read too."""
        x = noisy(x) if self.net.arch.experts.noise else x
        return self.layer(F.reshape(x, -1, x.shape[-1])), x


class FFN(Module):
    kind = "router"
    class_name = "DbrxFFN"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.router = Router(net)
        self.experts = Experts(net)

    def forward(self, x: Tensor) -> Tensor:
        experts = self.net.arch.experts
        logits, x = self.router(x)
        weights, chosen = P.topk(P.softmax(logits), experts.top_k)
        if experts.norm_top_k:
            weights = F.divide(weights, length(weights))
        return self.experts(x, chosen, weights)


def length(x: Tensor) -> Tensor:
    """`torch.norm(x, p=1, dim=-1, keepdim=True)`: saves both; backward multiplies with signs."""
    saved = x.tape.save(x) if x.needs_grad else None
    out = F.pointwise(x, shape=(*x.shape[:-1], 1))
    if saved is not None:
        kept = x.tape.save(out)

        def backward(g: Tensor) -> tuple[Tensor]:
            (x,), _result = saved(), kept()
            return (F.pointwise(F.pointwise(x), g),)

        x.tape.link((x,), backward, out)
    return out


class NormAttentionNorm(Module):
    kind = "residual"
    class_name = "DbrxNormAttentionNorm"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.norm_1 = LayerNorm(net, net.arch.hidden, bias=False)
        self.attn = Attention(net)
        self.norm_2 = LayerNorm(net, net.arch.hidden, bias=False)

    def forward(self, x: Tensor, *context: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The second in a list: a gradient comes to it apart."""
        residual = x
        x = self.norm_1(x)
        x, _weights = self.attn(x, *context)
        x = F.add(F.dropout(x, self.net.arch.dropout), residual)
        residual = x
        return residual, [self.norm_2(x)]


class Block(Module):
    kind = "residual"
    class_name = "DbrxBlock"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.norm_attn_norm = NormAttentionNorm(net)
        self.ffn = FFN(net)

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        residual, found = self.norm_attn_norm(x, *context)
        x = found.pop()
        x = self.ffn(x)
        return F.add(residual, F.dropout(x, self.net.arch.dropout))


class Model(Module):
    kind = "copy"
    class_name = "DbrxModel"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.rotary_emb = Rotary(net, arch.head_dim, "DbrxRotaryEmbedding")
        self.wte = Embedding(net, arch.vocab, arch.hidden)
        self.blocks = Blocks(net, arch.kinds, lambda _index: Block(net))
        self.norm_f = LayerNorm(net, arch.hidden, bias=False)
        self.norm_f.role = "norm"

    def forward(self, ids: Tensor) -> Tensor:
        x = embeds = self.wte(ids)
        places = positions(self.net, ids)
        mask = causal_mask(self.net, *ids.shape)
        tables = self.rotary_emb(embeds, places)
        for block in self.blocks:
            x = run_block(self.net, block, x, *tables, mask)
        return self.norm_f(x)


class DbrxForCausalLM(CausalLM):
    class_name = "DbrxForCausalLM"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.transformer = Model(net)
        self.lm_head = head(net, self.transformer.wte)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.finish(self.transformer(ids), labels, self.lm_head)
