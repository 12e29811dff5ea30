"""What a layer keeps in old releases of transformers, against counts of the storages that their own layers saved."""

from __future__ import annotations

import pytest

from zsim.model.huggingface import from_config
from zsim.model.spec import Compute, Module, Workload
from zsim.model.trace import trace

SIZES = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512, "ffn_dim": 512}


def kept(module: Module) -> int:
    return sum(part.saved_bytes if isinstance(part, Compute) else kept(part) for part in module.body)


def layer(family: str, release: tuple[int, ...] | None, dtype: str = "bfloat16") -> int:
    """Bytes that the second of three layers keeps of 2 x 64 tokens."""
    spec = from_config({"model_type": family, "vocab_size": 96, **SIZES}, family)
    root = trace(spec, Workload(2, 64, dtype, attention="eager", transformers=release))
    return next(kept(module) for module in _modules(root) if module.name.endswith("layers.1"))


def _modules(module: Module):
    yield module
    for part in module.body:
        if isinstance(part, Module):
            yield from _modules(part)


@pytest.mark.parametrize(
    ("release", "counted"),
    # storages that LlamaDecoderLayer of transformers 4.28.1, 4.29.2, 4.30.2, 4.31.0 and 4.34.1 packed under
    # saved_tensors_hooks (torch 2.13), parameters left out, and of the first three the floor, a number on the CPU
    [((4, 28, 1), 1721344), ((4, 29), 1721344), ((4, 30), 1852416), ((4, 31), 1524736), ((4, 34), 1524736)],
)
def test_llama_keeps_what_its_release_kept(release, counted: int) -> None:
    assert layer("llama", release) == counted


def test_today_all_layers_share_their_rotary_tables() -> None:
    tables = 2 * 64 * 64 * 2
    assert layer("llama", (4, 45)) == layer("llama", None) == layer("llama", (4, 34)) - tables


@pytest.mark.parametrize(("dtype", "opt_less"), [("bfloat16", 4 - 2), ("float16", -2)])
def test_scores_of_gpt_neox_were_not_widened_nor_those_of_opt_in_bfloat16(dtype: str, opt_less: int) -> None:
    """Today the softmax in float32 and its cast are kept; of old the softmax alone, by OPT the masked scores too."""
    scores = 2 * 4 * 64 * 64
    assert layer("gpt_neox", None, dtype) - layer("gpt_neox", (4, 48), dtype) == 4 * scores
    assert layer("opt", None, dtype) - layer("opt", (4, 48), dtype) == opt_less * scores


@pytest.mark.parametrize(("dtype", "counted"), [("bfloat16", 1246208), ("float16", 1377296)])
def test_softmax_of_t5_was_in_float32(dtype: str, counted: int) -> None:
    """Storages that T5Block of transformers 4.45.2 saved (torch 2.13), the second of an encoder, without dropout."""
    sizes = {"d_model": 256, "d_kv": 64, "d_ff": 512, "num_heads": 4, "num_layers": 3, "dropout_rate": 0.0}
    spec = from_config({"model_type": "t5", "vocab_size": 96, "feed_forward_proj": "relu", **sizes}, "t5")
    root = trace(spec, Workload(2, 64, dtype, attention="eager", transformers=(4, 45)))
    assert next(kept(module) for module in _modules(root) if module.name.endswith("encoder.block.1")) == counted
