"""gpt-oss: experts with biases and a clamped gate, attention with a learned sink per head, alternating windows."""

from __future__ import annotations

from zsim.errors import InputError
from zsim.model import functional as F
from zsim.model import products as P
from zsim.model.attention import Rotary
from zsim.model.families import llama, moe, relatives
from zsim.model.families.cohere import subtract
from zsim.model.graph import Tensor
from zsim.model.layers import Module, Net, Weight


class Tables(Rotary):
    """Half as wide as a head: both halves are turned by the same angles."""

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        s, d = positions.shape[-1], self.dim
        angles = F.pointwise(F.pointwise(positions, dtype="float32"), shape=(positions.shape[0], s, d // 2))
        cos = F.pointwise(F.pointwise(angles))
        sin = F.pointwise(F.pointwise(angles))
        tables = F.to(cos, x.dtype), F.to(sin, x.dtype)
        if self.net.layers_save(x):
            self.net.tape.share(*tables)
        return tables


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    first, second = F.split(x, [half, half])
    left = subtract(F.mul(first, cos), F.mul(second, sin))
    right = F.add(F.mul(second, cos), F.mul(first, sin))
    return F.cat((left, right))


class Attention(llama.Attention):
    def __init__(self, net: Net, prefix: str, index: int) -> None:
        super().__init__(net, prefix, index)
        self.sinks = Weight(net, net.arch.heads)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if self.net.attention != "eager":  # the kernel reads the sinks, and gives them a gradient
            out, weights = super().forward(x, cos, sin, mask)
            return out, weights
        q, k, v = self.heads(x)
        cos, sin = F.unsqueeze(cos, 1), F.unsqueeze(sin, 1)
        q, k = self.rotated(q, k, cos, sin)
        out, weights = self._eager(q, k, v, mask)
        b, s, _ = x.shape
        return self.o_proj(F.reshape(out, b, s, -1)), weights

    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return turned(q, cos, sin), turned(k, cos, sin)

    def projected(self, out: Tensor) -> Tensor:
        return self.o_proj(F.touch(out, self.sinks))

    def _eager(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        b, h, s, _ = q.shape
        repeats = h // k.shape[1]
        k, v = F.repeat_heads(k, repeats), F.repeat_heads(v, repeats)
        outer, self.net.tape.label = self.net.tape.label, "softmax"
        weights = F.scale(P.matmul(q, F.transpose(k, 2, 3)))
        if mask is not None:
            weights = F.add(weights, mask)
        sinks = F.expand(F.reshape(self.sinks, 1, h, 1, 1), (b, h, s, 1))
        logits = F.cat((weights, sinks))
        logits = subtract(logits, largest(logits))
        probabilities = P.softmax(logits)
        weights = F.narrow(probabilities, -1, s)
        out = P.matmul(weights, v)
        self.net.tape.label = outer
        return F.contiguous(F.transpose(out, 1, 2)), weights


def largest(x: Tensor) -> Tensor:
    """`x.max(dim=-1, keepdim=True).values`: saves the places, backward scatters into zeros."""
    tape, shape, dtype = x.tape, x.shape, x.dtype
    values, places = tape.empty((*shape[:-1], 1), dtype), tape.empty((*shape[:-1], 1), "int64")
    tape.memory(x.nbytes, values.nbytes + places.nbytes)
    if x.needs_grad:
        saved = tape.save(places)

        def backward(g: Tensor) -> tuple[Tensor]:
            (places,) = saved()
            zeros = tape.empty(shape, dtype)
            tape.memory(g.nbytes, zeros.nbytes)
            grad = tape.empty(shape, dtype)
            tape.memory(zeros.nbytes + places.nbytes + g.nbytes, grad.nbytes)
            return (grad,)

        tape.link((x,), backward, values)
    return values


class Router(Module):
    kind = "router"
    class_name = "GptOssTopKRouter"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.weight = Weight(net, net.arch.experts.experts, net.arch.hidden)
        self.bias = Weight(net, net.arch.experts.experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = P.linear(x, self.weight, self.bias)
        values, chosen = P.topk(logits, self.net.arch.experts.top_k)
        return logits, P.softmax(values), chosen


class Experts(moe.Experts):
    def __init__(self, net: Net) -> None:
        Module.__init__(self, net)
        arch, experts, width = net.arch, net.arch.experts.experts, net.arch.experts.intermediate
        self.class_name = "GptOssExperts"
        self.gate_up_proj = Weight(net, experts, arch.hidden, 2 * width, expert=True)
        self.gate_up_proj_bias = Weight(net, experts, 2 * width, expert=True)
        self.down_proj = Weight(net, experts, width, arch.hidden, expert=True)
        self.down_proj_bias = Weight(net, experts, arch.hidden, expert=True)

    def biases(self, name: str, ordered: Tensor) -> Tensor | None:
        return P.gather(self.weights[f"{name}_bias"], ordered)

    def product(self, x: Tensor, weight: Tensor, offsets: Tensor, biases: Tensor | None) -> Tensor:
        assert biases is not None
        return F.add(P.grouped_linear(x, weight, offsets, transposed=True), biases, in_place=True)

    def gated(self, out: Tensor) -> Tensor:
        width = self.net.arch.experts.intermediate
        gate, up = F.narrow(out, -1, width), F.narrow(out, -1, width)  # every second entry
        gate = F.clamped(gate, bounds=1)
        up = F.clamped(up, bounds=2)
        glu = F.mul(gate, F.activation_by_result(F.scale(gate)))
        return F.mul(F.shift(up), glu)


class MLP(Module):
    kind = "experts"
    class_name = "GptOssMLP"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.router = Router(net)
        self.experts = Experts(net)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        b, s, h = x.shape
        x = F.reshape(x, -1, h)
        _logits, scores, chosen = self.router(x)
        x = self.experts(x, chosen, scores)
        return F.reshape(x, b, s, h), scores


class Block(llama.Block):
    def __init__(self, net: Net, prefix: str, index: int) -> None:
        Module.__init__(self, net)
        self.class_name = "GptOssDecoderLayer"
        self.self_attn = Attention(net, prefix, index)
        self.mlp = MLP(net)
        self.input_layernorm = llama.Olmo2Norm(net, net.arch.hidden, "GptOssRMSNorm")
        self.post_attention_layernorm = llama.Olmo2Norm(net, net.arch.hidden, "GptOssRMSNorm")

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        residual = x
        x = self.input_layernorm(x)
        x, _ = self.self_attn(x, *context)
        x = F.add(residual, x)
        residual = x
        x = self.post_attention_layernorm(x)
        x, _ = self.mlp(x)
        return F.add(residual, x)


class Model(relatives.Model):
    types = True

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net, prefix)
        self.rotary_emb = Tables(net, net.arch.head_dim, "GptOssRotaryEmbedding")

    def block(self, prefix: str, index: int) -> Module:
        return Block(self.net, prefix, index)

    def final_norm(self, prefix: str) -> Module:
        return llama.Olmo2Norm(self.net, self.net.arch.hidden, "GptOssRMSNorm")


class GptOssForCausalLM(llama.LlamaForCausalLM):
    def __init__(self, net: Net) -> None:
        if net.attention in ("sdpa", "efficient", "cudnn"):
            raise InputError("gpt-oss has no SDPA", field="attention", accepted="flash, flash3, flash4, eager")
        super().__init__(net, "GptOss")

    def decoder(self, prefix: str) -> llama.Model:
        return Model(self.net, prefix)
