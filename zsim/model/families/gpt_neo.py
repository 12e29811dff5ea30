"""GPT-Neo and GPT-BigCode (SantaCoder, StarCoder): GPT-2 with Linears; local attention here, one key head there."""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model import products as P
from zsim.model.attention import attend, causal_mask, positions
from zsim.model.decoder import CausalLM, head, run_block
from zsim.model.families import gpt2
from zsim.model.families.llama import split_heads
from zsim.model.graph import Storage, Tensor, row_major
from zsim.model.layers import Activation, Blocks, Dropout, LayerNorm, Linear, Module, Net


class GPTNeoSelfAttention(Module):
    """Eager: scores in float32, a causal mask from a buffer and transformers' own besides. It has no SDPA."""

    kind = "softmax"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.attn_dropout = Dropout(net, arch.attention_dropout)
        self.resid_dropout = Dropout(net, arch.dropout)
        self.k_proj = Linear(net, arch.hidden, arch.hidden)
        self.v_proj = Linear(net, arch.hidden, arch.hidden)
        self.q_proj = Linear(net, arch.hidden, arch.hidden)
        self.out_proj = Linear(net, arch.hidden, arch.hidden, bias=True)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        d = self.net.arch.head_dim
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = split_heads(q, d), split_heads(k, d), split_heads(v, d)
        weights: Tensor | None
        if self.net.attention == "eager":
            out, weights = self._eager(q, k, v, mask)
        else:
            out, weights = attend(self.net, q, k, v, mask, dropout=self.net.arch.attention_dropout)
        out = self.out_proj(out)
        return self.resid_dropout(out), weights

    def _eager(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        b, _, s, _ = q.shape
        q, k = F.to(q, "float32"), F.to(k, "float32")
        weights = P.matmul(q, F.transpose(k, 2, 3))
        fill = self.net.tape.empty((), "float32")  # noqa: F841  the name outlives the softmax
        weights = F.masked_fill(weights, self._buffer(s))
        if mask is not None:
            weights = F.add(weights, mask)
        weights = P.softmax(weights)
        weights = F.to(weights, v.dtype)
        weights = self.attn_dropout(weights)
        out = P.matmul(weights, v)
        return F.reshape(F.contiguous(F.transpose(out, 1, 2)), b, s, -1), weights

    def _buffer(self, s: int) -> Tensor:
        shape = (1, 1, s, s)
        return Tensor(Storage(self.net.tape, shape, "bool", False), shape, row_major(shape), "bool")


class GPTNeoAttention(Module):
    kind = "softmax"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.attention = GPTNeoSelfAttention(net)

    def forward(self, x: Tensor, *mask: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.attention(x, *mask)


class MLP(Module):
    kind = "activation"

    def __init__(self, net: Net, prefix: str) -> None:
        super().__init__(net)
        arch = net.arch
        self.class_name = f"{prefix}MLP"
        self.c_fc = Linear(net, arch.hidden, arch.intermediate, bias=True)
        self.c_proj = Linear(net, arch.intermediate, arch.hidden, bias=True)
        self.act = Activation(net, arch.activation)
        self.dropout = Dropout(net, arch.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)
        x = self.act(x)
        x = self.c_proj(x)
        return self.dropout(x)


class BigCodeAttention(Module):
    """Queries, keys and values in one product; one key and value head for all queries, or by head."""

    kind = "attention"
    class_name = "GPTBigCodeAttention"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.c_attn = Linear(net, arch.hidden, arch.hidden + 2 * arch.kv_heads * arch.head_dim, bias=True)
        self.c_proj = Linear(net, arch.hidden, arch.hidden, bias=True)
        self.resid_dropout = Dropout(net, arch.dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        arch, d = self.net.arch, self.net.arch.head_dim
        b, s, h = x.shape
        mixed = self.c_attn(x)
        if arch.kv_heads == 1:
            q, k, v = F.split(F.reshape(mixed, b, 1, s, -1), [h, d, d])
            q = F.transpose(F.reshape(q, b, s, -1, d), 1, 2)
        else:
            mixed = F.transpose(F.reshape(mixed, b, s, arch.heads, 3 * d), 1, 2)
            q, k, v = F.split(mixed, [d, d, d])
        del mixed
        out, weights = attend(self.net, q, k, v, mask, dropout=arch.attention_dropout)
        out = self.c_proj(out)
        return self.resid_dropout(out), weights


class Block(Module):
    """GPT-Neo hands the attention weights on."""

    kind = "residual"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.neo = net.arch.family == "gpt_neo"
        prefix = "GPTNeo" if self.neo else "GPTBigCode"
        self.class_name = f"{prefix}Block"
        self.ln_1 = LayerNorm(net, net.arch.hidden)
        self.attn = GPTNeoAttention(net) if self.neo else BigCodeAttention(net)
        self.ln_2 = LayerNorm(net, net.arch.hidden)
        self.mlp = MLP(net, prefix)

    def forward(self, x: Tensor, *mask: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        residual = x
        x = self.ln_1(x)
        attended, weights = self.attn(x, *mask)
        x = F.add(attended, residual)
        residual = x
        x = self.ln_2(x)
        fed = self.mlp(x)
        x = F.add(residual, fed)
        return (x, weights) if self.neo else x


class Model(gpt2.Model):
    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.class_name = "GPTNeoModel" if net.arch.family == "gpt_neo" else "GPTBigCodeModel"
        self.h = Blocks(net, net.arch.kinds, lambda index: Block(net))

    def forward(self, ids: Tensor) -> Tensor:
        net = self.net
        embeds = self.wte(ids)
        position_ids = positions(net, ids, of_blocks=False)
        mask = causal_mask(net, *ids.shape)
        position_embeds = self.wpe(position_ids)
        x = F.add(embeds, position_embeds)
        x = self.drop(x)
        for block in self.h:
            outputs = run_block(net, block, x, mask)
            x = outputs[0] if self.class_name == "GPTNeoModel" else outputs
        return self.ln_f(x)

    def buffers_bytes(self) -> int:
        """Boolean causal masks over all positions: GPT-Neo's of every layer, GPT-BigCode's of the model."""
        arch = self.net.arch
        return (arch.layers if arch.family == "gpt_neo" else 1) * arch.positions**2


class GPTForCausalLM(CausalLM):
    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.class_name = "GPTNeoForCausalLM" if net.arch.family == "gpt_neo" else "GPTBigCodeForCausalLM"
        self.transformer = Model(net)
        self.lm_head = head(net, self.transformer.wte)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.finish(self.transformer(ids), labels, self.lm_head)
