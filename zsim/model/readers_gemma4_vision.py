"""Gemma 4's config.json with a vision tower, with the defaults of transformers 5.24 (configuration_gemma4.py)."""

from __future__ import annotations

from dataclasses import replace

from zsim.errors import NotModeled
from zsim.model.architecture import Architecture, LayerKind, Vision
from zsim.model.fields import Fields
from zsim.model.reader_parts import read_activation
from zsim.model.reader_vision_parts import read_blocks, read_text, read_tower

_LAYERS = {
    "hidden": (("hidden_size",), 768), "heads": (("num_attention_heads",), 12), "layers": (("num_hidden_layers",), 16),
    "intermediate": (("intermediate_size",), 3072), "activation": "gelu_pytorch_tanh",
}  # fmt: skip


def gemma4(fields: Fields, family: str) -> Architecture:
    if fields.raw("audio_config") is not None:
        _refuse(fields, "audio_config", "Gemma 4 with its audio tower", "null, or the text_config as a file of its own")
    if fields.raw("vision_config") is None:
        _refuse(fields, "vision_config", "Gemma 4 without its vision tower", "the text_config as a file of its own")
    text = read_text(fields, family, ("gemma4_text",), "gemma4_text", tied=True)
    vision = read_tower(fields, "gemma4_vision")
    blocks = read_blocks(vision, "gemma4_vision", _LAYERS, lambda layer: LayerKind())
    if vision.size("num_key_value_heads", default=blocks.heads) != blocks.heads:
        vision.fail("num_key_value_heads", f"is not that of the {blocks.heads} heads", str(blocks.heads))
    head_dim = vision.size("head_dim", default=64)
    if head_dim % 4:
        vision.fail("head_dim", f"is {head_dim}", "a multiple of 4: rows and columns rotate half of it each")
    activation = read_activation(vision, "hidden_activation", default="gelu_pytorch_tanh")
    return replace(
        text,
        vision=Vision(
            replace(blocks, head_dim=head_dim, activation=activation, mlp_bias=False),
            patch=vision.size("patch_size", default=16),
            pool=vision.size("pooling_kernel_size", default=3),
            positions=vision.size("position_embedding_size", default=10_240),
            input_embedding=False,
            # the processor's max_soft_tokens, which published files state so
            most_tokens=vision.size("default_output_length", default=280),
            standardizes=vision.flag("standardize", default=False),
            clips=vision.flag("use_clipped_linears", default=False),
        ),
    )


def _refuse(fields: Fields, name: str, message: str, accepted: str) -> None:
    raise NotModeled(message, file=fields.path, line=fields.line(name), field=name, accepted=accepted)
