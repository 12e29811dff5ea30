"""Tiny models with random weights, of the families that zsim knows."""

from __future__ import annotations

from typing import Any

import torch

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
    "glm4_moe": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 1000,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "use_qk_norm": True,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
    },
    "llama4_text": {
        "hidden_size": 128,
        "intermediate_size": 96,
        "intermediate_size_mlp": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 1000,
        "num_local_experts": 4,
        "moe_layers": [1, 2, 3],
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "ministral3": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 1000,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
    },
    "granitemoe": {
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
    },
}

# Models with an encoder and a decoder, whose labels are half as long.
TINY_PAIRS: dict[str, dict[str, Any]] = {
    "t5": {
        "d_model": 256, "d_kv": 32, "d_ff": 688, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 8,
        "vocab_size": 1000, "dropout_rate": 0.0, "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0,
    },
    "whisper": {
        "d_model": 256, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 4, "vocab_size": 1000,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 688, "decoder_ffn_dim": 688, "num_mel_bins": 20,
        "max_source_positions": 32, "max_target_positions": 48, "decoder_start_token_id": 1, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    },
}  # fmt: skip

_TEXT = {
    "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 1000, "max_position_embeddings": 256,
}  # fmt: skip
TINY_VISION: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "image_token_id": 999,
        "tie_word_embeddings": False,
        "text_config": _TEXT
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}},
        "vision_config": {
            "depth": 4, "hidden_size": 160, "intermediate_size": 340, "num_heads": 4, "out_hidden_size": 256,
            "fullatt_block_indexes": [1, 3],
        },
    },
    "qwen3_vl": {
        "image_token_id": 999,
        "tie_word_embeddings": False,
        "text_config": _TEXT
        | {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5]}},
        "vision_config": {
            "depth": 4, "hidden_size": 160, "intermediate_size": 340, "num_heads": 4, "out_hidden_size": 256,
            "num_position_embeddings": 64, "deepstack_visual_indexes": [1, 2],
        },
    },
    "qwen3_vl_moe": {
        "image_token_id": 999,
        "tie_word_embeddings": False,
        "text_config": _TEXT
        | {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5]},
           "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "mlp_only_layers": [1]},
        "vision_config": {
            "depth": 4, "hidden_size": 160, "intermediate_size": 340, "num_heads": 4, "out_hidden_size": 256,
            "num_position_embeddings": 64, "deepstack_visual_indexes": [1, 2],
        },
    },
    "mistral3": {
        "image_token_index": 999,
        "tie_word_embeddings": False,
        "text_config": _TEXT | {"model_type": "mistral", "head_dim": 32, "sliding_window": None},
        "vision_config": {
            "model_type": "pixtral", "hidden_size": 160, "intermediate_size": 400, "num_hidden_layers": 4,
            "num_attention_heads": 4, "image_size": 56, "patch_size": 14, "hidden_act": "silu",
        },
    },
    "internvl": {
        "image_token_id": 999,
        "image_seq_length": 4,
        "tie_word_embeddings": False,
        "text_config": _TEXT | {"model_type": "qwen2"},
        "vision_config": {
            "model_type": "internvl_vision", "hidden_size": 160, "intermediate_size": 400, "num_hidden_layers": 4,
            "num_attention_heads": 4, "image_size": [56, 56], "patch_size": [14, 14], "attention_bias": True,
        },
    },
    "paligemma": {
        "image_token_index": 999,
        "projection_dim": 256,
        "text_config": _TEXT | {"model_type": "gemma", "head_dim": 32},
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 160, "intermediate_size": 400, "num_hidden_layers": 4,
            "num_attention_heads": 4, "image_size": 56, "patch_size": 28, "vision_use_head": False,
        },
    },
    "llava_onevision": {
        "image_token_index": 999,
        "tie_word_embeddings": False,
        "image_grid_pinpoints": [[56, 56], [28, 56]],
        "text_config": _TEXT | {"model_type": "qwen2"},
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 160, "intermediate_size": 400, "num_hidden_layers": 4,
            "num_attention_heads": 4, "image_size": 28, "patch_size": 14, "vision_use_head": False,
        },
    },
    "llava_next": {
        "image_token_index": 999,
        "tie_word_embeddings": False,
        "image_grid_pinpoints": [[56, 56], [28, 56]],
        "text_config": _TEXT | {"model_type": "mistral", "sliding_window": None},
        "vision_config": {
            "model_type": "clip_vision_model", "hidden_size": 160, "intermediate_size": 400, "num_hidden_layers": 4,
            "num_attention_heads": 4, "image_size": 28, "patch_size": 14,
        },
    },
    "llava": {
        "image_token_index": 999,
        "tie_word_embeddings": False,
        "text_config": _TEXT | {"model_type": "llama"},
        "vision_config": {
            "model_type": "clip_vision_model", "hidden_size": 160, "intermediate_size": 400, "num_hidden_layers": 4,
            "num_attention_heads": 4, "image_size": 56, "patch_size": 28,
        },
    },
}  # fmt: skip
IMAGE = {"per_sequence": 1, "height": 56, "width": 56}  # four tokens of all
IMAGE_TOKENS = {"llava_next": 24, "llava_onevision": 24}  # but 4 of a small copy and 4 x 4 with the end of each row


