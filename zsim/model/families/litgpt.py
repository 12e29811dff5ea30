"""Llama in the manner of litgpt (and lit-gpt, lit-llama): what differs from transformers is what autograd saves.

One product makes queries, keys and values; attention keeps views of it, so that all of it stays. Queries and keys come
out of a concatenation with heads before tokens, as attention's result then lies, which is copied for the projection.
With fewer key heads than query heads, keys and values are repeated. The loss is `cross_entropy` of the logits as they
are. (litgpt/model.py, commit 101e31d2 of May 2024, and thunder/benchmarks/benchmark_litgpt.py.)
"""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model.attention import rotate
from zsim.model.decoder import CausalLM, head, run_block
from zsim.model.fused_attention import flash_attention
from zsim.model.graph import Tensor
from zsim.model.layers import Blocks, Embedding, Linear, Module, Net
from zsim.model.layers import RMSNorm as HFNorm
from zsim.model.loss import cross_entropy


class RMSNorm(HFNorm):
    def __init__(self, net: Net) -> None:
        super().__init__(net, net.arch.hidden, "RMSNorm")

    def forward(self, x: Tensor) -> Tensor:
        wide = F.to(x, "float32")
        normed = F.mul(wide, F.rsqrt(F.shift(F.mean_last(F.mul(wide, wide)))))
        return F.mul(F.to(normed, x.dtype), self.weight)


class Attention(Module):
    kind = "rotary"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.class_name = "CausalSelfAttention"
        width = (arch.heads + 2 * arch.kv_heads) * arch.head_dim
        self.attn = Linear(net, arch.hidden, width, arch.attention_bias)
        self.proj = Linear(net, arch.heads * arch.head_dim, arch.hidden, arch.output_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        arch = self.net.arch
        b, s, _ = x.shape
        groups, queries, d = arch.kv_heads, arch.heads // arch.kv_heads, arch.head_dim
        qkv = F.permute(F.reshape(self.attn(x), b, s, groups, queries + 2, d), 0, 2, 3, 1, 4)
        q, k, v = F.split(qkv, (queries, 1, 1), 2)
        del qkv
        if queries > 1:
            k, v = (F.expand(t, (b, groups, queries, s, d)) for t in (k, v))
        q, k, v = (F.reshape(t, b, -1, s, d) for t in (q, k, v))
        q, k = (F.cat((rotate(t, cos, sin),)) for t in (q, k))
        out = F.transpose(flash_attention(q, k, v, self.net.attention), 1, 2)
        return self.proj(F.reshape(F.contiguous(out), b, s, -1))


class MLP(Module):
    kind = "activation"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.class_name = "LLaMAMLP"
        self.fc_1 = Linear(net, arch.hidden, arch.intermediate, arch.mlp_bias)
        self.fc_2 = Linear(net, arch.hidden, arch.intermediate, arch.mlp_bias)
        self.proj = Linear(net, arch.intermediate, arch.hidden, arch.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.fc_1(x), self.fc_2(x)
        return self.proj(F.mul(F.activation(first), second))


class Block(Module):
    kind = "residual"
    role = "block"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.norm_1 = RMSNorm(net)
        self.attn = Attention(net)
        self.norm_2 = RMSNorm(net)
        self.mlp = MLP(net)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = F.add(self.attn(self.norm_1(x), cos, sin), x)
        return F.add(self.mlp(self.norm_2(x)), x)


class GPT(CausalLM):
    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.lm_head = head(net, Embedding(net, arch.vocab, arch.hidden))
        self.wte = Embedding(net, arch.vocab, arch.hidden)
        self.h = Blocks(net, arch.kinds, lambda index: Block(net))
        self.ln_f = RMSNorm(net)
        self.ln_f.role = "norm"

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        tape, arch = self.net.tape, self.net.arch
        cos, sin = (tape.empty((ids.shape[1], arch.head_dim), self.net.dtype) for _ in range(2))
        tape.share(cos)
        tape.share(sin)
        x = self.wte(ids)
        for block in self.h:
            x = run_block(self.net, block, x, cos, sin)
        tape.label = self.kind
        logits = F.reshape(self.lm_head(self.ln_f(x)), -1, arch.vocab)
        if self.net.loss == "uncast_held":
            tape.share(logits)
        return cross_entropy(logits, F.reshape(labels, -1))
