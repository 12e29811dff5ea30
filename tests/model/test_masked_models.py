"""Models trained to fill masks, and ModernBERT's decoder: counts as transformers 5.24 has them on the meta device, and
what their files mean."""

from __future__ import annotations

from typing import Any

import pytest

from tests.model.ledger import computes
from zsim.errors import InputError, NotModeled
from zsim.model.huggingface import from_config
from zsim.model.kernels import Attention
from zsim.model.spec import Workload
from zsim.model.trace import trace

MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "xlm-roberta-base": (
        278_295_186,
        {
            "model_type": "xlm-roberta", "architectures": ["XLMRobertaForMaskedLM"], "hidden_size": 768,
            "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size":
            250002, "max_position_embeddings": 514, "type_vocab_size": 1,
        },
    ),
    "camembert-base": (
        110_655_493,
        {
            "model_type": "camembert", "architectures": ["CamembertForMaskedLM"], "hidden_size": 768,
            "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size":
            32005, "max_position_embeddings": 514, "type_vocab_size": 1,
        },
    ),
    "electra-small-generator": (
        13_546_682,
        {
            "model_type": "electra", "architectures": ["ElectraForMaskedLM"], "hidden_size": 256,
            "intermediate_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 4, "vocab_size":
            30522, "embedding_size": 128,
        },
    ),
    "electra-large-generator": (
        51_295_290,
        {
            "model_type": "electra", "architectures": ["ElectraForMaskedLM"], "hidden_size": 256,
            "intermediate_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 4, "vocab_size":
            30522, "embedding_size": 1024,
        },
    ),
    "ModernBERT-base": (
        149_655_232,
        {
            "model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"], "hidden_size": 768,
            "intermediate_size": 1152, "num_hidden_layers": 22, "num_attention_heads": 12, "vocab_size":
            50368, "global_attn_every_n_layers": 3, "local_attention": 128,
        },
    ),
    "ModernBERT-large": (
        395_881_664,
        {
            "model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"], "hidden_size": 1024,
            "intermediate_size": 2624, "num_hidden_layers": 28, "num_attention_heads": 16, "vocab_size":
            50368, "global_attn_every_n_layers": 3, "local_attention": 128,
        },
    ),
    "ettin-decoder-150m": (
        149_655_232,
        {
            "model_type": "modernbert-decoder", "architectures": ["ModernBertDecoderForCausalLM"],
            "hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 22, "num_attention_heads":
            12, "vocab_size": 50368, "global_attn_every_n_layers": 3, "local_attention": 128,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in MODELS if name != "ettin-decoder-150m"])
def test_another_head_is_refused(name: str):
    with pytest.raises(NotModeled, match="ForSequenceClassification"):
        from_config(MODELS[name][1] | {"architectures": ["XForSequenceClassification"]}, name)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [({"classifier_bias": True}, NotModeled), ({"sparse_prediction": True}, NotModeled),
     ({"classifier_activation": "relu"}, InputError), ({"layer_types": ["conv"] * 22}, InputError)],
)  # fmt: skip
def test_what_modernbert_cannot_be(changes: dict[str, Any], kind: type[Exception]):
    with pytest.raises(kind):
        from_config(MODELS["ModernBERT-base"][1] | changes, "m")


@pytest.mark.parametrize(
    ("name", "causal", "window"), [("ModernBERT-base", False, 65), ("ettin-decoder-150m", True, 64)]
)
def test_two_of_three_layers_have_a_window(name: str, causal: bool, window: int):
    spec = from_config(MODELS[name][1], name)
    work = [kernel for compute in computes(trace(spec, Workload(1, 256))) for kernel in compute.forward]
    kernels = [kernel for kernel in work if isinstance(kernel, Attention)]
    assert [kernel.window for kernel in kernels] == [None if layer % 3 == 0 else window for layer in range(22)]
    assert {kernel.causal for kernel in kernels} == {causal}


def test_frequencies_of_both_types_of_layers_are_buffers():
    assert from_config(MODELS["ModernBERT-base"][1], "m").buffers_bytes == 2 * 2 * 32 * 4
    alike = MODELS["ModernBERT-base"][1] | {"layer_types": ["full_attention"] * 22}
    assert from_config(alike, "m").buffers_bytes == 2 * 32 * 4
