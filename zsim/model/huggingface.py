"""Reads a Hugging Face config.json."""

from __future__ import annotations

import json
from pathlib import Path

from zsim.model import families
from zsim.model.architecture import Architecture
from zsim.model.layers import Net
from zsim.model.spec import ModelSpec
from zsim.model.trace import parameters


def read_config(path: Path | str) -> ModelSpec:
    path = Path(path)
    c = json.loads(path.read_text())
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    family = c["model_type"]
    arch = Architecture(
        family=family,
        hidden=hidden,
        layers=c["num_hidden_layers"],
        heads=heads,
        kv_heads=c.get("num_key_value_heads") or heads,
        head_dim=c.get("head_dim") or hidden // heads,
        intermediate=c["intermediate_size"],
        vocab=c["vocab_size"],
        positions=c.get("max_position_embeddings", 2048),
        tied=c.get("tie_word_embeddings", False),
        activation=c.get("hidden_act", "silu"),
        attention_bias=c.get("attention_bias", family == "qwen2"),
        output_bias=c.get("attention_bias", False),
        mlp_bias=c.get("mlp_bias", False),
        qk_norm=family == "qwen3",
    )
    return from_architecture(path.parent.name, arch)


def from_architecture(name: str, arch: Architecture, notes: tuple[str, ...] = ()) -> ModelSpec:
    model = families.build(Net(arch))
    return ModelSpec(name, arch.family, parameters(model), arch, notes=notes)
