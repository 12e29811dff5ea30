"""A plain Llama in the manner of torchtitan at the end of 2024, with its per-op selective checkpointing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

EPSILON = 1e-5


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPSILON)).type_as(x) * self.weight


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """x: [batch, sequence, heads, head size]; angles: complex, [sequence, head size / 2]."""
    y = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(y * angles.view(1, x.shape[1], 1, -1)).flatten(3).type_as(x)


class Block(nn.Module):
    def __init__(self, shape: dict[str, Any]) -> None:
        super().__init__()
        hidden, self.heads = shape["hidden_size"], shape["num_attention_heads"]
        self.kv_heads, self.head_size = shape["num_key_value_heads"], hidden // self.heads
        inner, kv = shape["intermediate_size"], self.kv_heads * self.head_size
        self.wq, self.wk = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, kv, bias=False)
        self.wv, self.wo = nn.Linear(hidden, kv, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.w1, self.w2 = nn.Linear(hidden, inner, bias=False), nn.Linear(inner, hidden, bias=False)
        self.w3 = nn.Linear(hidden, inner, bias=False)
        self.attention_norm, self.ffn_norm = Norm(hidden), Norm(hidden)

    def attend(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        batch, sequence, _ = x.shape
        q, k, v = (w(x).view(batch, sequence, -1, self.head_size) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, angles), rotate(k, angles)
        repeats = self.heads // self.kv_heads
        k, v = (
            t[:, :, :, None, :]
            .expand(batch, sequence, self.kv_heads, repeats, self.head_size)
            .reshape(batch, sequence, self.heads, self.head_size)
            for t in (k, v)
        )
        out = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return self.wo(out.transpose(1, 2).contiguous().view(batch, sequence, -1))

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        h = x + self.attend(self.attention_norm(x), angles)
        y = self.ffn_norm(h)
        return h + self.w2(functional.silu(self.w1(y)) * self.w3(y))


class TitanLlama(nn.Module):
    def __init__(self, shape: dict[str, Any]) -> None:
        super().__init__()
        hidden, vocabulary = shape["hidden_size"], shape["vocab_size"]
        self.tok_embeddings = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape["num_hidden_layers"]))
        self.norm = Norm(hidden)
        self.output = nn.Linear(hidden, vocabulary, bias=False)
        self.half = hidden // shape["num_attention_heads"] // 2

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        size = (tokens.shape[1], self.half)
        angles = torch.polar(torch.ones(size), torch.zeros(size))
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, angles)
        return functional.cross_entropy(self.output(self.norm(h)).flatten(0, 1).float(), labels.flatten(0, 1))


def per_op_checkpointing() -> Any:
    """torchtitan's per-op selective checkpointing: keep attention and every second matrix product."""
    mm = torch.ops.aten.mm.default
    kept = {
        mm,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        torch.ops.aten.max.default,  # of float8's scales
    }
    count = {False: 0, True: 0}

    def policy(context: Any, function: Any, *arguments: Any, **settings: Any) -> CheckpointPolicy:
        if function == mm:
            count[context.is_recompute] += 1
        second = function == mm and count[context.is_recompute] % 2 == 0
        keep = function in kept and not second
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
