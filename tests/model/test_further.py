"""Further decoders: counts as transformers 5.24 has them on the meta device, and what their files mean."""

from __future__ import annotations

from typing import Any

import pytest

from tests.model import vision_counts
from tests.model.ledger import computes, modules
from zsim.errors import InputError, NotModeled
from zsim.model.huggingface import from_config
from zsim.model.kernels import WAIT, Memory
from zsim.model.spec import Workload
from zsim.model.trace import trace

MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "GLM-5": (
        743_911_199_232,
        {
            "model_type": "glm_moe_dsa", "hidden_size": 6144, "intermediate_size": 12288, "num_hidden_layers": 78,
            "num_attention_heads": 64, "vocab_size": 154880, "index_topk": 2048,
        },
    ),
    "Mistral-Small-4-119B (text)": (
        118_972_826_624,
        {
            "model_type": "mistral4", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
            "num_attention_heads": 32, "vocab_size": 131072,
        },
    ),
    "A.X-K1": (
        518_983_052_288,
        {
            "model_type": "axk1", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
            "num_attention_heads": 64, "vocab_size": 163840,
        },
    ),
    "Hunyuan 3": (
        295_033_528_320,
        {
            "model_type": "hy_v3", "hidden_size": 4096, "intermediate_size": 13312, "num_hidden_layers": 80,
            "num_attention_heads": 64, "vocab_size": 120832,
        },
    ),
    "Cohere 2 with experts": (
        52_579_405_824,
        {
            "model_type": "cohere2_moe", "hidden_size": 4096, "intermediate_size": 2048, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 256000, "num_experts": 64,
            "num_experts_per_tok": 8, "num_shared_experts": 2, "first_k_dense_replace": 2,
            "prefix_dense_intermediate_size": 14336,
        },
    ),
    "DBRX": (
        131_596_523_520,
        {
            "model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "vocab_size": 100352, "max_seq_len":
            32768, "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000}, "ffn_config": {
                "ffn_hidden_size": 10752, "moe_jitter_eps": 0.01, "moe_num_experts": 16, "moe_top_k": 4},
        },
    ),
    "Mellum2-12B-A2.5B": (
        12_149_923_072,
        {
            "model_type": "mellum", "hidden_size": 2304, "intermediate_size": 7168, "num_hidden_layers": 28,
            "num_attention_heads": 32, "vocab_size": 98304,
        },
    ),
    "Trinity-Mini": (
        26_123_974_400,
        {
            "model_type": "afmoe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 1024,
            "num_hidden_layers": 32, "num_dense_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 4,
            "vocab_size": 200192, "num_experts": 128, "num_experts_per_tok": 8, "num_shared_experts": 1,
            "sliding_window": 2048, "mup_enabled": True,
        },
    ),
    "FlexOlmo-7x7B": (
        33_270_665_216,
        {
            "model_type": "flex_olmo", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
            "num_attention_heads": 32, "vocab_size": 100352,
        },
    ),
    "Kolibri-1": (
        78_103_055_360,
        {
            "model_type": "kolibri1", "hidden_size": 2560, "num_hidden_layers": 50, "num_attention_heads": 48,
            "vocab_size": 128000,
        },
    ),
    "Gemma-3n-E4B, its text model": (
        6_835_235_568,
        {
            "model_type": "gemma3n_text", "hidden_size": 2048, "intermediate_size": [16384] * 35,
            "num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 262400,
        },
    ),
    "MiniCPM3-4B": (
        4_073_875_968,
        {
            "model_type": "minicpm3", "hidden_size": 2560, "intermediate_size": 6400, "num_hidden_layers": 62,
            "num_attention_heads": 40, "vocab_size": 73448,
        },
    ),
    "nanochat-d32": (
        1_879_048_192,
        {
            "model_type": "nanochat", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 32,
            "num_attention_heads": 16, "vocab_size": 65536,
        },
    ),
    "BitNet-2B-4T": (
        2_412_820_480,
        {
            "model_type": "bitnet", "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 30,
            "num_attention_heads": 20, "vocab_size": 128256, "tie_word_embeddings": True,
        },
    ),
    "CodeGen-16B": (
        16_032_155_648,
        {
            "model_type": "codegen", "n_embd": 6144, "n_layer": 34, "n_head": 24, "rotary_dim": 64, "vocab_size": 51200,
            "n_positions": 2048,
        },
    ),
}  # fmt: skip


