"""Tiny models with random weights, of the families that zsim knows."""

from __future__ import annotations

from typing import Any

import torch

from validation.oracles.family_configs import UNLISTED
from validation.oracles.tiny import TINY_PAIRS, TINY_VISION
from validation.oracles.tiny_gemma import TINY_GEMMA
from validation.oracles.tiny_hybrid import TINY_HYBRIDS
from validation.oracles.tiny_relatives import TINY_ENCODERS, TINY_RELATIVES

TINY: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 1000,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    },
    "qwen2": {
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 1000,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "vocab_size": 1000,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    },
    "mistral": {
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 1000,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    },
    "gpt2": {
        "n_embd": 256,
        "n_layer": 4,
        "n_head": 8,
        "vocab_size": 1000,
        "n_positions": 256,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    },
    "falcon": {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 1000},
    "mixtral": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 256,
    },
    "qwen3_moe": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 1000,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 256,
    },
    "qwen2_moe": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 160,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 256,
    },
    **TINY_GEMMA,
    **TINY_RELATIVES,
    **TINY_ENCODERS,
}

IMAGE = {"per_sequence": 1, "height": 56, "width": 56}  # four tokens of all
IMAGE_TOKENS = {"llava_next": 24, "llava_onevision": 24}  # but 4 of a small copy and 4 x 4 with the end of each row
IDEFICS = ("idefics3", "smolvlm")


