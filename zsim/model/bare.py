"""A back-of-envelope model from nothing but its number of parameters."""

from __future__ import annotations

from zsim.errors import InputError
from zsim.model.architecture import Architecture, LayerKind
from zsim.model.huggingface import from_architecture
from zsim.model.spec import ModelSpec

# (hidden, layers) of known models by size: GPT-3's table (arXiv 2005.14165, table 2.1) up to 1.3e9, Llama (arXiv
# 2302.13971 and 2407.21783) from there, then GPT-3 and Megatron-LM (arXiv 2104.04473, table 1).
LADDER = (
    (256, 4), (512, 8), (768, 12), (1024, 24), (1536, 24), (2048, 24), (2560, 32), (4096, 32), (5120, 40), (6656, 60),
    (8192, 80), (12288, 96), (16384, 105), (20480, 105), (25600, 128),
)  # fmt: skip
VOCAB = 32_000  # Llama 2's
LEAST = 100_000


def from_params(n: int | float) -> ModelSpec:
    """A Llama-shaped model of exactly `n` parameters, untied, with a head of its own; its notes say the shape.

    The step of the ladder is the one nearest to `n` with the usual MLP of 8/3 hidden; then the MLP's width and
    the vocabulary, in steps of 64, take up the difference, and the little that is left is one vector more.
    Raises InputError for a number that is no integer, or under 100,000.
    """
    if isinstance(n, bool) or n != n or n in (float("inf"), float("-inf")) or n != int(n) or n < LEAST:
        raise InputError(f"is {n:g}", field="params", accepted=f"a whole number of at least {LEAST:,}, such as 8e9")
    n = int(n)
    hidden, layers = min(LADDER, key=lambda step: abs(_count(step[0], step[1], _usual(step[0]), VOCAB) / n - 1))
    vocab = VOCAB
    while _count(hidden, layers, hidden, vocab) > n:  # too small for its embeddings
        if vocab > 1000:
            vocab //= 2
        else:
            hidden //= 2
    unit = 64 if hidden >= 512 else 8  # widths that matrix products like
    intermediate = max(unit, (n - _count(hidden, layers, 0, vocab)) // (3 * hidden * layers) // unit * unit)
    vocab += (n - _count(hidden, layers, intermediate, vocab)) // (2 * hidden) // unit * unit
    rest = n - _count(hidden, layers, intermediate, vocab)
    head_dim = 128 if hidden % 128 == 0 and hidden >= 2048 else 64 if hidden % 64 == 0 else hidden
    arch = Architecture(
        family="llama",
        hidden=hidden,
        heads=hidden // head_dim,
        kv_heads=hidden // head_dim,
        head_dim=head_dim,
        intermediate=intermediate,
        vocab=vocab,
        kinds=(LayerKind(),) * layers,
        tied=False,
        remainder=rest,
    )
    shape = f"{layers} layers, hidden {hidden}, MLP {intermediate}, {hidden // head_dim} heads, vocabulary {vocab}"
    extra = f" and a vector of {rest} to make the count exact" if rest else ""
    return from_architecture(
        f"{n:.4g}-parameters", arch, (f"model: {n:,} parameters shaped like a Llama: {shape}{extra}",)
    )


def _usual(hidden: int) -> int:
    return 8 * hidden // 3


def _count(hidden: int, layers: int, intermediate: int, vocab: int) -> int:
    """Parameters of an untied Llama with as many key heads as heads."""
    block = 4 * hidden * hidden + 3 * hidden * intermediate + 2 * hidden
    return 2 * vocab * hidden + layers * block + hidden
