"""Whether the name of a model fits the config.json that stands for it: its size and its family, where it says them."""

from __future__ import annotations

import re

# Parameters as names have them: 8B, 1.5b, 1_6b, 1b7, 135M, 8x7B, and not A3B, which are active ones. Of 17B-16E and of
# E4B the total does not follow.
_SIZE = re.compile(r"(?<![a-z0-9._])(?:(\d+)x)?(\d+(?:[._]\d+)?)(b(?:\d(?!\d))?|m)(?![a-z0-9])")
_OTHERS = re.compile(r"(?<![a-z0-9])(?:\d+e|e\d+(?:[._]\d+)?b)(?![a-z0-9])")
# A name rounds, leaves embeddings, towers or shared experts out, or counts shared parts of experts several times.
_LEAST, _MOST = 0.6, 1.9
# Words that name a family, and what the model_type of its members has in it: of those that others do not use as well.
_FAMILIES = {
    r"llama": ("llama",),
    r"qwen|qwq": ("qwen",),
    r"mistral|ministral": ("mistral", "ministral"),
    r"mixtral": ("mixtral",),
    r"gemma": ("gemma",),
    r"(?<![a-z])phi[-_ ]?\d": ("phi", "llama"),  # Phi-4 is also published with the keys of Llama
    r"gpt[-_]?2": ("gpt2",),
    r"gpt[-_]oss": ("gpt_oss",),
    r"(?<![a-z])olmo": ("olmo",),
}
# Numbers of generations that have a model_type of their own. What follows may not make a size of it: gemma-2b.
_GENERATIONS = {
    r"qwen[-_]?(?:1[._]5|2)(?![\db])": "qwen2",
    r"qwen[-_]?3(?![\db])": "qwen3",
    r"gemma[-_]?2(?![\db._])": "gemma2",
    r"gemma[-_]?3(?![\db._])": "gemma3",
    r"llama[-_]?4(?![\db._])": "llama4",
    r"olmo[-_]?2(?![\db._])": "olmo2",
}


def contradiction(name: str, family: str, parameters: int) -> str | None:
    """What a model called `name` clearly has not in common with one of this `family` and so many parameters; None where
    the name fits or does not say."""
    cached = re.search(r"models--[^/]*--([^/]+)", name)  # in the Hub's cache
    words = (cached[1] if cached else name.rstrip("/").rpartition("/")[2]).lower()
    named = [part for word, parts in _FAMILIES.items() if re.search(word, words) for part in parts]
    generations = [part for word, part in _GENERATIONS.items() if re.search(word, words)]
    if any(parts and not any(part in family for part in parts) for parts in (named, generations)):
        return f"is of another family, {family}"
    sizes = [] if _OTHERS.search(words) else [_parameters(*found.groups()) for found in _SIZE.finditer(words)]
    if sizes and not any(_LEAST <= parameters / size <= _MOST for size in sizes):
        return f"has {parameters:,} parameters"
    return None


def _parameters(experts: str | None, number: str, unit: str) -> float:
    value = float(f"{number}.{unit[1:]}" if len(unit) > 1 else number.replace("_", "."))
    return value * int(experts or 1) * (10**6 if unit == "m" else 10**9)