def build(
    kind: str, dtype: torch.dtype = torch.float32, attention: str = "sdpa", **changes: Any
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A causal language model in training mode, and the configuration it was made from."""
    import transformers

    torch.manual_seed(0)
    settings = (TINY | TINY_VISION | TINY_PAIRS).get(kind, {}) | changes
    config = transformers.AutoConfig.for_model(kind, **settings)
    parts = (config, config.text_config, config.vision_config) if kind in TINY_VISION else (config,)
    for part in parts:
        part.use_cache = False
        part._attn_implementation = attention
    auto = transformers.AutoModelForImageTextToText if kind in TINY_VISION else transformers.AutoModelForCausalLM
    if kind in TINY_PAIRS:
        auto = transformers.AutoModelForSpeechSeq2Seq if kind == "whisper" else transformers.AutoModelForSeq2SeqLM
    # float32 is not asked for: zero.Init would be overruled, which gives its own dtype
    model = auto.from_config(config, **({} if dtype is torch.float32 else {"dtype": dtype}))
    return model.train(), settings


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
    if kind in IMAGE_TOKENS:
        return given | {"pixel_values": torch.zeros(len(ids), 5, 3, 28, 28), "image_sizes": [[56, 56]] * len(ids)}
    if kind == "mistral3":
        given |= {"image_sizes": [[56, 56]] * len(ids)}
    if not kind.startswith("qwen"):
        return given | {"pixel_values": torch.zeros(len(ids), 3, 56, 56)}
    grid = torch.tensor([[1, 4, 4]] * len(ids))
    values = 1536 if kind.startswith("qwen3_vl") else 1176
    return given | {
        "pixel_values": torch.zeros(16 * len(ids), values), "image_grid_thw": grid,
        "mm_token_type_ids": (ids == token).int(),
    }  # fmt: skip


def target(tokens: int) -> int:
    """Tokens of the labels of `TINY_PAIRS`."""
    return tokens // 2


def units(model: torch.nn.Module) -> list[torch.nn.Module]:
    """What FSDP wraps: blocks, of a vision-language model all of `_no_split_modules`."""
    if hasattr(getattr(model, "model", None), "language_model"):
        return [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    return blocks(model)


def text_model(model: torch.nn.Module) -> torch.nn.Module:
    return getattr(model.model, "language_model", model.model)


def stacks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Encoder and decoder of a model that has both."""
    owner = model.model if hasattr(model, "model") else model
    return [owner.encoder, owner.decoder] if hasattr(owner, "encoder") else []


def blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    if found := stacks(model):
        return [block for stack in found for block in (stack.block if hasattr(stack, "block") else stack.layers)]
    if hasattr(getattr(model, "model", None), "language_model"):
        return list(text_model(model).layers)
    return list(model.model.layers) if hasattr(model, "model") else list(model.transformer.h)


def marked(model: torch.nn.Module) -> list[str]:
    """Modules that recordings mark: embeddings, blocks, the final norm, the head."""
    parts = {id(module) for module in blocks(model)}
    named = (
        "model.language_model.embed_tokens",
        "model.language_model.norm",
        "model.visual",
        "model.vision_tower",
        "model.multi_modal_projector",
        "model.embed_tokens",
        "model.norm",
        "lm_head",
        "transformer.wte",
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
    """peft's adapters of rank `r` on the Linear modules named in `targets`; the rest is frozen."""
    from peft import LoraConfig, inject_adapter_in_model

    dropout = lora.get("dropout", 0.0)
    inject_adapter_in_model(LoraConfig(r=lora["r"], target_modules=lora["targets"], lora_dropout=dropout), model)
    freeze_all_but(model, "lora_")


def trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def adapter_leaves(model: torch.nn.Module) -> list[torch.nn.Module]:
    """peft/utils/other.py fsdp_auto_wrap_policy: leaves whose weight is trained, beside the blocks."""
    return [m for m in model.modules() if not list(m.children()) and getattr(m, "weight", None) is not None
            and m.weight.requires_grad]  # fmt: skip


def freeze_all_but(model: torch.nn.Module, part: str) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part in name)


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
