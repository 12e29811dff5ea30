"""Configurations of vision-language models."""

from __future__ import annotations

from validation.oracles.configuration_parts import REGATHER, SMALL_ZERO, Config, config_of, zero_of
from validation.oracles.tiny_gemma import GEMMA4_LARGE, GEMMA4_SOUND


def vision_configurations() -> list[Config]:
    """Vision-language models: a frozen tower, its projector trained or not, or the projector alone."""
    tower = {"qwen2_5_vl": ["visual."], "llava": ["vision_tower."]}
    eyes = {"qwen2_5_vl": ["patch_embed", "visual.blocks"], "llava": ["vision_tower."]}
    rest = {"qwen2_5_vl": ["patch_embed", "visual.blocks", "language_model", "lm_head"],
            "llava": ["vision_tower.", "language_model", "lm_head"]}  # fmt: skip
    deep = ["patch_embed", "pos_embed", "visual.blocks", "deepstack"]
    found = []
    for model in ("qwen2_5_vl", "llava"):
        frozen, aligning, eyed = tower[model], rest[model], eyes[model]
        found += [
            config_of("ddp", "vlm_frozen", model=model, ddp={"bucket_cap_mb": 1}, freeze=frozen),
            config_of("ddp", "vlm_align", model=model, ddp={"bucket_cap_mb": 1}, freeze=aligning),
            config_of("fsdp2", "vlm_frozen", model=model, freeze=frozen),
            config_of("fsdp2", "vlm_align", model=model, freeze=aligning),
            config_of("fsdp2", "vlm_accelerate", model=model, freeze=frozen, fsdp={"accelerate": True}),
            config_of("fsdp2", "vlm_frozen_ckpt", model=model, freeze=eyed, ckpt=True),
            config_of("fsdp1", "vlm_frozen", model=model, freeze=frozen),
            config_of("fsdp1", "vlm_frozen_ckpt", model=model, freeze=eyed, ckpt=True),
            config_of("fsdp1", "vlm_align", model=model, freeze=aligning),
        ]
        for stage in (1, 2, 3):
            found += [
                zero_of("vlm_frozen", stage, model=model, zero=SMALL_ZERO, freeze=frozen),
                zero_of("vlm_align", stage, model=model, zero=SMALL_ZERO, freeze=aligning),
            ]
        found += [
            zero_of("vlm_regather", 3, ga=2, model=model, zero=REGATHER, freeze=frozen),
            zero_of("vlm_frozen_ckpt", 2, ga=2, model=model, zero=SMALL_ZERO, freeze=eyed, ckpt=True),
            zero_of("vlm_frozen_ckpt", 3, ga=2, model=model, zero=REGATHER, freeze=eyed, ckpt=True),
            zero_of("vlm_init", 3, model=model, zero=SMALL_ZERO, freeze=frozen, zero_init=True),
        ]
    return [
        *found,
        config_of("ddp", "vlm", model="qwen2_5_vl", ddp={"bucket_cap_mb": 1}),
        config_of("fsdp2", "vlm", model="qwen2_5_vl"),
        config_of("fsdp1", "vlm", model="qwen2_5_vl"),
        config_of("fsdp2", "vlm", model="llava"),
        zero_of("vlm", 2, model="qwen2_5_vl", zero=SMALL_ZERO),
        zero_of("vlm", 3, model="qwen2_5_vl", zero=SMALL_ZERO),
        zero_of("vlm", 3, model="llava", zero=SMALL_ZERO),
        config_of("ddp", "vlm_deep", model="qwen3_vl", ddp={"bucket_cap_mb": 1}, freeze=deep),
        config_of("fsdp2", "vlm_deep", model="qwen3_vl", freeze=deep),
        config_of("fsdp2", "vlm_deep_ckpt", model="qwen3_vl", freeze=deep, ckpt=True),
        config_of("fsdp1", "vlm_deep", model="qwen3_vl", freeze=deep),
        zero_of("vlm_deep", 2, model="qwen3_vl", zero=SMALL_ZERO, freeze=deep),
        zero_of("vlm_deep", 3, ga=2, model="qwen3_vl", zero=REGATHER, freeze=deep),
        zero_of("vlm_deep_all", 3, model="qwen3_vl", zero=SMALL_ZERO),
        *_other_vision(),
    ]


