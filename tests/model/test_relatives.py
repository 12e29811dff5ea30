"""Models whose families differ from Llama by a few lines: counts as transformers 5.24 has them on the meta device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.model.ledger import computes
from tests.model.relative_counts import MODELS
from zsim.errors import InputError, NotModeled
from zsim.model.huggingface import from_config
from zsim.model.kernels import Attention, Gemm
from zsim.model.spec import Workload
from zsim.model.trace import trace


def test_causal_masks_of_gpt_neo_are_buffers():
    """2 048 x 2 048 booleans in every layer."""
    assert from_config(MODELS["GPT-Neo-1.3B"][1], "neo").buffers_bytes == 24 * 2048**2
    assert from_config(MODELS["StarCoder"][1], "starcoder").buffers_bytes == 8192**2


def test_layers_without_a_window_have_no_positions_in_exaone():
    sliding = [kind.sliding for kind in from_config(MODELS["EXAONE-4.0-32B"][1], "x").arch.kinds]
    assert sliding[:8] == [True, True, True, False] * 2
    pattern = MODELS["EXAONE-4.0-32B"][1] | {"sliding_window_pattern": "LLLG"}
    assert [kind.rotary for kind in from_config(pattern, "x").arch.kinds] == sliding
    assert all(kind.rotary for kind in from_config(MODELS["EXAONE-4.0-1.2B"][1], "x").arch.kinds)


SMALL = {
    "hidden_size": 512, "intermediate_size": 640, "num_hidden_layers": 2, "num_attention_heads": 16, "vocab_size": 1000,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        # (key-value heads, width) where a file leaves them out: transformers 5.24's classes, of any size of model
        ({"model_type": "llama"}, (16, 32)),
        ({"model_type": "mistral"}, (8, 32)),
        ({"model_type": "mistral", "num_key_value_heads": None}, (16, 32)),
        ({"model_type": "smollm3"}, (4, 32)),
        ({"model_type": "starcoder2"}, (2, 32)),
        ({"model_type": "qwen3", "num_key_value_heads": 4}, (4, 128)),
        ({"model_type": "seed_oss", "num_key_value_heads": 4, "head_dim": None}, (4, 32)),
        ({"model_type": "glm4"}, (2, 128)),
        ({"model_type": "gemma2"}, (4, 256)),
    ],
)
def test_what_a_class_has_by_default(config: dict[str, Any], heads: tuple[int, int]):
    arch = from_config(SMALL | config, "x").arch
    assert (arch.kv_heads, arch.head_dim) == heads


@pytest.mark.parametrize(("family", "window"), [("mistral", 4096), ("qwen2", None), ("llama", None)])
def test_windows_by_default(family: str, window: int | None):
    assert from_config(SMALL | {"model_type": family, "num_key_value_heads": 4}, "x").arch.window == window
    assert (
        from_config(SMALL | {"model_type": family, "sliding_window": None, "num_key_value_heads": 4}, "x").arch.window
        is None
    )


def test_a_window_of_zero_is_none():
    """As transformers 5 saves Qwen2-MoE."""
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    }
    config = SMALL | experts | {"model_type": "qwen2_moe", "sliding_window": 0}
    assert from_config(config, "x").arch.window is None


@pytest.mark.parametrize("heads", [None, [], ["BertForTokenClassification"], ["BertModel"]])
def test_an_encoder_with_another_head_is_refused(heads: list[str] | None):
    with pytest.raises(NotModeled, match=r"architectures|BertFor|BertModel"):
        from_config(MODELS["bert-base-uncased"][1] | {"architectures": heads}, "bert")


XLM = {
    "model_type": "xlm-roberta", "architectures": ["XLMRobertaForSequenceClassification"], "hidden_size": 1024,
    "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16, "vocab_size": 250002,
    "max_position_embeddings": 514, "type_vocab_size": 1, "id2label": {"0": "a", "1": "b", "2": "c"},
}  # fmt: skip


def test_an_encoder_that_tells_sequences_apart():
    """XLM-RoBERTa large with three labels, as transformers 5.24 has it on the meta device: no pooler, two products."""
    spec = from_config(XLM, "xlm")
    assert (spec.numel, spec.arch.labels, spec.notes) == (559_893_507, 3, ())
    assert [p.shape for p in spec.parameters if p.name.startswith("classifier.out_proj")] == [(3, 1024), (3,)]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_labels": 1}, "num_labels"),
        ({"problem_type": "multi_label_classification"}, "problem_type"),
        ({"classifier_pooling": "mean"}, "classifier_pooling"),
    ],
)
def test_other_losses_of_an_encoder_are_refused(changes: dict[str, Any], field: str):
    with pytest.raises(NotModeled) as refused:
        from_config(XLM | changes, "xlm")
    assert refused.value.field == field


def test_an_encoder_looks_both_ways():
    """The whole square counts, and its loss has no float32 copy of the logits."""
    spec = from_config(MODELS["bert-base-uncased"][1], "bert")
    tree = trace(spec, Workload(1, 128))
    kernels = [kernel for compute in computes(tree) for kernel in compute.forward if isinstance(kernel, Attention)]
    assert len(kernels) == 12
    assert not any(kernel.causal for kernel in kernels)
    logits = [tensor for compute in computes(tree) for tensor in compute.saved if tensor.shape == (128, 30522)]
    assert {tensor.dtype for tensor in logits} == {"bfloat16"}


def test_gemma_3_leaves_out_what_is_its_classs():
    """The text_config of Gemma 3 4B as published: neither vocabulary nor heads."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    spec = from_config(text, "gemma")
    assert spec.numel == 3_880_263_168
    assert sum(not kind.sliding for kind in spec.arch.kinds) == 5


