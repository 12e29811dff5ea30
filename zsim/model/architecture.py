"""The normalized configuration of a decoder: what a config.json means, whatever names its family gives the fields."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Moe:
    """Routed experts in place of the MLP."""

    experts: int
    top_k: int
    intermediate: int
    norm_top_k: bool = True  # the chosen weights are divided by their sum
    sparse: tuple[bool, ...] = ()  # which layers have experts; empty: all


@dataclass(frozen=True, slots=True)
class Architecture:
    """A causal decoder. Widths in elements; `layer_types[i]` is what distinguishes layer i ("full", "sliding")."""

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    positions: int
    tied: bool
    activation: str = "silu"
    attention_bias: bool = False  # q, k, v
    output_bias: bool = False  # o
    mlp_bias: bool = False
    norm_bias: bool = True  # of LayerNorms
    qk_norm: bool = False
    parallel: bool = False  # attention and MLP read the same input
    rotary_dim: int = 0
    embed_width: int = 0  # of the token embedding, where it differs from `hidden` (OPT)
    final_norm: bool = True
    head_bias: bool = False
    dropout: float = 0.0  # of the residual stream
    attention_dropout: float = 0.0
    embedding_dropout: float = 0.0
    window: int | None = None
    layer_types: tuple[str, ...] = ()
    moe: Moe | None = None
    softcap: bool = False  # Gemma 2: attention logits
    final_softcap: bool = False
    pad_rows: int = 0

    @property
    def kinds(self) -> tuple[tuple[str, bool], ...]:
        """What distinguishes each layer: its attention, and whether it has experts."""
        types = self.layer_types or ("full",) * self.layers
        sparse = (self.moe is not None,) * self.layers if self.moe is None or not self.moe.sparse else self.moe.sparse
        return tuple(zip(types, sparse, strict=True))
