"""Llama 4's text model (transformers 5.24, modeling_llama4.py): every expert works on every token, scaled by its score.

That is what its class does, whose tokens are repeated for all experts; scores of experts that were not chosen are zero.
"""

from __future__ import annotations

from zsim.errors import NotModeled
from zsim.model import functional as F
from zsim.model import products as P
from zsim.model.attention import attend, causal_mask, rotate_complex, split_heads
from zsim.model.decoder import run_block
from zsim.model.families import llama
from zsim.model.families.deepseek import ComplexRotary
from zsim.model.graph import Tensor
from zsim.model.layers import Activation, Linear, Module, Net, Weight


class L2Norm(Module):
    """Without a weight."""

    kind = "norm"
    class_name = "Llama4TextL2Norm"

    def forward(self, x: Tensor) -> Tensor:
        return normed(x)


class RMSNorm(L2Norm):
    class_name = "Llama4TextRMSNorm"

    def __init__(self, net: Net, width: int) -> None:
        super().__init__(net)
        self.weight = Weight(net, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.mul(normed(x), self.weight)


def normed(x: Tensor) -> Tensor:
    wide = F.to(x, "float32")
    return F.to(F.mul(wide, F.rsqrt(F.shift(F.mean_last(F.power(wide))))), x.dtype)


class Attention(Module):
    """Layers without positions scale their queries by where they are."""

    kind = "rotary"
    class_name = "Llama4TextAttention"

    def __init__(self, net: Net, index: int) -> None:
        super().__init__(net)
        arch = net.arch
        q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
        self.rotates = arch.kinds[index].rotary
        self.q_proj = Linear(net, arch.hidden, q, arch.attention_bias)
        self.k_proj = Linear(net, arch.hidden, kv, arch.attention_bias)
        self.v_proj = Linear(net, arch.hidden, kv, arch.attention_bias)
        self.o_proj = Linear(net, q, arch.hidden, arch.output_bias)
        if arch.qk_norm and self.rotates:
            self.qk_norm = L2Norm(net)

    def forward(self, x: Tensor, table: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        arch, (b, s, _) = self.net.arch, x.shape
        q = F.reshape(self.q_proj(x), b, s, -1, arch.head_dim)
        k = F.reshape(self.k_proj(x), b, s, -1, arch.head_dim)
        v = split_heads(self.v_proj(x), arch.head_dim)
        if self.rotates:
            q, k = rotate_complex(q, k, table)
        if arch.qk_norm and self.rotates:
            q = self.qk_norm(q)
            k = self.qk_norm(k)
        if arch.experts.scales_queries and not self.rotates:
            places = F.pointwise(self.net.tape.empty((s,), "int64"))
            scales = F.pointwise(F.pointwise(F.pointwise(F.pointwise(places, dtype="float32"))))
            scales = F.pointwise(F.pointwise(F.pointwise(scales)))
            q = F.to(F.mul(q, F.expand(F.reshape(scales, 1, s, 1, 1), (b, s, 1, 1))), q.dtype)
        q, k = F.transpose(q, 1, 2), F.transpose(k, 1, 2)
        out, weights = attend(self.net, q, k, v, mask, None, arch.attention_dropout, upcast=False)
        return self.o_proj(out), weights


class MLP(Module):
    kind = "activation"
    class_name = "Llama4TextMLP"

    def __init__(self, net: Net, width: int) -> None:
        super().__init__(net)
        self.gate_proj = Linear(net, net.arch.hidden, width)
        self.up_proj = Linear(net, net.arch.hidden, width)
        self.down_proj = Linear(net, width, net.arch.hidden)
        self.activation_fn = Activation(net, net.arch.activation)

    def forward(self, x: Tensor) -> Tensor:
        between = F.mul(self.activation_fn(self.gate_proj(x)), self.up_proj(x))
        return self.down_proj(between)


class Router(Linear):
    kind = "router"
    several_results = True
    class_name = "Llama4Router"

    def __init__(self, net: Net) -> None:
        super().__init__(net, net.arch.hidden, net.arch.experts.experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = super().forward(x)
        values, chosen = P.topk(logits, self.net.arch.experts.top_k)
        scores = self._scattered(logits, values, chosen)
        return F.to(F.activation_by_result(F.to(scores, "float32")), scores.dtype), logits

    def _scattered(self, logits: Tensor, values: Tensor, chosen: Tensor) -> Tensor:
        """`full_like(logits, -inf).scatter_(1, chosen, values)`, whose backward gathers."""
        tape = logits.tape
        scores = F.pointwise(logits.detach())
        saved = tape.save(chosen)
        tape.memory(values.nbytes + chosen.nbytes, values.nbytes)
        if values.needs_grad:
            shape = values.shape

            def backward(g: Tensor) -> tuple[Tensor]:
                (chosen,) = saved()
                return (F.pointwise(chosen, shape=shape, dtype=g.dtype),)

            tape.link((values,), backward, scores)
        return scores


class Experts(Module):
    kind = "experts"
    class_name = "Llama4TextExperts"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch, moe = net.arch, net.arch.experts
        self.gate_up_proj = Weight(net, moe.experts, arch.hidden, 2 * moe.intermediate, expert=True)
        self.down_proj = Weight(net, moe.experts, moe.intermediate, arch.hidden, expert=True)
        self.act_fn = Activation(net, arch.activation)

    def forward(self, x: Tensor) -> Tensor:
        experts, width = self.net.arch.experts.experts, self.net.arch.experts.intermediate
        x = F.reshape(x, experts, -1, x.shape[-1])
        both = P.matmul(x, self.gate_up_proj, "gemm")
        gate, up = F.split(both, [width, width])
        out = P.matmul(F.mul(up, self.act_fn(gate)), self.down_proj, "gemm")
        return F.reshape(out, -1, out.shape[-1])


class Moe(Module):
    kind = "experts"
    class_name = "Llama4TextMoe"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.experts = Experts(net)
        self.router = Router(net)
        self.shared_expert = MLP(net, net.arch.experts.shared)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        experts = self.net.arch.experts.experts
        flat = F.reshape(x, -1, x.shape[-1])
        scores, logits = self.router(flat)
        routed = repeated(flat, experts)
        routed = F.mul(routed, F.reshape(F.transpose(scores, 0, 1), -1, 1))
        results = self.experts(routed)
        out = self.shared_expert(flat)
        return F.add(out, summed(F.reshape(results, experts, -1, x.shape[-1])), in_place=True), logits


def repeated(x: Tensor, times: int) -> Tensor:
    """`x.repeat(times, 1)`, whose backward sums."""
    rows, width = x.shape
    out = x.tape.empty((times * rows, width), x.dtype)
    x.tape.memory(x.nbytes, out.nbytes, "copy")
    if x.needs_grad:
        tape = x.tape

        def backward(g: Tensor) -> tuple[Tensor]:
            grad = tape.empty((rows, width), g.dtype)
            tape.memory(g.nbytes, grad.nbytes)
            return (grad,)

        tape.link((x,), backward, out)
    return out


def summed(x: Tensor) -> Tensor:
    """`x.sum(0)` of [e, t, h]; backward is a view."""
    shape = x.shape
    out = F.pointwise(x, shape=shape[1:])
    if x.needs_grad:
        x.tape.link((x,), lambda g: (F.view_of(g, shape, (0, *g.strides)),), out)
    return out


class Block(Module):
    kind = "residual"
    class_name = "Llama4TextDecoderLayer"

    def __init__(self, net: Net, index: int) -> None:
        super().__init__(net)
        arch, self.sparse = net.arch, net.arch.kinds[index].sparse
        self.self_attn = Attention(net, index)
        self.feed_forward = Moe(net) if self.sparse else MLP(net, arch.intermediate)
        self.input_layernorm = RMSNorm(net, arch.hidden)
        self.post_attention_layernorm = RMSNorm(net, arch.hidden)

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        residual = x
        x = self.input_layernorm(x)
        attended, _weights = self.self_attn(x, *context)
        x = F.add(residual, attended)
        residual = x
        x = self.post_attention_layernorm(x)
        if self.sparse:
            x, _logits = self.feed_forward(x)
        else:
            x = self.feed_forward(x)
        return F.add(residual, F.reshape(x, *residual.shape))


class Model(llama.Model):
    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net, prefix)
        self.rotary_emb = ComplexRotary(net, net.arch.head_dim, "Llama4TextRotaryEmbedding")

    def block(self, prefix: str, index: int) -> Module:
        return Block(self.net, index)

    def final_norm(self, prefix: str) -> Module:
        return RMSNorm(self.net, self.net.arch.hidden)

    def forward(self, ids: Tensor | None, embeds: Tensor | None = None, *extra: Tensor) -> Tensor:
        net = self.net
        x = embeds = self.inputs_embeds(ids, embeds)
        if net.arch.window and x.shape[1] > net.arch.window:
            raise NotModeled(
                f"attention in chunks of {net.arch.window} tokens", field="seq_len", accepted=f"up to {net.arch.window}"
            )
        position_ids = self.positions(x)
        masks = {True: causal_mask(net, *x.shape[:2])}
        masks[False] = causal_mask(net, *x.shape[:2])
        table = self.rotary_emb(x, position_ids)
        for block in self.layers:
            assert isinstance(block, Block)
            x = run_block(net, block, x, table, masks[block.self_attn.rotates])
        return self.norm(x)


class Llama4ForCausalLM(llama.LlamaForCausalLM):
    def __init__(self, net: Net) -> None:
        super().__init__(net, "Llama4Text")
        self.class_name = "Llama4ForCausalLM"

    def decoder(self, prefix: str) -> llama.Model:
        return Model(self.net, prefix)