def test_values_of_another_width_are_padded_for_flash_attention():
    """Kernels see 192 for both under FlashAttention; others 192 and 128, and save that much less."""
    spec = from_config(MODELS["DeepSeek-V2-Lite"][1], "deepseek")
    seen = {}
    for attention in ("flash", "sdpa"):
        found = list(computes(trace(spec, Workload(1, 128, attention=attention))))
        kernels = {k for compute in found for k in (*compute.forward, *compute.backward) if isinstance(k, Attention)}
        seen[attention] = {(kernel.head_dim, kernel.value_dim) for kernel in kernels}
    assert seen == {"flash": {(192, 0)}, "sdpa": {(192, 128)}}


def test_all_experts_of_llama_4_work_on_all_tokens():
    spec = from_config(MODELS["Llama-4-Scout (text)"][1], "llama")
    assert spec.notes == ("llama: every expert works on every token, as in transformers' class",)
    products = Counter(
        (kernel.m, kernel.n, kernel.k, kernel.batch)
        for compute in computes(trace(spec, Workload(1, 128)))
        for kernel in compute.forward
        if isinstance(kernel, Gemm) and kernel.batch == 16
    )
    assert products == {(128, 2 * 8192, 5120, 16): 48, (128, 5120, 8192, 16): 48}


def test_a_model_of_the_hub_is_run_as_the_one_it_equals():
    spec = from_config(MODELS["Kimi-K2"][1], "kimi")
    assert spec.notes == ("kimi: kimi_k2 is run as transformers' deepseek_v3",)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"topk_method": "noaux_tc"}, "topk_method"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"num_experts_per_tok": 65}, "num_experts_per_tok"),
        ({"topk_method": "group_limited_greedy", "n_group": 5}, "n_group"),
        ({"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 5}, "topk_group"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
    ],
)
def test_what_latent_attention_cannot_be(changes: dict[str, Any], field: str):
    with pytest.raises(InputError) as caught:
        from_config(MODELS["DeepSeek-V2-Lite"][1] | changes, "deepseek")
    assert caught.value.field == field


def test_other_classes_than_those_that_are_simulated_are_named() -> None:
    plain = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 4, "vocab_size": 100}  # fmt: skip
    assert from_config(plain | {"architectures": ["LlamaForCausalLM"]}, "m").notes == ()
    (head,) = from_config(plain | {"architectures": ["LlamaForSequenceClassification"]}, "m").notes
    assert head.startswith("m: architectures names LlamaForSequenceClassification: llama with the head of a language")
    (code,) = from_config(plain | {"auto_map": {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}}, "m").notes
    assert "auto_map names code of its own (modeling_x.XForCausalLM)" in code
    assert from_config(plain | {"auto_map": {"AutoConfig": "configuration_x.XConfig"}}, "m").notes == ()
