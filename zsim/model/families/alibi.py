"""MPT and BLOOM: positions as a bias on attention scores. transformers has one attention for them, unfused."""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model import products as P
from zsim.model.attention import dense_mask
from zsim.model.decoder import CausalLM, head, run_block
from zsim.model.graph import Tensor
from zsim.model.layers import Activation, Blocks, Dropout, Embedding, LayerNorm, Linear, Module, Net


class MptAttention(Module):
    kind = "softmax"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.Wqkv = Linear(net, net.arch.hidden, 3 * net.arch.hidden)
        self.out_proj = Linear(net, net.arch.hidden, net.arch.hidden)

    def forward(self, x: Tensor, bias: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        arch = self.net.arch
        b, s, h = x.shape
        mixed = self.Wqkv(x)
        if arch.clip_qkv:
            mixed = F.activation(mixed)  # clamp
        parts = F.split(mixed, [h, h, h])
        q, k, v = (F.transpose(F.reshape(part, b, s, arch.heads, -1), 1, 2) for part in parts)
        scores = F.scale(P.matmul(q, F.transpose(k, 2, 3)))
        scores = F.add(scores, F.narrow(bias, -1, s))
        scores = F.masked_fill(scores, mask)
        weights = F.to(P.softmax(F.to(scores, "float32")), v.dtype)
        weights = F.dropout(weights, arch.attention_dropout)
        out = P.matmul(weights, v)
        out = F.reshape(F.contiguous(F.transpose(out, 1, 2)), b, s, h)
        return self.out_proj(out), weights


class MptMLP(Module):
    kind = "activation"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.up_proj = Linear(net, arch.hidden, arch.intermediate)
        self.act = Activation(net, "nn.gelu")
        self.down_proj = Linear(net, arch.intermediate, arch.hidden)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        x = self.act(self.up_proj(x))
        middle = self.down_proj(x)
        out = F.dropout(middle, self.net.arch.dropout)
        return F.add(out, residual)


class MptBlock(Module):
    kind = "residual"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.norm_1 = LayerNorm(net, arch.hidden, bias=False)
        self.attn = MptAttention(net)
        self.norm_2 = LayerNorm(net, arch.hidden, bias=False)
        self.ffn = MptMLP(net)
        self.resid_attn_dropout = Dropout(net, arch.dropout)

    def forward(self, x: Tensor, bias: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.norm_1(x)
        residual = x
        attended, weights = self.attn(normed, bias, mask)
        x = F.add(self.resid_attn_dropout(attended), residual)
        normed = self.norm_2(x)
        residual = x
        return self.ffn(normed, residual), weights


class MptModel(Module):
    kind = "copy"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.wte = Embedding(net, arch.vocab, arch.hidden)
        self.blocks = Blocks(net, arch.kinds, lambda index: MptBlock(net))
        self.norm_f = LayerNorm(net, arch.hidden, bias=False)
        self.norm_f.role = "norm"

    def forward(self, ids: Tensor) -> Tensor:
        net, arch = self.net, self.net.arch
        x = embeds = self.wte(ids)  # noqa: F841  the name outlives the blocks
        bias = net.tape.empty((arch.heads, 1, arch.positions), "float32")
        net.tape.memory(0, bias.nbytes)
        mask = F.pointwise(dense_mask(net, ids.shape[0], ids.shape[1], net.dtype), dtype="bool")
        net.tape.share(mask)  # every block saves it
        if net.checkpointing != "none":
            net.tape.share(bias)
        for block in self.blocks:
            outputs = run_block(net, block, x, bias, mask)
            x = outputs[0]
        return self.norm_f(x)


class MptForCausalLM(CausalLM):
    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.transformer = MptModel(net)
        self.lm_head = head(net, self.transformer.wte)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.finish(self.transformer(ids), labels, self.lm_head)


class BloomAttention(Module):
    kind = "softmax"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.query_key_value = Linear(net, arch.hidden, 3 * arch.hidden, bias=True)
        self.dense = Linear(net, arch.hidden, arch.hidden, bias=True)
        self.attention_dropout = Dropout(net, arch.attention_dropout)

    def forward(self, x: Tensor, residual: Tensor, bias: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        arch = self.net.arch
        b, s, h = x.shape
        heads, d = arch.heads, arch.head_dim
        fused = F.reshape(self.query_key_value(x), b, s, heads, 3, d)
        q, k, v = (F.transpose(F.select(fused, 3), 1, 2) for _ in range(3))
        q = F.reshape(q, b * heads, s, d)
        k = F.transpose(F.reshape(k, b * heads, s, d), 1, 2)
        v = F.reshape(v, b * heads, s, d)
        scores = P.baddbmm(bias, q, k)
        masked = F.reshape(scores, b, heads, s, s)
        masked = F.add(masked, mask)
        weights = F.to(P.softmax(F.to(masked, "float32")), q.dtype)
        weights = self.attention_dropout(weights)
        flat = F.reshape(weights, b * heads, s, s)
        out = P.matmul(flat, v)
        out = F.reshape(F.transpose(F.reshape(out, b, heads, s, d), 1, 2), b, s, h)
        out = self.dense(out)
        out = F.add(residual, F.dropout(out, arch.dropout))
        return out, weights


class BloomGelu(Module):
    """An autograd function that keeps its input and computes everything else again."""

    kind = "activation"

    def forward(self, x: Tensor) -> Tensor:
        p = F.pointwise
        saved = self.net.tape.save(x)
        plain = x.detach()
        half = p(plain)
        out = p(half, p(p(p(p(plain), p(p(p(plain), plain))))))

        def backward(g: Tensor) -> tuple[Tensor]:
            (x,) = saved()
            tanh = p(p(p(x), p(p(p(x), x))))
            slope = p(p(p(p(tanh, tanh)), p(p(p(x), x))))
            ff = p(p(p(x), slope), p(p(tanh)))
            return (p(ff, g),)

        self.net.tape.link((x,), backward, out)
        return out


class BloomMLP(Module):
    kind = "activation"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.dense_h_to_4h = Linear(net, arch.hidden, arch.intermediate, bias=True)
        self.gelu_impl = BloomGelu(net)
        self.dense_4h_to_h = Linear(net, arch.intermediate, arch.hidden, bias=True)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        x = self.gelu_impl(self.dense_h_to_4h(x))
        out = self.dense_4h_to_h(x)
        return F.add(residual, F.dropout(out, self.net.arch.dropout))


class BloomBlock(Module):
    kind = "residual"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.input_layernorm = LayerNorm(net, net.arch.hidden)
        self.self_attention = BloomAttention(net)
        self.post_attention_layernorm = LayerNorm(net, net.arch.hidden)
        self.mlp = BloomMLP(net)

    def forward(self, x: Tensor, bias: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        after = self.net.arch.residual_after_norm
        normed = self.input_layernorm(x)
        residual = normed if after else x
        attended, weights = self.self_attention(normed, residual, bias, mask)
        normed = self.post_attention_layernorm(attended)
        residual = normed if after else attended
        return self.mlp(normed, residual), weights


class BloomModel(Module):
    kind = "copy"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.word_embeddings = Embedding(net, arch.vocab, arch.hidden)
        self.word_embeddings_layernorm = LayerNorm(net, arch.hidden)
        self.h = Blocks(net, arch.kinds, lambda index: BloomBlock(net))
        self.ln_f = LayerNorm(net, arch.hidden)
        self.ln_f.role = "norm"

    def forward(self, ids: Tensor) -> Tensor:
        net = self.net
        b, s = ids.shape
        embeds = self.word_embeddings(ids)
        x = self.word_embeddings_layernorm(embeds)
        slopes = net.tape.empty((net.arch.heads, 1, s), "float32")
        net.tape.memory(0, slopes.nbytes)
        bias = F.to(F.pointwise(slopes, shape=(b * net.arch.heads, 1, s)), net.dtype)
        mask = dense_mask(net, b, s, net.dtype)
        if net.checkpointing != "none":
            net.tape.share(bias, mask)
        for block in self.h:
            outputs = run_block(net, block, x, bias, mask)
            x = outputs[0]
        return self.ln_f(x)


class BloomForCausalLM(CausalLM):
    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.transformer = BloomModel(net)
        self.lm_head = head(net, self.transformer.word_embeddings)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.finish(self.transformer(ids), labels, self.lm_head)
