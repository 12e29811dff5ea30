"""What tells equal layers apart when they run: which of their parameters are trained, and what comes before them."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from zsim.model.spec import ModelSpec

# In names of vision-language models: lists of layers, and a unit of FSDP that is no layer (CLIPVisionEmbeddings).
LISTS = ("blocks", "layers", "layer")
EMBEDDINGS = ".vision_tower.embeddings."
OWN_EMBEDDINGS = ("clip_vision_model", "siglip_vision_model")  # towers that have such a unit
UNITS_IN_LAYERS = ("idefics3_vision", "smolvlm_vision")  # whose attention alone is a unit
PROJECTOR = ".multi_modal_projector."  # PaliGemma's, a unit as well
PATCHES = ".vision_tower.patch_embedder."  # and Gemma 4's
# Whose towers are units as well, around those of their layers.
WHOLE_TOWERS = ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
SOUND = (".audio_tower.", ".embed_audio.")  # which are given nothing
# Registered before the layers, and called behind them.
BEHIND = (
    "lm_head.bias",
    "lm_head.dense.",
    "lm_head.layer_norm.",
    ".final_layer_norm.",
    ".project_out.",
    ".layernorm_post.",
    ".merger_list.",
)
LATE_PROJECTOR = ".embed_vision."  # registered behind the text model (Gemma 4)


def with_flat_units(spec: ModelSpec, units: str) -> ModelSpec:
    """Parameters are views of their unit's flat one, which requires a gradient if any of them does: frozen ones as well
    then have one, and pass one on to what came before (torch 2.13 fsdp/_flat_param.py _use_unsharded_views)."""
    tower = getattr(spec.arch, "vision", None)
    vision = tower is not None
    own = [EMBEDDINGS] if tower is not None and tower.blocks.family in OWN_EMBEDDINGS else []
    own += [PROJECTOR] if spec.family == "paligemma" else []
    own += [PATCHES] if spec.family == "gemma4" else []
    own += [".visual.", ".audio_tower."] if spec.family in WHOLE_TOWERS else []
    parts = tower is not None and tower.blocks.family in UNITS_IN_LAYERS
    apart = {
        parameter.name.rpartition(".")[0] for parameter in spec.parameters if parameter.trainable and units == "leaf"
    }

    def unit(name: str) -> str:
        if (owner := name.rpartition(".")[0]) in apart:
            return owner
        if units == "whole":
            return ""
        at = _layer_at(name, vision)
        if parts and ".vision_model." in name:
            before, attention, _ = name.partition(".self_attn.")
            return before if attention else ""
        if at is not None:
            return ".".join(name.split(".")[: at + 1])
        return next((part for part in own if part in name), "")

    trained = {unit(parameter.name) for parameter in spec.parameters if parameter.trainable}
    found = tuple(replace(p, trainable=True) if unit(p.name) in trained else p for p in spec.parameters)
    return replace(spec, parameters=found)


def _layer_at(name: str, vision: bool) -> int | None:
    """Which part of a parameter's name is the number of its layer."""
    parts = name.split(".")
    at = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
    return at if at is not None and (not vision or parts[at - 1] in LISTS) else None


Keys = tuple[tuple[object, ...], ...]


def trains_tower(spec: ModelSpec) -> bool:
    from zsim.model.parts import part_of

    return any(parameter.trainable and part_of(parameter.name) == "vision_tower" for parameter in spec.parameters)


def layer_keys(spec: ModelSpec, reached: bool, reached_tower: bool) -> tuple[Keys, Keys]:
    """Per layer which of its parameters are trainable and whether its input needs a gradient; () if all are. Of the
    text model's layers, and of those of a vision tower.

    On a quantized base the first one is apart: bitsandbytes' modules give back the dtype that they are given, so that a
    float32 norm widens what all later layers are given.

    `reached`, `reached_tower`: what comes before the first layer requires a gradient, even if nothing there is trained.
    """
    if spec.trainable_numel == spec.numel:
        return (), ()
    from zsim.model.parts import TOWERS

    eyes = getattr(spec.arch, "vision", None)
    vision = eyes is not None
    pair = getattr(spec.arch, "seq2seq", None) is not None
    lists: dict[bool, dict[int, list[bool]]] = {False: {}, True: {}}
    before, read = {False: reached, True: reached_tower}, False
    crossed = {number for number, kind in enumerate(getattr(spec.arch, "kinds", ())) if kind.crossed}
    for parameter in spec.parameters:
        if any(part in parameter.name for part in SOUND):
            continue
        parts, at = parameter.name.split("."), _layer_at(parameter.name, vision)
        in_tower = (vision and any(part in TOWERS for part in parts[:2])) or (pair and "encoder" in parts[:2])
        if at is not None:
            number = int(parts[at])
            if eyes is not None and parts[at - 2] == "global_transformer":  # behind the others (Llama 3.2 Vision)
                number += eyes.blocks.layers
            lists[in_tower].setdefault(number, []).append(parameter.trainable)
        elif not lists[in_tower] and not any(part in parameter.name for part in BEHIND):
            before[in_tower] = before[in_tower] or parameter.trainable
            if pair:  # the embedding is that of both stacks
                before[True] = before[True] or parameter.trainable
        if (in_tower or LATE_PROJECTOR in parameter.name) and not crossed:  # whose output the text model's layers read
            before[False] = before[False] or parameter.trainable
        if PROJECTOR in f".{parameter.name}" or in_tower:
            read = read or parameter.trainable
    quantized = spec.tuning is not None and spec.tuning.quantize is not None
    tower = _keys(lists[True], before[True], (), quantized)
    return _keys(lists[False], before[False], crossed if read or reached_tower else (), quantized), tower


def _keys(layers: dict[int, list[bool]], reached: bool, reading: Container[int], first_apart: bool) -> Keys:
    """`reading`: layers whose output requires a gradient of what they read besides."""
    keys: list[tuple[object, ...]] = []
    for number in sorted(layers):
        keys.append(((*layers[number], first_apart and not keys), reached))
        reached = reached or any(layers[number]) or number in reading
    return tuple(keys)