def build(
    kind: str, dtype: torch.dtype = torch.float32, attention: str = "sdpa", **changes: Any
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A causal language model in training mode, and the configuration it was made from."""
    import transformers

    torch.manual_seed(0)
    settings = (TINY | TINY_VISION | TINY_PAIRS | TINY_HYBRIDS).get(kind, {}) | changes
    config = transformers.AutoConfig.for_model(kind, **settings)
    parts = (config, config.text_config, config.vision_config) if kind in TINY_VISION else (config,)
    for part in parts:
        part.use_cache = False
        part._attn_implementation = attention
    if getattr(config, "audio_config", None) is not None:
        config.audio_config._attn_implementation = "eager"  # all that it has
    if kind == "llama4":
        mend_llama4()
    seeing = kind in TINY_VISION or kind in UNLISTED
    auto = transformers.AutoModelForImageTextToText if seeing else transformers.AutoModelForCausalLM
    if kind in TINY_ENCODERS:
        tells_apart = "num_labels" in changes
        auto = transformers.AutoModelForSequenceClassification if tells_apart else transformers.AutoModelForMaskedLM
    if kind in TINY_PAIRS:
        auto = transformers.AutoModelForSpeechSeq2Seq if kind == "whisper" else transformers.AutoModelForSeq2SeqLM
    # float32 is not asked for: zero.Init would be overruled, which gives its own dtype
    model = auto.from_config(config, **({} if dtype is torch.float32 else {"dtype": dtype}))
    return model.train(), settings


def mend_llama4() -> None:
    """Llama4ForConditionalGeneration of transformers 5.24 asks its text model's output for what only its own has, and
    fails where it returns."""
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast

    MoeCausalLMOutputWithPast.image_outputs = None


def leave_weights() -> None:
    """Weights stay as torch makes them: under zero.Init, which leaves shards behind, transformers cannot write rows of
    an embedding. Its from_pretrained does not either (get_init_context)."""
    import transformers

    transformers.PreTrainedModel.initialize_weights = lambda _model: None  # type: ignore[method-assign]


def inputs_of(
    config: dict[str, Any], tokens: torch.Tensor, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """What the model of a configuration is called with."""
    given, labels = inputs(config["model"], tokens, dtype), config.get("over", {}).get("num_labels")
    if config["model"] == "glm4v_moe" and config.get("experts") == "modules":  # 4.57 fails without a mask
        given["attention_mask"] = torch.ones_like(tokens)
    return given | {"labels": tokens[:, 0] % labels} if labels else given


def inputs(kind: str, tokens: torch.Tensor, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """What the model is called with, sounds in the dtype of the run; the first tokens of a vision-language model are
    those of an image."""
    if kind == "whisper":
        channels = TINY_PAIRS[kind]["num_mel_bins"]
        features = torch.zeros(len(tokens), channels, 2 * tokens.shape[1], dtype=dtype)
        return {"input_features": features, "labels": tokens[:, : target(tokens.shape[1])]}
    if kind in TINY_PAIRS:
        return {"input_ids": tokens, "labels": tokens[:, : target(tokens.shape[1])]}
    if kind not in TINY_VISION:
        return {"input_ids": tokens, "labels": tokens}
    image = TINY_VISION[kind]
    token = image.get("image_token_id", image.get("image_token_index"))
    ids = tokens.clamp(max=token - 1)
    ids[:, : IMAGE_TOKENS.get(kind, 4)] = token
    given = {"input_ids": ids, "labels": tokens.clamp(max=token - 1)}
    if kind == "mllama":  # one token of an image, of four squares
        return {
            "input_ids": tokens.clamp(max=998), "labels": given["labels"],
            "pixel_values": torch.zeros(len(ids), 1, 4, 3, 56, 56), "aspect_ratio_ids": torch.ones(len(ids), 1).long(),
            "aspect_ratio_mask": torch.ones(len(ids), 1, 4).long(),
            "cross_attention_mask": torch.ones(*ids.shape, 1, 4).long(),
        }  # fmt: skip
    if kind == "llama4":  # in the dtype of the run
        return given | {"pixel_values": torch.zeros(len(ids), 3, 56, 56, dtype=dtype)}
    if kind == "gemma4":  # 36 patches, and padding behind them
        places = torch.full((len(ids), 45, 2), -1)
        places[:, :36] = torch.cartesian_prod(torch.arange(6), torch.arange(6)).flip(-1)
        pixels = torch.zeros(len(ids), 45, 48)
        return given | {
            "pixel_values": pixels, "image_position_ids": places, "mm_token_type_ids": (ids == token).int(),
        }  # fmt: skip
    if kind in IDEFICS:  # whose squares of zeros are left out
        pixels, mask = torch.ones(len(ids), 1, 3, 56, 56), torch.ones(len(ids), 1, 56, 56, dtype=torch.long)
        return given | {"pixel_values": pixels, "pixel_attention_mask": mask}
    if kind in IMAGE_TOKENS:
        return given | {"pixel_values": torch.zeros(len(ids), 5, 3, 28, 28), "image_sizes": [[56, 56]] * len(ids)}
    if kind in ("mistral3", "lighton_ocr"):
        given |= {"image_sizes": [[56, 56]] * len(ids)}
    if not kind.startswith(("qwen", "glm", "exaone", "paddleocr")):
        return given | {"pixel_values": torch.zeros(len(ids), 3, 56, 56)}
    grid = torch.tensor([[1, 4, 4]] * len(ids))
    if kind == "exaone4_5":  # whose positions are those of text
        return given | {"pixel_values": torch.zeros(16 * len(ids), 1176), "image_grid_thw": grid}
    if kind == "paddleocr_vl":
        types = (ids == token).int()
        pixels = torch.zeros(16 * len(ids), 3, 14, 14)
        return given | {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": types}
    values = 1536 if kind.startswith("qwen3") else 1176
    return given | {
        "pixel_values": torch.zeros(16 * len(ids), values), "image_grid_thw": grid,
        "mm_token_type_ids": (ids == token).int(),
    }  # fmt: skip


def target(tokens: int) -> int:
    """Tokens of the labels of `TINY_PAIRS`."""
    return tokens // 2


def units(model: torch.nn.Module) -> list[torch.nn.Module]:
    """What FSDP wraps: blocks, of a vision-language model all of `_no_split_modules`. Those of encoders have the tied
    embedding, which FSDP cannot have in a unit and outside."""
    if sees(model):
        return of_classes(model, list(model._no_split_modules))
    return blocks(model)


def of_classes(model: torch.nn.Module, names: list[str]) -> list[torch.nn.Module]:
    """From the leaves up, as accelerate shards them."""
    return [module for module in reversed(list(model.modules())) if type(module).__name__ in names]


def text_model(model: torch.nn.Module) -> torch.nn.Module:
    owner = getattr(model, "model", getattr(model, "backbone", model))
    text = getattr(owner, "language_model", getattr(owner, "text_model", owner))
    return getattr(text, "model", text)


def sees(model: torch.nn.Module) -> bool:
    """Whether it is a vision-language model."""
    return text_model(model) is not getattr(model, "model", model)


def final_norm(decoder: torch.nn.Module) -> torch.nn.Module | None:
    """The last of its children that is one, as accelerate looks for it (utils/fsdp_utils.py _find_final_norm)."""
    return ([child for child in decoder.children() if "Norm" in type(child).__name__] or [None])[-1]


def stacks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Encoder and decoder of a model that has both."""
    owner = model.model if hasattr(model, "model") else model
    return [owner.encoder, owner.decoder] if hasattr(owner, "encoder") else []


def blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    if found := stacks(model):
        return [block for stack in found for block in (stack.block if hasattr(stack, "block") else stack.layers)]
    if sees(model):
        return list(text_model(model).layers)
    for name in ("encoder", "transformer"):
        if hasattr(getattr(model.base_model, name, None), "layer"):
            return list(getattr(model.base_model, name).layer)
    if hasattr(model, "model") or hasattr(model, "backbone"):
        return list(model.base_model.layers)
    return list(model.transformer.h if hasattr(model.transformer, "h") else model.transformer.blocks)


def marked(model: torch.nn.Module) -> list[str]:
    """Modules that recordings mark: embeddings, blocks, the final norm, the head."""
    parts = {id(module) for module in blocks(model)}
    named = (
        "model.language_model.embed_tokens",
        "model.language_model.norm",
        "model.text_model.embed_tokens",
        "model.text_model.norm",
        "model.visual",
        "model.vision_tower",
        "model.vision_model",
        "model.connector",
        "model.multi_modal_projector",
        "model.embeddings",
        "model.final_norm",
        "bert.embeddings",
        "roberta.embeddings",
        "electra.embeddings",
        "model.embed_tokens",
        "model.norm",
        "model.embedding_norm",
        "model.embeddings",
        "model.norm_f",
        "model.final_layernorm",
        "backbone.embeddings",
        "backbone.norm_f",
        "lm_head",
        "transformer.wte",
        "transformer.word_embeddings",
        "transformer.wpe",
        "transformer.ln_f",
    )
    return [name for name, module in model.named_modules() if id(module) in parts or name in named]


def freeze(model: torch.nn.Module, patterns: list[str]) -> None:
    """Parameters whose name contains one of `patterns` are not trained."""
    for name, parameter in model.named_parameters():
        if any(pattern in name for pattern in patterns):
            parameter.requires_grad_(False)


def adapt(model: torch.nn.Module, lora: dict[str, Any]) -> None:
    """peft's adapters of rank `r` on the Linear modules named in `targets`, and modules that train whole beside them;
    the rest is frozen. `widened`: adapters in float32, as get_peft_model has them (autocast_adapter_dtype)."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=lora["r"],
        target_modules=lora["targets"],
        lora_dropout=lora.get("dropout", 0.0),
        modules_to_save=list(lora.get("modules_to_save", [])) or None,  # peft changes it
        ensure_weight_tying=lora.get("ensure_weight_tying", False),
        target_parameters=lora.get("target_parameters"),
    )
    inject_adapter_in_model(config, model)
    freeze_all_but(model, "lora_", ".modules_to_save.")
    if lora.get("widened"):
        widen(model, ".lora_")


def trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def widen(model: torch.nn.Module, part: str = "") -> None:
    """What is trained, and has `part` in its name, in float32."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and part in name:
            parameter.data = parameter.data.to(torch.float32)


def adapter_leaves(model: torch.nn.Module) -> list[torch.nn.Module]:
    """peft/utils/other.py fsdp_auto_wrap_policy: leaves whose weight is trained, beside the blocks."""
    return [m for m in model.modules() if not list(m.children()) and getattr(m, "weight", None) is not None
            and m.weight.requires_grad]  # fmt: skip


def freeze_all_but(model: torch.nn.Module, *parts: str) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in parts))


def hidden_matrices(model: torch.nn.Module) -> set[int]:
    """The ids of what Muon updates: matrices, but no embedding and no head (as DeepSpeed's set_optimizer_flags)."""
    return {
        id(parameter)
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and not any(part in name.lower() for part in ("embed", "lm_head"))
    }


def decay_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """transformers 5.14 trainer.py, create_optimizer: the parameter groups of every run of the Trainer."""
    from transformers import Trainer

    decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for name, parameter in named if name in decayed], "weight_decay": 0.01},
        {"params": [parameter for name, parameter in named if name not in decayed], "weight_decay": 0.0},
    ]
