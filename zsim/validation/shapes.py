"""Shapes of well-known models, for rows that name one and leave its columns empty."""

from __future__ import annotations

import re
from dataclasses import replace

from zsim.validation.rows import Row

COLUMNS = ("n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab")
# The config.json of each on the Hugging Face hub; names without what is not a letter or a digit.
SHAPES = {
    "llama7b": (32, 4096, 32, 32, 11008, 32000),
    "llama13b": (40, 5120, 40, 40, 13824, 32000),
    "llama30b": (60, 6656, 52, 52, 17920, 32000),
    "llama65b": (80, 8192, 64, 64, 22016, 32000),
    "llama27b": (32, 4096, 32, 32, 11008, 32000),
    "llama213b": (40, 5120, 40, 40, 13824, 32000),
    "llama270b": (80, 8192, 64, 8, 28672, 32000),
    "llama38b": (32, 4096, 32, 8, 14336, 128256),
    "llama370b": (80, 8192, 64, 8, 28672, 128256),
    "llama318b": (32, 4096, 32, 8, 14336, 128256),
    "llama3170b": (80, 8192, 64, 8, 28672, 128256),
    "mistral7b": (32, 4096, 32, 8, 14336, 32000),
    "yi6b": (32, 4096, 32, 4, 11008, 64000),
    "yi34b": (60, 7168, 56, 8, 20480, 64000),
    "qwen257b": (28, 3584, 28, 4, 18944, 152064),
    "qwen2514b": (48, 5120, 40, 8, 13824, 152064),
    "qwen2532b": (64, 5120, 40, 8, 27648, 152064),
    "qwen2572b": (80, 8192, 64, 8, 29568, 152064),
}


def with_shape(row: Row) -> Row:
    """The row with the columns that its model's name settles. A row that states any part of a shape is left alone."""
    shape = SHAPES.get(_plain(row.get("model")))
    if shape is None or any(row.get(column) for column in COLUMNS):
        return row
    return replace(row, cells={**row.cells, **dict(zip(COLUMNS, map(str, shape), strict=True))})


def _plain(name: str) -> str:
    """ "meta-llama/Llama-2-7b-hf" and "llama2-7b" are llama27b."""
    name = name.lower().rsplit("/", 1)[-1]
    return re.sub(r"[^a-z0-9]", "", re.sub(r"-(hf|instruct|chat|base|v0\.\d)\b", "", name))
