"""Models with an encoder and a decoder against the real ones under fake tensors (validation/oracles/seq2seq.py)."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.model.ledger import Ledger, flops
from zsim.errors import InputError, NotModeled
from zsim.model.families import SEQ2SEQ
from zsim.model.huggingface import from_config
from zsim.model.spec import ModelSpec, Workload
from zsim.model.trace import trace

FILE = Path(__file__).parents[2] / "validation" / "oracles" / "families" / "seq2seq.json.gz"


@cache
def recorded() -> dict[str, Any]:
    return json.loads(gzip.decompress(FILE.read_bytes()))["models"]


# What zsim knows to differ: the gradient of a bias counts from the start of its segment, before a dropout's backward.
EARLY_BIAS = dict.fromkeys(("whisper", "bart", "mbart", "pegasus", "marian"), 2 * 64)


def trained(spec: ModelSpec, names: list[str]) -> ModelSpec:
    return replace(spec, parameters=tuple(replace(p, trainable=p.name in names) for p in spec.parameters))


CASES = [(name, index) for name, model in recorded().items() for index in range(len(model["runs"]))]


def test_every_family_has_a_recording():
    assert {model["config"]["model_type"] for model in recorded().values()} == set(SEQ2SEQ)


@pytest.mark.parametrize("name", recorded())
def test_parameters_are_those_of_named_parameters(name: str):
    model = recorded()[name]
    ours = [[p.name, list(p.shape), p.module_class] for p in from_config(model["config"], name).parameters]
    assert ours == model["parameters"]


@pytest.mark.parametrize(("name", "index"), CASES)
def test_a_step_is_the_recorded_one(name: str, index: int):
    model = recorded()[name]
    run = model["runs"][index]
    workload = Workload(
        run["batch"], run["seq"], attention=run["attention"], checkpointing=run["checkpointing"], device="cpu",
        target_len=run["target"], dtype=run["dtype"],
    )  # fmt: skip
    spec = trained(from_config(model["config"], name), run["trained"])
    ledger = Ledger(spec, trace(spec, workload))
    assert ledger.calls == [tuple(call) for call in model["calls"]]
    assert ledger.ready == run["ready"]
    assert flops(ledger.forward_kernels) == run["flops"]["forward"]
    assert flops(ledger.backward_kernels) == run["flops"]["backward"]
    assert ledger.after_forward == run["after_forward"]
    assert ledger.peak_forward == run["peak"]["forward"]
    early = EARLY_BIAS.get(name, 0) if run["checkpointing"] == "full" else 0
    assert 0 <= ledger.peak_backward - run["peak"]["backward"] <= early


_FLAN = {"model_type": "t5", "feed_forward_proj": "gated-gelu", "vocab_size": 32128, "d_kv": 64,
         "tie_word_embeddings": False}  # fmt: skip
COUNTS = {  # of published models, as transformers 5.24 loads them; T5 1.1 and mT5 have an own projection
    "t5-11b": (
        11_307_321_344,
        {"model_type": "t5", "d_model": 1024, "d_ff": 65536, "d_kv": 128, "num_heads": 128, "num_layers": 24,
         "vocab_size": 32128},
    ),
    "flan-t5-xl": (2_849_757_184, _FLAN | {"d_model": 2048, "d_ff": 5120, "num_heads": 32, "num_layers": 24}),
    "flan-t5-xxl": (11_135_332_352, _FLAN | {"d_model": 4096, "d_ff": 10240, "num_heads": 64, "num_layers": 24}),
    "mt5-large": (
        1_229_581_312,
        {"model_type": "mt5", "d_model": 1024, "d_ff": 2816, "num_heads": 16, "num_layers": 24, "vocab_size": 250112},
    ),
    "whisper-large-v3": (
        1_543_490_560,
        {"model_type": "whisper", "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32, "encoder_ffn_dim": 5120,
         "decoder_ffn_dim": 5120, "encoder_attention_heads": 20, "decoder_attention_heads": 20, "num_mel_bins": 128,
         "vocab_size": 51866},
    ),
    "bart-large-cnn": (
        406_290_432,
        {"model_type": "bart", "d_model": 1024, "encoder_layers": 12, "decoder_layers": 12, "encoder_ffn_dim": 4096,
         "decoder_ffn_dim": 4096, "vocab_size": 50264, "max_position_embeddings": 1024},
    ),
    "mbart-large-50": (
        610_879_488,
        {"model_type": "mbart", "d_model": 1024, "vocab_size": 250054, "max_position_embeddings": 1024},
    ),
    "pegasus-large": (
        570_797_056,
        {"model_type": "pegasus", "d_model": 1024, "encoder_layers": 16, "decoder_layers": 16, "vocab_size": 96103,
         "max_position_embeddings": 1024, "activation_function": "relu"},
    ),
    "opus-mt-en-de": (
        74_410_496,
        {"model_type": "marian", "d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "encoder_ffn_dim": 2048,
         "encoder_attention_heads": 8, "decoder_attention_heads": 8, "decoder_ffn_dim": 2048, "vocab_size": 58101,
         "decoder_vocab_size": 58101, "max_position_embeddings": 512, "activation_function": "swish"},
    ),
    "nllb-200-3.3B": (
        3_344_863_232,
        {"model_type": "m2m_100", "d_model": 2048, "encoder_layers": 24, "decoder_layers": 24, "encoder_ffn_dim": 8192,
         "decoder_ffn_dim": 8192, "vocab_size": 256206, "encoder_layerdrop": 0, "decoder_layerdrop": 0},
    ),
    "umt5-base": (
        395_140_608,
        {"model_type": "umt5", "d_model": 768, "d_ff": 2048, "d_kv": 64, "num_heads": 12, "num_layers": 12,
         "vocab_size": 256384},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_of_published_models(name: str):
    count, config = COUNTS[name]
    assert from_config(config, name).numel == count


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"attention": "flash"}, "attention"),
        ({"attention": "eager", "loss": "fused"}, "loss"),
        ({"attention": "eager", "checkpointing": "full", "checkpointed": (0,)}, "checkpointing"),
    ],
)
def test_what_t5_is_not_run_with(changes: dict[str, Any], field: str):
    with pytest.raises(NotModeled) as refused:
        trace(from_config(recorded()["t5"]["config"], "t5"), Workload(1, 64, **changes))
    assert refused.value.field == field


@pytest.mark.parametrize("name", ["bart", "pegasus"])
def test_clamps_of_bart_are_not_modeled(name: str):
    with pytest.raises(NotModeled) as refused:
        trace(from_config(recorded()[name]["config"], name), Workload(1, 64, attention="eager", dtype="float16"))
    assert refused.value.field == "precision"


def test_positions_of_the_encoder_are_not_trained():
    spec = from_config(COUNTS["whisper-large-v3"][1], "whisper")
    assert [p.name for p in spec.parameters if not p.trainable] == ["model.encoder.embed_positions.weight"]


@pytest.mark.parametrize(
    ("changes", "lengths", "field"),
    [
        ({}, (128, 32), "seq_len"),
        ({}, (64, 81), "target_len"),
        ({"encoder_layerdrop": 0.1}, (64, 32), "encoder_layerdrop"),
        ({"apply_spec_augment": True}, (64, 32), "apply_spec_augment"),
    ],
)
def test_what_whisper_cannot_be(changes: dict[str, Any], lengths: tuple[int, int], field: str):
    def run() -> None:
        spec = from_config(recorded()["whisper"]["config"] | changes, "whisper")
        trace(spec, Workload(1, lengths[0], target_len=lengths[1]))

    with pytest.raises(InputError) as refused:
        run()
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("changes", "lengths", "field"),
    [
        ({}, (81, 32), "seq_len"),
        ({}, (64, 81), "target_len"),
        ({"decoder_layerdrop": 0.1}, (64, 32), "decoder_layerdrop"),
        ({"tie_word_embeddings": False}, (64, 32), "tie_word_embeddings"),
        ({"share_encoder_decoder_embeddings": False}, (64, 32), "share_encoder_decoder_embeddings"),
        ({"decoder_vocab_size": 200}, (64, 32), "decoder_vocab_size"),
        ({"encoder_attention_heads": 7}, (64, 32), "encoder_attention_heads"),
    ],
)
def test_what_marian_cannot_be(changes: dict[str, Any], lengths: tuple[int, int], field: str):
    def run() -> None:
        spec = from_config(recorded()["marian"]["config"] | changes, "marian")
        trace(spec, Workload(1, lengths[0], target_len=lengths[1]))

    with pytest.raises(InputError) as refused:
        run()
    assert refused.value.field == field


def test_m2m_100_leaves_out_layers_unless_told_not_to():
    config = {name: value for name, value in COUNTS["nllb-200-3.3B"][1].items() if "layerdrop" not in name}
    with pytest.raises(NotModeled) as refused:
        from_config(config, "m2m100")
    assert (refused.value.field, refused.value.accepted) == ("encoder_layerdrop", "0")


def test_sines_are_not_trained():
    spec = from_config(COUNTS["pegasus-large"][1], "pegasus")
    frozen = [p.name for p in spec.parameters if not p.trainable]
    assert frozen == ["model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"]
