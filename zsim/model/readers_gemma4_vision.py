"""Gemma 4's config.json with a vision tower, with the defaults of transformers 5.24 (configuration_gemma4.py)."""

from __future__ import annotations

from dataclasses import replace

from zsim.model.architecture import Architecture, LayerKind, Sound, Vision
from zsim.model.fields import Fields
from zsim.model.reader_parts import read_activation
from zsim.model.reader_vision_parts import read_blocks, read_text, read_tower

_LAYERS = {
    "hidden": (("hidden_size",), 768), "heads": (("num_attention_heads",), 12), "layers": (("num_hidden_layers",), 16),
    "intermediate": (("intermediate_size",), 3072), "activation": "gelu_pytorch_tanh",
}  # fmt: skip


def gemma4(fields: Fields, family: str) -> Architecture:
    if fields.raw("vision_config") is None:
        fields.refuse("vision_config", "Gemma 4 without its vision tower", "the text_config as a file of its own")
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
        sound=_sound(fields) if "audio_config" in fields else None,
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


def _sound(fields: Fields) -> Sound:
    audio = fields.section("audio_config")
    hidden, heads = audio.size("hidden_size", default=1024), audio.size("num_attention_heads", default=8)
    if hidden % heads:
        audio.fail("num_attention_heads", f"is {heads}, which does not divide the width {hidden}", "a divisor of it")
    channels = audio.items("subsampling_conv_channels", 2) or [128, 32]
    if not all(isinstance(each, int) and not isinstance(each, bool) and each > 3 for each in channels):
        audio.fail("subsampling_conv_channels", f"is {channels}", "two numbers of channels")
    return Sound(
        hidden=hidden,
        layers=audio.size("num_hidden_layers", default=12, most=10_000),
        heads=heads,
        channels=(channels[0], channels[1]),
        kernel=audio.size("conv_kernel_size", default=5),
        outputs=audio.size("output_proj_dims", default=1536),
        clips=audio.flag("use_clipped_linears", default=True),
    )
