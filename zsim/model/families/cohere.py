"""Cohere's Command R (cohere) and R7B / A (cohere2): attention and MLP in parallel, norms and rotation in float32. With
experts in the MLP's place (cohere2_moe) norms may be Llama's."""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model import products as P
from zsim.model.families import llama, moe
from zsim.model.families.glm import rotate_neighbours
from zsim.model.families.relatives import Model
from zsim.model.graph import Tensor
from zsim.model.layers import Linear, Module, Net, RMSNorm, Weight

PREFIX = {"cohere": "Cohere", "cohere2": "Cohere2", "cohere2_moe": "Cohere2Moe"}


def subtract(a: Tensor, b: Tensor) -> Tensor:
    out = F.pointwise(a, b)
    if a.needs_grad or b.needs_grad:
        a.tape.link((a, b), lambda g: (g, F.pointwise(g)), out)
    return out


class LayerNorm(Module):
    """One kernel per operation; the mean is subtracted twice."""

    kind = "norm"

    def __init__(self, net: Net, prefix: str, *shape: int) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}LayerNorm"
        self.weight = Weight(net, *shape)

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = F.to(x, "float32")
        mean = F.mean_last(x)
        variance = F.mean_last(F.power(subtract(x, mean)))
        x = F.mul(subtract(x, mean), F.rsqrt(F.shift(variance)))
        x = F.mul(F.to(self.weight, "float32"), x)
        return F.to(x, dtype)


class Attention(llama.Attention):
    def __init__(self, net: Net, prefix: str, index: int) -> None:
        super().__init__(net, prefix, index)
        if net.arch.qk_norm == "each":
            self.q_norm = LayerNorm(net, prefix, net.arch.heads, net.arch.head_dim)
            self.k_norm = LayerNorm(net, prefix, net.arch.kv_heads, net.arch.head_dim)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.net.arch.qk_norm != "each":
            return super().heads(x)
        d = self.net.arch.head_dim
        b, s, _ = x.shape
        q, k, v = (F.reshape(proj(x), b, s, -1, d) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q = self.q_norm(q)
        k = self.k_norm(k)
        return F.transpose(q, 1, 2), F.transpose(k, 1, 2), F.transpose(v, 1, 2)

    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        dtype = q.dtype
        q, k = F.to(q, "float32"), F.to(k, "float32")
        turned_q, turned_k = rotate_neighbours(q, cos, sin), rotate_neighbours(k, cos, sin)
        return F.to(turned_q, dtype), F.to(turned_k, dtype)


class Router(Module):
    """The largest logits, and of these the softmax, or their sigmoids."""

    kind = "router"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        self.class_name = f"{prefix}TopKRouter"
        self.weight = Weight(net, net.arch.experts.experts, net.arch.hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        experts = self.net.arch.experts
        logits = P.linear(x, self.weight)
        values, chosen = P.topk(logits, experts.top_k)
        if not experts.sigmoid:
            return logits, F.to(P.softmax(F.to(values, "float32")), x.dtype), chosen
        values = F.activation_by_result(values)
        if experts.norm_top_k:
            values = F.divide(values, F.sum_last(values))
        return logits, values, chosen


class MoE(Module):
    kind = "experts"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        shared = net.arch.experts.shared
        self.class_name = f"{prefix}SparseMoeBlock"
        self.gate = Router(net, prefix)
        self.experts = moe.Experts(net, prefix)
        self.shared_experts = llama.MLP(net, prefix, shared) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        flat = F.reshape(x, -1, x.shape[-1])
        _logits, weights, chosen = self.gate(flat)
        out = self.experts(flat, chosen, weights)
        if self.shared_experts:
            shared = self.shared_experts(flat)
            out = F.add(out, shared)
            out = F.scale(out) if self.net.arch.experts.averages else out
        return F.reshape(out, *x.shape)


def norm(net: Net, prefix: str) -> Module:
    width = net.arch.hidden
    return RMSNorm(net, width, f"{prefix}RMSNorm") if net.arch.rms_norms else LayerNorm(net, prefix, width)


class Block(llama.Block):
    def __init__(self, net: Net, prefix: str, index: int) -> None:
        Module.__init__(self, net)
        self.class_name = f"{prefix}DecoderLayer"
        self.self_attn = Attention(net, prefix, index)
        self.mlp = MoE(net, prefix) if net.arch.kinds[index].sparse else llama.MLP(net, prefix)
        self.input_layernorm = norm(net, prefix)

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        residual = x
        x = self.input_layernorm(x)
        attended, _weights = self.self_attn(x, *context)
        fed = self.mlp(x)
        return F.add(F.add(residual, attended), fed)


class CohereModel(Model):
    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net, prefix)
        self.types = prefix != "Cohere"

    def block(self, prefix: str, index: int) -> Module:
        return Block(self.net, prefix, index)

    def final_norm(self, prefix: str) -> Module:
        return norm(self.net, prefix)


class CohereForCausalLM(llama.LlamaForCausalLM):
    def __init__(self, net: Net) -> None:
        super().__init__(net, PREFIX[net.arch.family])

    def decoder(self, prefix: str) -> llama.Model:
        return CohereModel(self.net, prefix)

    def logits_of(self, hidden: Tensor, head: Linear) -> Tensor:
        return F.scale(head(hidden))
