"""The models zsim can run: for each family, how it is built from its architecture."""

from __future__ import annotations

from zsim.errors import NotModeled
from zsim.model.layers import Module, Net


def build(net: Net) -> Module:
    """The root module of a family. Raises NotModeled for a family that is not here."""
    family = net.arch.family
    if net.implementation == "torchtitan":
        from zsim.model.families.torchtitan import Transformer

        if family not in ("llama", "mistral", "qwen2"):
            raise NotModeled(f"torchtitan's implementation of {family!r}", accepted="llama, mistral, qwen2")
        return Transformer(net)
    if family in ("llama", "mistral", "qwen2", "qwen3"):
        from zsim.model.families.llama import LlamaForCausalLM

        return LlamaForCausalLM(net, family.capitalize())
    raise NotModeled(f"model family {family!r}")
