"""StableLM and StarCoder2: Llamas with LayerNorms."""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model.attention import attend, rotate
from zsim.model.families import llama
from zsim.model.families.relatives import Model
from zsim.model.graph import Tensor
from zsim.model.layers import Activation, Dropout, LayerNorm, Linear, Module, Net


class NormPerHead(Module):
    """A LayerNorm of its own for each head of [b, h, s, d] (StableLM 2 12B)."""

    kind = "norm"
    class_name = "StableLmLayerNormPerHead"

    def __init__(self, net: Net, heads: int) -> None:
        super().__init__(net)
        self.norms = Module(net)  # a ModuleList
        for head in range(heads):
            setattr(self.norms, str(head), LayerNorm(net, net.arch.head_dim, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        parts = F.split(x, [1] * x.shape[1], dim=1)
        return F.cat([norm(part) for norm, part in zip(self.norms.children.values(), parts, strict=True)], dim=1)


class StableLmAttention(llama.Attention):
    """Part of each head is rotated."""

    def __init__(self, net: Net, prefix: str, index: int) -> None:
        super().__init__(net, prefix, index)
        if net.arch.qk_norm == "each":
            self.q_layernorm = NormPerHead(net, net.arch.heads)
            self.k_layernorm = NormPerHead(net, net.arch.kv_heads)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        arch, rotary = self.net.arch, self.net.arch.rotary_dim
        q, k, v = self.heads(x)
        if arch.qk_norm == "each":
            q = self.q_layernorm(q)
            k = self.k_layernorm(k)
        # the halves stay alive, by their names, until attention is done
        cos, sin = F.unsqueeze(cos, 1), F.unsqueeze(sin, 1)
        q_turned, q_passed = F.narrow(q, -1, rotary), F.narrow(q, -1, arch.head_dim - rotary)
        k_turned, k_passed = F.narrow(k, -1, rotary), F.narrow(k, -1, arch.head_dim - rotary)
        q_turned, k_turned = rotate(q_turned, cos, sin), rotate(k_turned, cos, sin)
        q, k = F.cat((q_turned, q_passed)), F.cat((k_turned, k_passed))
        out, weights = attend(self.net, q, k, v, mask, dropout=arch.attention_dropout)
        return self.o_proj(out), weights


class StableLmBlock(llama.Block):
    """Attention and MLP may be parallel, and then share one norm (StableLM 2 12B)."""

    def __init__(self, net: Net, prefix: str, index: int) -> None:
        Module.__init__(self, net)
        arch = net.arch
        self.class_name = "StableLmDecoderLayer"
        self.self_attn = StableLmAttention(net, prefix, index)
        self.mlp = llama.MLP(net, prefix)
        self.input_layernorm = LayerNorm(net, arch.hidden)
        if not arch.parallel:
            self.post_attention_layernorm = LayerNorm(net, arch.hidden)
        self.dropout = Dropout(net, arch.dropout)

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        residual = x
        x = self.input_layernorm(x)
        attended, _weights = self.self_attn(x, *context)
        if self.net.arch.parallel:
            fed = self.mlp(x)
            fed = self.dropout(fed)
            return F.add(F.add(residual, attended), fed)
        residual = F.add(residual, attended)
        fed = self.mlp(self.post_attention_layernorm(residual))
        fed = self.dropout(fed)
        return F.add(residual, fed)


class StableLmModel(Model):
    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net, prefix)
        self.rotary_emb.dim = net.arch.rotary_dim

    def block(self, prefix: str, index: int) -> Module:
        return StableLmBlock(self.net, prefix, index)

    def final_norm(self, prefix: str) -> Module:
        return LayerNorm(self.net, self.net.arch.hidden)


class StableLmForCausalLM(llama.LlamaForCausalLM):
    def __init__(self, net: Net) -> None:
        super().__init__(net, "StableLm")

    def decoder(self, prefix: str) -> llama.Model:
        return StableLmModel(self.net, prefix)


class Starcoder2MLP(Module):
    kind = "activation"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.c_fc = Linear(net, arch.hidden, arch.intermediate, arch.mlp_bias)
        self.c_proj = Linear(net, arch.intermediate, arch.hidden, arch.mlp_bias)
        self.act = Activation(net, arch.activation)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)
        x = self.act(x)
        x = self.c_proj(x)
        return F.dropout(x, self.net.arch.dropout)


class Starcoder2Attention(llama.Attention):
    def projected(self, out: Tensor) -> Tensor:
        return F.dropout(self.o_proj(out), self.net.arch.dropout)


class Starcoder2Block(llama.Block):
    def __init__(self, net: Net, prefix: str, index: int) -> None:
        Module.__init__(self, net)
        self.class_name = f"{prefix}DecoderLayer"
        self.self_attn = Starcoder2Attention(net, prefix, index)
        self.mlp = Starcoder2MLP(net)
        self.input_layernorm = LayerNorm(net, net.arch.hidden)
        self.post_attention_layernorm = LayerNorm(net, net.arch.hidden)


class Starcoder2Model(Model):
    def block(self, prefix: str, index: int) -> Module:
        return Starcoder2Block(self.net, prefix, index)

    def final_norm(self, prefix: str) -> Module:
        return LayerNorm(self.net, self.net.arch.hidden)


class Starcoder2ForCausalLM(llama.LlamaForCausalLM):
    def __init__(self, net: Net) -> None:
        super().__init__(net, "Starcoder2")

    def decoder(self, prefix: str) -> llama.Model:
        return Starcoder2Model(self.net, prefix)
