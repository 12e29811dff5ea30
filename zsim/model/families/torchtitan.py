"""Llama and Qwen3 in the manner of torchtitan: what differs from transformers is what autograd saves.

Norms are torch's own (since March 2025, pull request 985; a kernel of its own with torch 2.9, nightlies of August),
rotary embedding is a complex product in float32 (Qwen3, of August 2025, has transformers' real one, and norms of
queries and keys), and the loss is `cross_entropy(pred.flatten(0, 1).float(), labels.flatten(0, 1))`. Keys and values
were repeated before attention until January 2026 (pull request 2259). Inductor takes norms apart, to fuse them.
"""

from __future__ import annotations

from zsim.model import functional as F
from zsim.model.attention import complex_rotate, rotate
from zsim.model.decoder import CausalLM, cast_and_held, head, run_block
from zsim.model.fused_attention import flash_attention
from zsim.model.graph import Tensor
from zsim.model.layers import Blocks, Embedding, Linear, Module, Net, Weight
from zsim.model.layers import RMSNorm as HFNorm
from zsim.model.loss import cross_entropy, cross_entropy_compiled
from zsim.model.products import rms_norm

_NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "layers": "model.layers",
    "norm": "model.norm",
    "output": "lm_head",
    "wq": "q_proj",
    "wk": "k_proj",
    "wv": "v_proj",
    "wo": "o_proj",
    "attention": "self_attn",
    "feed_forward": "mlp",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def transformers_name(name: str) -> str:
    """The parameter's name in a transformers checkpoint, which is what a ModelSpec lists."""
    return ".".join(_NAMES.get(part, part) for part in name.split("."))


class RMSNorm(HFNorm):
    def __init__(self, net: Net, width: int | None = None) -> None:
        super().__init__(net, width or net.arch.hidden, "RMSNorm")

    def forward(self, x: Tensor) -> Tensor:
        if not self.net.compile and not self.net.titan_before(2025, 8):
            return rms_norm(x, self.weight)
        wide = F.to(x, "float32")
        normed = F.to(F.mul(wide, F.rsqrt(F.shift(F.mean_last(F.power(wide))))), x.dtype)
        return F.mul(normed, self.weight)


class Attention(Module):
    kind = "rotary"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.wq = Linear(net, arch.hidden, arch.heads * arch.head_dim, arch.attention_bias)
        self.wk = Linear(net, arch.hidden, arch.kv_heads * arch.head_dim, arch.attention_bias)
        self.wv = Linear(net, arch.hidden, arch.kv_heads * arch.head_dim, arch.attention_bias)
        self.wo = Linear(net, arch.heads * arch.head_dim, arch.hidden, arch.output_bias)
        self.normed = arch.qk_norm == "head"
        if self.normed:
            self.q_norm, self.k_norm = RMSNorm(net, arch.head_dim), RMSNorm(net, arch.head_dim)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        arch = self.net.arch
        b, s, _ = x.shape
        q, k, v = (F.reshape(w(x), b, s, -1, arch.head_dim) for w in (self.wq, self.wk, self.wv))
        if self.normed:
            cos, sin = (F.to(F.narrow(table, -1, arch.head_dim), x.dtype) for _ in range(2))
            q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        else:
            q, k = complex_rotate(q, table), complex_rotate(k, table)
        if self.net.titan_before(2026, 2):
            repeats = arch.heads // arch.kv_heads
            k, v = F.repeat_heads(k, repeats, 2), F.repeat_heads(v, repeats, 2)
        q, k, v = F.transpose(q, 1, 2), F.transpose(k, 1, 2), F.transpose(v, 1, 2)
        out = flash_attention(q, k, v, self.net.attention)
        return self.wo(F.reshape(F.contiguous(F.transpose(out, 1, 2)), b, s, -1))


class FeedForward(Module):
    kind = "activation"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.w1 = Linear(net, arch.hidden, arch.intermediate, arch.mlp_bias)
        self.w2 = Linear(net, arch.intermediate, arch.hidden, arch.mlp_bias)
        self.w3 = Linear(net, arch.hidden, arch.intermediate, arch.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.mul(F.activation(self.w1(x)), self.w3(x)))


class TransformerBlock(Module):
    kind = "residual"

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        self.attention = Attention(net)
        self.feed_forward = FeedForward(net)
        self.attention_norm = RMSNorm(net)
        self.ffn_norm = RMSNorm(net)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        h = F.add(x, self.attention(self.attention_norm(x), table))
        return F.add(h, self.feed_forward(self.ffn_norm(h)))


class Transformer(CausalLM):
    def __init__(self, net: Net) -> None:
        super().__init__(net)
        arch = net.arch
        self.tok_embeddings = Embedding(net, arch.vocab, arch.hidden)
        self.layers = Blocks(net, arch.kinds, lambda index: TransformerBlock(net))
        self.norm = RMSNorm(net)
        self.norm.role = "norm"
        self.output = head(net, self.tok_embeddings)
        self.remainder = Weight(net, arch.remainder) if arch.remainder else None

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        tape, arch = self.net.tape, self.net.arch
        table = self._table(ids.shape[1], arch.head_dim)
        h = self.tok_embeddings(ids)
        for block in self.layers:
            h = run_block(self.net, block, h, table)
        tape.label = self.kind
        # The bf16 logits end with the cast. torchtitan's trainer holds them until the loss exists: never the peak.
        logits, target = F.reshape(self.output(self.norm(h)), -1, arch.vocab), F.reshape(labels, -1)
        if self.net.loss == "compiled":
            loss = cross_entropy_compiled(logits, target)
        else:
            logits = cast_and_held(self.net, logits)
            loss = cross_entropy(logits, target)
        del logits
        return loss if self.remainder is None else F.touch(loss, self.remainder)

    def _table(self, s: int, head_dim: int) -> Tensor:
        """Cosines and sines as real numbers where queries and keys are normed, else as complex ones."""
        tape, half = self.net.tape, head_dim // 2
        tape.label = "rotary"
        if self.net.arch.qk_norm == "head":
            table = tape.empty((1, s, 1, 2 * head_dim), "float32")
            tape.share(table)
            return table
        magnitude, angle = tape.empty((s, half), "float32"), tape.empty((s, half), "float32")
        table = F.pointwise(magnitude, angle, dtype="complex64")
        tape.share(table)
        return table