def gemma4_vision() -> list[Config]:
    """As E2B and E4B without sound, which read a row of the embedding by itself, and as the larger ones."""
    tower, align = ["vision_tower."], ["vision_tower.", "language_model", "lm_head"]
    model: Config = {"model": "gemma4"}
    large = model | {"over": GEMMA4_LARGE}
    found = []
    for tag, kind in (("vlm", model), ("vlm_large", large)):
        found += [
            config_of("fsdp2", tag, **kind),
            config_of("fsdp2", f"{tag}_frozen", **kind, freeze=tower),
            config_of("fsdp1", f"{tag}_frozen", **kind, freeze=tower),
            zero_of(f"{tag}_frozen", 2, **kind, zero=SMALL_ZERO, freeze=tower),
            zero_of(tag, 3, **kind, zero=SMALL_ZERO),
            zero_of(f"{tag}_regather", 3, ga=2, **kind, zero=REGATHER, freeze=tower),
        ]
    sound: Config = {"model": "gemma4", "over": GEMMA4_SOUND}
    silent = [*tower, "audio_tower.", "embed_audio."]
    return [
        *found,
        zero_of("vlm_silent", 1, **sound, zero=SMALL_ZERO),
        zero_of("vlm_silent", 2, **sound, zero=SMALL_ZERO),
        zero_of("vlm_silent_frozen", 2, **sound, zero=SMALL_ZERO, freeze=silent),
        zero_of("vlm_silent", 3, **sound, zero=SMALL_ZERO),
        zero_of("vlm_silent_regather", 3, ga=2, **sound, zero=REGATHER, freeze=silent),
        config_of("fsdp2", "vlm_silent", **sound),
        config_of("fsdp1", "vlm_silent", **sound),
        config_of("fsdp1", "vlm_silent_frozen", **sound, freeze=silent),
        config_of("fsdp2", "vlm_silent_ckpt", ga=2, **sound, ckpt=True),
        config_of("ddp", "vlm_silent_frozen", **sound, ddp={"bucket_cap_mb": 1}, freeze=silent),
        config_of("ddp", "vlm_frozen", **model, ddp={"bucket_cap_mb": 1}, freeze=tower),
        config_of("fsdp2", "vlm_align", **model, freeze=align),
        config_of("fsdp1", "vlm_align", **model, freeze=align),
        config_of("fsdp2", "vlm_frozen_ckpt", **model, freeze=tower, ckpt=True),
        config_of("fsdp1", "vlm_frozen_ckpt", **model, freeze=tower, ckpt=True),
        zero_of("vlm_align", 3, **model, zero=SMALL_ZERO, freeze=align),
        zero_of("vlm_frozen_ckpt", 3, ga=2, **model, zero=REGATHER, freeze=tower, ckpt=True),
    ]


def _other_vision() -> list[Config]:
    """Of each family that is built like those: all of it trained, and its tower frozen."""
    names = "llava_next", "llava_onevision", "mistral3", "internvl", "paligemma"
    towers = {
        **{model: ["vision_tower."] for model in names},
        **{model: ["vision_model."] for model in ("idefics3", "smolvlm", "llama4")},
        "lighton_ocr": ["vision_encoder."],
        "paddleocr_vl": ["visual."],
        "aya_vision": ["vision_tower."],
        "exaone4_5": ["patch_embed", "visual.blocks"],
        "qwen3_vl_moe": ["patch_embed", "pos_embed", "visual.blocks", "deepstack"],
        **{
            model: ["visual.embeddings", "patch_embed", "visual.blocks", "visual.post", "visual.downsample"]
            for model in ("glm4v", "glm4v_moe", "glm46v", "glm_ocr")
        },
        **{model: ["patch_embed", "pos_embed", "visual.blocks"] for model in ("qwen3_5", "qwen3_5_moe")},
    }  # fmt: skip
    found = []
    for name, tower in towers.items():
        model = {"model": name} | ({"attention": "eager"} if name == "paligemma" else {})
        found += [
            config_of("ddp", "vlm_frozen", **model, ddp={"bucket_cap_mb": 1}, freeze=tower),
            config_of("fsdp2", "vlm", **model),
            config_of("fsdp2", "vlm_frozen", **model, freeze=tower),
            config_of("fsdp1", "vlm_frozen", **model, freeze=tower),
            zero_of("vlm_frozen", 2, **model, zero=SMALL_ZERO, freeze=tower),
            zero_of("vlm", 3, **model, zero=SMALL_ZERO),
            zero_of("vlm_regather", 3, ga=2, **model, zero=REGATHER, freeze=tower),
        ]
    return [*found, *_units_in_layers(), *_cross_attention(), *_omni()]


