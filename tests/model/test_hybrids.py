"""LFM2, Mamba-2 and decoders that mix its layers with others. That a step is the recorded one is in test_families."""

from __future__ import annotations

from typing import Any

import pytest

from tests.model.ledger import computes, modules
from zsim.errors import InputError, NotModeled
from zsim.model.huggingface import from_config
from zsim.model.kernels import Gemm
from zsim.model.spec import Workload
from zsim.model.trace import trace

NANO = {
    "model_type": "nemotron_h", "hidden_size": 4480, "intermediate_size": 15680, "num_attention_heads": 40,
    "vocab_size": 131072, "mamba_head_dim": 80,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
}  # fmt: skip
GRANITE = ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)]
CODESTRAL = {"model_type": "mamba2", "hidden_size": 4096, "num_hidden_layers": 64, "vocab_size": 32768}
MODELS: dict[str, tuple[int, dict[str, Any]]] = {  # as transformers 5.24 has them on the meta device
    "LFM2-1.2B": (
        1_170_340_608,
        {
            "model_type": "lfm2", "hidden_size": 2048, "block_ff_dim": 12288, "num_hidden_layers": 16,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 65536, "tie_embedding": True,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        },
    ),
    "LFM2-2.6B": (
        2_569_272_320,
        {
            "model_type": "lfm2", "hidden_size": 2048, "intermediate_size": 10752, "num_hidden_layers": 30,
            "num_attention_heads": 32, "vocab_size": 65536, "block_auto_adjust_ff_dim": False,
            "full_attn_idxs": [2, 5, 9, 13, 17, 21, 25, 28],
        },
    ),
    "LFM2-8B-A1B": (
        8_339_929_856,
        {
            "model_type": "lfm2_moe", "hidden_size": 2048, "intermediate_size": 7168, "num_hidden_layers": 24,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 65536, "num_experts": 32,
            "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
        },
    ),
    "Mamba-Codestral-7B": (7_285_403_648, CODESTRAL),
    "mamba2-2.7b": (
        2_702_599_680,
        CODESTRAL
        | {"hidden_size": 2560, "num_heads": 80, "n_groups": 1, "vocab_size": 50288, "tie_word_embeddings": True},
    ),
    "Nemotron-Nano-9B-v2": (8_888_227_328, NANO),
    "Nemotron-3-Nano-30B-A3B": (
        31_577_937_344,
        {
            "model_type": "nemotron_h", "hidden_size": 2688, "intermediate_size": 1856, "num_attention_heads": 32,
            "num_key_value_heads": 2, "vocab_size": 131072, "mamba_num_heads": 64, "n_routed_experts": 128,
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "num_experts_per_tok": 6,
            "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
        },
    ),
    "Granite-4.0-H-Tiny": (
        6_939_037_248,
        {
            "model_type": "granitemoehybrid", "hidden_size": 1536, "intermediate_size": 512, "vocab_size": 100352,
            "num_hidden_layers": 40, "num_attention_heads": 12, "num_key_value_heads": 4, "num_local_experts": 64,
            "num_experts_per_tok": 6, "position_embedding_type": "nope", "mamba_n_heads": 48, "mamba_d_state": 128,
            "layer_types": GRANITE, "tie_word_embeddings": True,
        },
    ),
    "Granite-4.0-H-Micro": (
        3_191_396_096,
        {
            "model_type": "granitemoehybrid", "hidden_size": 2048, "shared_intermediate_size": 8192,
            "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 100352,
            "num_local_experts": 0, "position_embedding_type": "nope", "mamba_n_heads": 64, "mamba_d_state": 128,
            "layer_types": GRANITE, "tie_word_embeddings": True,
        },
    ),
    "Bamba-9B": (
        9_780_235_392,
        {
            "model_type": "bamba", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "vocab_size": 128256, "attn_layer_indices": [9, 18, 27], "mamba_d_state": 128,
        },
    ),
    "Falcon-H1-7B": (
        7_585_513_568,
        {
            "model_type": "falcon_h1", "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 44,
            "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 130048,
            "mamba_d_ssm": 3072, "mamba_n_heads": 24, "mamba_d_head": 128,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize(("seq", "chunks"), [(128, 1), (512, 4), (513, 5)])
def test_what_is_computed_within_and_between_chunks(seq: int, chunks: int):
    """Products in float32, padded to whole chunks, of all chunks and heads at once."""
    spec = from_config(NANO, "nano")
    tree = trace(spec, Workload(1, seq))
    mixer = next(module for module in modules(tree) if module.module_class == "NemotronHMamba2Mixer")
    products = [k for compute in computes(mixer) for k in compute.forward if isinstance(k, Gemm) and k.batch > 1]
    shapes = [(k.m, k.n, k.k, k.batch) for k in products]
    between = (chunks + 1, 80 * 128, chunks + 1, 128)
    assert shapes == [
        (128, 128, 128, 128 * chunks), (128, 80, 128, 128 * chunks), (128, 80, 128, 128 * chunks), between,
        (128, 80, 128, 128 * chunks),
    ]  # fmt: skip
    assert {k.dtype for k in products} == {"float32"}


def test_a_mixer_reads_what_a_fused_kernel_would_take():
    """ZeRO-3 gathers each in the first step when it is read."""
    spec = from_config(NANO, "nano")
    mixer = next(m for m in modules(trace(spec, Workload(1, 128))) if m.module_class == "NemotronHMamba2Mixer")
    (read,) = (compute.reads for compute in computes(mixer) if compute.reads)
    names = [spec.parameters[index].name.removeprefix("model.layers.0.mixer.") for index in read]
    assert names == ["conv1d.weight", "conv1d.bias", "norm.weight", "out_proj.weight"]


@pytest.mark.parametrize("config", [NANO, CODESTRAL, MODELS["LFM2-1.2B"][1]])
@pytest.mark.parametrize("changes", [{"sequence_parallel_size": 2}, {"compile": True}])
def test_what_is_refused(config: dict[str, Any], changes: dict[str, Any]):
    with pytest.raises(NotModeled) as caught:
        trace(from_config(config, "m"), Workload(1, 128, **changes))
    assert caught.value.field in changes


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (NANO | {"hybrid_override_pattern": "MXM"}, "hybrid_override_pattern"),
        (NANO | {"layers_block_type": ["mamba", "conv"]}, "layers_block_type"),
        (NANO | {"n_groups": 3}, "n_groups"),
        (NANO | {"mamba_hidden_act": "gelu"}, "mamba_hidden_act"),
        (CODESTRAL | {"head_dim": 32}, "num_heads"),
        (MODELS["Bamba-9B"][1] | {"mamba_d_head": 32}, "mamba_n_heads"),
        (MODELS["Bamba-9B"][1] | {"z_loss_coefficient": 0.1}, "z_loss_coefficient"),
        (MODELS["Falcon-H1-7B"][1] | {"mamba_n_groups": 5}, "mamba_n_groups"),
        (MODELS["Granite-4.0-H-Tiny"][1] | {"layer_types": ["mlp"] * 40}, "layer_types"),
        (MODELS["LFM2-8B-A1B"][1] | {"layer_types": None}, "layer_types"),
        (MODELS["LFM2-8B-A1B"][1] | {"num_experts_per_tok": 40}, "num_experts_per_tok"),
    ],
)
def test_what_a_file_cannot_say(config: dict[str, Any], field: str):
    with pytest.raises(InputError) as caught:
        from_config(config, "m")
    assert caught.value.field == field
