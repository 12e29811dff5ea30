"""What is wrong with a config.json is said once, with file, line and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.errors import InputError, NotModeled
from zsim.model.family_table import markdown
from zsim.model.huggingface import from_config, known_families, read_config
from zsim.model.lacking import MECHANISMS
from zsim.model.spec import ModelSpec

GOOD: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
}  # fmt: skip


def write(folder: Path, text: str) -> Path:
    path = folder / "config.json"
    path.write_text(text)
    return path


def refused(folder: Path, changes: dict[str, Any]) -> InputError:
    values = {key: value for key, value in {**GOOD, **changes}.items() if value != "absent"}
    with pytest.raises(InputError) as caught:
        read_config(write(folder, json.dumps(values, indent=1)))
    return caught.value


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"hidden_size": "absent"}, "hidden_size", "is missing"),
        ({"hidden_size": None}, "hidden_size", "is missing"),
        ({"hidden_size": -4096}, "hidden_size", "is -4096"),
        ({"hidden_size": 0}, "hidden_size", "is 0"),
        ({"hidden_size": "4096"}, "hidden_size", 'is "4096"'),
        ({"hidden_size": 64.5}, "hidden_size", "is 64.5"),
        ({"hidden_size": True}, "hidden_size", "is true"),
        ({"vocab_size": float("nan")}, "vocab_size", "is NaN"),
        ({"vocab_size": [100]}, "vocab_size", "is [100]"),
        ({"num_hidden_layers": 10**8}, "num_hidden_layers", "is 100000000"),
        ({"num_attention_heads": 5}, "num_attention_heads", "does not divide the hidden size 64"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "does not divide the 4 heads"),
        ({"attention_dropout": float("nan")}, "attention_dropout", "is NaN"),
        ({"attention_dropout": 2}, "attention_dropout", "is 2"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings", 'is "yes"'),
        ({"hidden_act": "mish"}, "hidden_act", "is 'mish'"),
        ({"layer_types": ["full_attention"]}, "layer_types", "has 1 entries"),
        ({"layer_types": ["full_attention", "chunked"]}, "layer_types", "has 'chunked'"),
        ({"model_type": "absent"}, "model_type", "is missing"),
        ({"model_type": 3}, "model_type", "is 3"),
        (
            {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 5},
            "num_experts_per_tok",
            "more than the 4 experts",
        ),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, changes: dict[str, Any], field: str, message: str):
    error = refused(tmp_path, changes)
    assert not isinstance(error, NotModeled)
    assert error.field == field
    assert message in error.message
    assert error.accepted
    assert error.file == tmp_path / "config.json"
    lines = (tmp_path / "config.json").read_text().splitlines()
    if "is missing" not in message or changes[field] is None:
        assert f'"{field}"' in lines[error.line - 1]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_type": "mamba"}, "model_type"),
        ({"text_config": {"hidden_size": 64}}, "text_config"),
        ({"vision_config": {}, "model_type": "idefics2"}, "vision_config"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"model_type": "falcon", "alibi": True}, "alibi"),
    ],
)
def test_what_is_not_modeled_is_refused(tmp_path: Path, changes: dict[str, Any], field: str):
    error = refused(tmp_path, changes)
    assert isinstance(error, NotModeled)
    assert error.field == field
    assert error.accepted
    assert f'"{field}"' in (tmp_path / "config.json").read_text().splitlines()[error.line - 1]


def test_a_quantized_checkpoint_is_simulated_without_saying_so(tmp_path: Path):
    """Of models that are published in 8 bits alone there is no other configuration."""
    found = refused(tmp_path, {"quantization_config": {"quant_method": "fp8"}})
    assert "the same file without it, for training in 16 bits" in str(found.accepted)


def test_families_that_are_not_read_are_refused_by_what_they_lack(tmp_path: Path):
    assert not {*MECHANISMS} & {*known_families()}
    assert "'jamba': the selective scan of Mamba 1" in str(refused(tmp_path, {"model_type": "jamba"}))
    seeing = {"model_type": "florence2", "vision_config": {}}
    assert "florence2: a language model inside a multimodal one, with a DaViT" in str(refused(tmp_path, seeing))


def test_a_family_that_is_not_known_is_told_those_spelled_like_it(tmp_path: Path):
    count = f"{len(known_families())} families (docs/families.md)"
    near = str(refused(tmp_path, {"model_type": "qwen4"}).accepted)
    assert near.startswith("qwen3, qwen2, ")
    assert f"any other of {count}" in near
    for other in ("baichuan", "jamba", "absent"):  # nothing like it, refused by what it lacks, not said
        assert str(refused(tmp_path, {"model_type": other}).accepted).startswith(f"one of {count}")


def test_the_documented_families_are_these():
    """Written by `python -m zsim.model.family_table`."""
    root = Path(__file__).parents[2]
    text = (root / "docs" / "families.md").read_text(encoding="utf-8")
    assert text == "\n".join(markdown()) + "\n"
    assert {name for name in known_families() if f"`{name}`" not in text} == set()
    assert f"{len(known_families())} model families" in (root / "README.md").read_text(encoding="utf-8")


def test_a_text_config_of_its_own_is_named_where_it_can_be_read(tmp_path: Path):
    inside = refused(tmp_path, {"text_config": {"model_type": "gemma"}, "model_type": "idefics2"})
    assert "text_config, as a file of its own" in str(inside.accepted)
    inside = refused(tmp_path, {"text_config": {"model_type": "kimi_k2"}, "model_type": "kimi_k25"})
    assert "text_config, as a file of its own" in str(inside.accepted)
    inside = refused(tmp_path, {"text_config": {"model_type": "mllama_text_model"}, "model_type": "idefics2"})
    assert inside.accepted == "a text model's config.json"


@pytest.mark.parametrize(
    ("text", "line"),
    [('{"model_type": "llama",\n "hidden_size": }', 2), ("", 1), ("[1, 2]", None), ('"llama"', None), ("{} {}", 1)],
)
def test_what_is_no_json_object(tmp_path: Path, text: str, line: int | None):
    with pytest.raises(InputError) as caught:
        read_config(write(tmp_path, text))
    assert caught.value.file == tmp_path / "config.json"
    assert caught.value.line == line


def test_files_that_cannot_be_read(tmp_path: Path):
    (tmp_path / "latin.json").write_bytes(b'{"model_type": "\xff\xfe"}')
    for path in (tmp_path / "no.json", tmp_path / "latin.json"):
        with pytest.raises(InputError, match="cannot be read"):
            read_config(path)


def test_nested_fields_are_found_where_they_stand(tmp_path: Path):
    values = {
        **GOOD,
        "model_type": "phi",
        "rope_parameters": {"partial_rotary_factor": 3},
        "partial_rotary_factor": 0.5,
    }
    with pytest.raises(InputError) as caught:
        read_config(write(tmp_path, json.dumps(values, indent=1)))
    assert caught.value.field == "rope_parameters.partial_rotary_factor"
    line = (tmp_path / "config.json").read_text().splitlines()[caught.value.line - 1]
    assert line.strip() == '"partial_rotary_factor": 3'


def test_a_model_in_the_working_directory_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path, json.dumps(GOOD))
    monkeypatch.chdir(tmp_path)
    assert read_config("config.json").name == read_config(".").name == tmp_path.name


def test_a_folder_and_a_byte_order_mark(tmp_path: Path):
    (tmp_path / "config.json").write_text("\ufeff" + json.dumps(GOOD), encoding="utf-8")
    spec = read_config(tmp_path)
    assert spec.name == tmp_path.name
    assert spec.numel == from_config(GOOD, "x").numel


VALUES = (
    st.none() | st.booleans() | st.integers(-3, 200) | st.floats() | st.text(max_size=3) | st.just([]) | st.just({})
)


@given(
    st.dictionaries(st.sampled_from([*GOOD, "head_dim", "attention_bias", "layer_types", "rope_parameters"]), VALUES)
)
@settings(max_examples=300, deadline=None)
def test_any_value_is_read_or_refused(changes: dict[str, Any]):
    outcome: ModelSpec | InputError
    try:
        outcome = from_config({**GOOD, **changes}, "x")
    except InputError as error:
        outcome = error
    assert outcome.numel > 0 if isinstance(outcome, ModelSpec) else outcome.field


def test_a_text_models_fields_under_the_name_of_a_vision_language_model(tmp_path: Path):
    error = refused(tmp_path, {"model_type": "gemma3", "head_dim": 16})
    assert (error.field, error.line) == ("text_config", None)
    assert "the text model's fields stand at the top" in error.message
    assert "model_type gemma3_text, where the file is of a text model alone" in str(error.accepted)
    read_config(write(tmp_path, json.dumps({**GOOD, "model_type": "gemma3_text", "head_dim": 16})))