def _omni() -> list[Config]:
    """With a tower of sounds that is given nothing: all trained, and all but mergers and the text model frozen."""
    found = []
    for name in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"):
        model: Config = {"model": name}
        silent = ["audio_tower.", "patch_embed", "pos_embed", "visual.blocks"]
        found += [
            config_of("ddp", "vlm_silent_frozen", **model, ddp={"bucket_cap_mb": 1}, freeze=silent),
            config_of("fsdp2", "vlm_silent", **model),
            config_of("fsdp2", "vlm_silent_frozen", **model, freeze=silent),
            config_of("fsdp1", "vlm_silent_frozen", **model, freeze=silent),
            config_of("fsdp1", "vlm_silent_text", **model, freeze=["audio_tower.", "visual."]),
            zero_of("vlm_silent", 1, **model, zero=SMALL_ZERO),
            zero_of("vlm_silent_frozen", 2, **model, zero=SMALL_ZERO, freeze=silent),
            zero_of("vlm_silent", 3, **model, zero=SMALL_ZERO),
            zero_of("vlm_silent_regather", 3, ga=2, **model, zero=REGATHER, freeze=silent),
        ]
    return found


def _cross_attention() -> list[Config]:
    """Llama 3.2 Vision: its tower frozen or its projector alone trained, checkpointed, built under zero.Init."""
    model, bucket = "mllama", {"bucket_cap_mb": 1}
    tower, rest = ["vision_model."], ["vision_model.", "language_model", "lm_head"]
    return [
        config_of("ddp", "vlm_frozen", model=model, ddp=bucket, freeze=tower),
        config_of("ddp", "vlm_align", model=model, ddp=bucket, freeze=rest),
        config_of("fsdp2", "vlm", model=model),
        config_of("fsdp2", "vlm_frozen", model=model, freeze=tower),
        config_of("fsdp2", "vlm_align", model=model, freeze=rest),
        config_of("fsdp2", "vlm_frozen_ckpt", model=model, freeze=tower, ckpt=True),
        config_of("fsdp1", "vlm", model=model),
        config_of("fsdp1", "vlm_frozen", model=model, freeze=tower),
        config_of("fsdp1", "vlm_align", model=model, freeze=rest),
        config_of("fsdp1", "vlm_frozen_ckpt", model=model, freeze=tower, ckpt=True),
        zero_of("vlm_frozen", 2, model=model, zero=SMALL_ZERO, freeze=tower),
        zero_of("vlm", 3, model=model, zero=SMALL_ZERO),
        zero_of("vlm_align", 3, model=model, zero=SMALL_ZERO, freeze=rest),
        zero_of("vlm_regather", 3, ga=2, model=model, zero=REGATHER, freeze=tower),
        zero_of("vlm_frozen_ckpt", 3, ga=2, model=model, zero=REGATHER, freeze=tower, ckpt=True),
        zero_of("vlm_init", 3, model=model, zero=SMALL_ZERO, freeze=tower, zero_init=True),
    ]


def _units_in_layers() -> list[Config]:
    """Of Idefics 3's tower FSDP wraps each attention, and leaves the rest of the layers to the root."""
    tower, layers = ["vision_model."], ["vision_model.encoder"]
    return [
        config_of("fsdp1", "vlm_frozen_ckpt", model="idefics3", freeze=tower, ckpt=True),
        config_of("fsdp2", "vlm_frozen_ckpt", model="idefics3", freeze=tower, ckpt=True),
        config_of("fsdp1", "vlm_layers", model="idefics3", freeze=layers),
        config_of("fsdp1", "vlm", model="idefics3"),
        zero_of("vlm_frozen_ckpt", 3, ga=2, model="idefics3", zero=REGATHER, freeze=tower, ckpt=True),
        zero_of("vlm_init", 3, model="idefics3", zero=SMALL_ZERO, freeze=tower, zero_init=True),
    ]