def test_layers_of_glm_5_share_what_an_indexer_chose() -> None:
    def shared(**changes: Any) -> list[int]:
        kinds = from_config(MODELS["GLM-5"][1] | changes, "g").arch.kinds
        return [number for number, kind in enumerate(kinds) if kind.shares_choice]

    assert shared() == []
    assert shared(index_topk_freq=4, num_hidden_layers=10) == [2, 3, 4, 6, 7, 8]
    assert shared(index_topk_pattern="FSSF", num_hidden_layers=4) == [1, 2]
    assert shared(indexer_types=["full", "shared"], num_hidden_layers=2, index_topk_freq=1) == [1]
    # a layer that shares has no indexer: its four matrices and its norm are not there
    whole = from_config(MODELS["GLM-5"][1] | {"num_hidden_layers": 4}, "g").numel
    indexer = 2048 * 32 * 128 + 6144 * 128 + 2 * 128 + 6144 * 32
    less = from_config(MODELS["GLM-5"][1] | {"num_hidden_layers": 4, "index_topk_pattern": "FSSF"}, "g").numel
    assert whole - less == 2 * indexer


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("GLM-5", {"index_topk_pattern": "SF", "num_hidden_layers": 2}, "indexer_types"),
        ("GLM-5", {"indexer_types": ["some"] * 78}, "indexer_types"),
        ("Mistral-Small-4-119B (text)", {"n_group": 3}, "n_group"),
        ("Trinity-Mini", {"num_experts_per_tok": 129}, "num_experts_per_tok"),
        ("Mellum2-12B-A2.5B", {"mlp_layer_types": ["moe"] * 28}, "mlp_layer_types"),
    ],
)
def test_what_files_cannot_say(name: str, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        from_config(MODELS[name][1] | changes, name)
    assert caught.value.field == field


def test_what_gemma_3n_cannot_be() -> None:
    config = MODELS["Gemma-3n-E4B, its text model"][1]
    with pytest.raises(NotModeled, match="MLPs of several widths"):
        from_config(config | {"intermediate_size": [8192] * 5 + [16384] * 30}, "g")
    with pytest.raises(InputError, match="no layer of a type makes keys and values"):
        from_config(config | {"num_kv_shared_layers": 32}, "g")
    with pytest.raises(NotModeled, match="AltUp without it"):
        from_config(config | {"altup_coef_clip": None}, "g")
    kinds = from_config(config, "g").arch.kinds
    assert [kind.sliding for kind in kinds[:5]] == [True, True, True, True, False]
    assert sum(kind.cut for kind in kinds) == 10


def test_of_an_omni_model_the_thinker_is_trained() -> None:
    whole = vision_counts.COUNTS["Qwen2.5-Omni-7B"][1]
    spec = from_config(whole, "o")
    thinker = from_config(whole["thinker_config"] | {"model_type": "qwen2_5_omni_thinker"}, "o")
    assert spec.parameters == thinker.parameters
    assert spec.buffers_bytes == thinker.buffers_bytes == 7_680_672
    assert spec.notes == (
        "o: what it thinks with is trained; the talker is left out",
        "o: its audio tower is there, and given nothing",
    )
    with pytest.raises(InputError) as caught:
        from_config(whole["thinker_config"] | {"model_type": "qwen2_5_omni_thinker", "audio_config": {"output_dim": 8}},
                    "o")  # fmt: skip
    assert caught.value.field == "audio_config.output_dim"


def test_layers_are_those_that_the_file_says() -> None:
    afmoe = from_config(MODELS["Trinity-Mini"][1], "t").arch.kinds
    assert [kind.sliding for kind in afmoe[:8]] == [True, True, True, False] * 2
    assert [kind.rotary for kind in afmoe[:4]] == [True, True, True, False]
    assert [number for number, kind in enumerate(afmoe) if not kind.sparse] == [0, 1]
    legacy = {"first_k_dense_replace": 2, "moe_layer_freq": 3}
    axk = from_config(MODELS["A.X-K1"][1] | legacy, "a").arch.kinds
    assert [number for number, kind in enumerate(axk) if kind.sparse][:3] == [3, 6, 9]
    mellum = from_config(MODELS["Mellum2-12B-A2.5B"][1], "m").arch
    assert not any(kind.sliding for kind in mellum.kinds)
    assert all(kind.sparse for kind in mellum.kinds)
    assert not from_config(MODELS["Hunyuan 3"][1], "h").arch.kinds[0].sparse


def test_layers_of_cohere_2_rotate_where_they_have_a_window_or_are_dense():
    kinds = from_config(MODELS["Cohere 2 with experts"][1], "c").arch.kinds
    assert [(kind.sliding, kind.rotary, kind.sparse) for kind in kinds[:6]] == [
        (False, True, False), (False, True, False), *[(True, True, True)] * 3, (False, False, True),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["expert_selection_fn", "shared_expert_combination_strategy"])
def test_what_experts_of_cohere_2_cannot_be(name: str):
    with pytest.raises(InputError) as refused:
        from_config(MODELS["Cohere 2 with experts"][1] | {name: "max"}, "c")
    assert refused.value.field == name


@pytest.mark.parametrize(
    ("section", "changes", "field"),
    [
        ("attn_config", {"clip_qkv": None}, "attn_config.clip_qkv"),
        ("ffn_config", {"moe_normalize_expert_weights": 2.0}, "ffn_config.moe_normalize_expert_weights"),
        ("ffn_config", {"moe_top_k": 17}, "ffn_config.moe_top_k"),
    ],
)
def test_what_dbrx_cannot_be(section: str, changes: dict[str, Any], field: str):
    config = MODELS["DBRX"][1]
    with pytest.raises(InputError) as refused:
        from_config(config | {section: config[section] | changes}, "d")
    assert refused.value.field == field


def test_an_expert_of_dbrx_has_a_gradient_as_large_as_all():
    """Of 16 slices of three weights, each written into zeros of the whole, and added up."""
    spec = from_config(MODELS["DBRX"][1], "d")
    tree = trace(spec, Workload(1, 64))
    layer = next(module for module in modules(tree) if module.module_class == "DbrxExperts")
    whole = 2 * 16 * 10752 * 6144
    assert sum(compute.forward.count(WAIT) for compute in computes(layer)) == 1 + 16 * (1 + 1 + 3)
    written = sum(
        kernel.write_bytes for compute in computes(layer) for kernel in compute.backward if isinstance(kernel, Memory)
    )
    assert 3 * (16 + 15) * whole < written < 1.1 * 3 * (16 + 15) * whole
