"""Dimensions beside data parallelism in configuration files: Ulysses is read, the others are refused by their key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from zsim.document import parse_yaml
from zsim.errors import InputError, NotModeled
from zsim.plan import detect
from zsim.plan.reading import Reading

ULYSSES = {"sp_size": 2, "dp_shard_size": 2, "sp_backend": "deepspeed", "sp_attn_implementation": "flash_attention_2"}


def accelerate(sizes: dict[str, Any], **fields: Any) -> Reading:
    section = {f"parallelism_config_{name}": value for name, value in sizes.items()}
    data = {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "mixed_precision": "bf16",
        "num_processes": 4, "deepspeed_config": {"zero_stage": 3}, "parallelism_config": section,
    }  # fmt: skip
    return detect.read(parse_yaml(yaml.safe_dump(data | fields), "accelerate.yaml"), "accelerate")


def test_sp_size_is_sequence_parallelism() -> None:
    fields = accelerate(ULYSSES).fields
    assert (fields["sequence_parallel_size",], fields["attention",], fields["zero", "stage"]) == (2, "flash", 3)
    assert ("seq_len",) not in fields
    fixed = accelerate(ULYSSES | {"sp_seq_length_is_variable": False, "sp_seq_length": "32768"})
    assert fixed.fields["seq_len",] == 32768
    assert ("sequence_parallel_size",) not in accelerate({"sp_size": 1}).fields


@pytest.mark.parametrize(
    ("implementation", "attention"),
    [
        (None, "sdpa"),
        ("flash_attention_3", "flash3"),
        ("kernels-community/flash-attn2", "flash"),
        ("kernels-community/flash-attn4", "flash4"),
    ],
)
def test_attention_is_the_one_that_is_taken_over(implementation: str | None, attention: str) -> None:
    sizes = {name: value for name, value in ULYSSES.items() if name != "sp_attn_implementation"}
    found = accelerate(sizes | ({"sp_attn_implementation": implementation} if implementation else {}))
    assert found.fields["attention",] == attention


def test_accelerate_drops_the_type_of_gradients() -> None:
    """Of the file that TRL ships: it sets args.seq_parallel_communication_data_type, which nothing reads."""
    section = {"zero_stage": 3, "seq_parallel_communication_data_type": "bf16"}
    found = accelerate(ULYSSES, deepspeed_config=section)
    assert ("zero", "seq_parallel_communication_data_type") not in found.fields
    assert any("seq_parallel_communication_data_type" in text for text in found.without_effect)


def test_deepspeeds_own_file_says_both(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 3}, "seq_parallel_communication_data_type": "bf16"}
    (tmp_path / "ds.json").write_text(json.dumps(config | {"sequence_parallel_size": 4, "train_batch_size": 8}))
    document = detect.parse(tmp_path / "ds.json")
    fields = detect.read(document, detect.identify(document)).fields
    assert fields["sequence_parallel_size",] == 4
    assert fields["zero", "seq_parallel_communication_data_type"] == "bfloat16"


REFUSED: list[tuple[dict[str, Any], dict[str, Any], type[InputError], str, str]] = [
    ({"cp_size": 2}, {}, NotModeled, "cp_size", "context parallelism (ring attention)"),
    ({"tp_size": 2}, {}, NotModeled, "tp_size", "tensor parallelism"),
    ({"sp_size": 4}, {"num_processes": 8}, InputError, "dp_shard_size", "1 (dp_replicate_size x dp_shard_size) x 4"),
    ({"sp_size": 0}, {}, InputError, "sp_size", "0 is not a size"),
    (ULYSSES | {"sp_backend": "torch"}, {}, InputError, "sp_backend", "'torch' is not known"),
    (
        ULYSSES | {"sp_attn_implementation": "eager"},
        {},
        InputError,
        "sp_attn_implementation",
        "'eager' is not supported",
    ),
    (ULYSSES | {"sp_seq_length_is_variable": False}, {}, InputError, "sp_seq_length", "is needed"),
    (ULYSSES, {"distributed_type": "FSDP"}, InputError, "sp_size", "without DeepSpeed,"),
    (ULYSSES, {"distributed_type": "MULTI_GPU"}, InputError, "sp_size", "without DeepSpeed"),
]


@pytest.mark.parametrize(("sizes", "fields", "kind", "field", "says"), REFUSED, ids=[case[4] for case in REFUSED])
def test_refused(sizes: dict[str, Any], fields: dict[str, Any], kind: type, field: str, says: str) -> None:
    with pytest.raises(kind) as refused:
        accelerate(sizes, **fields)
    assert type(refused.value) is kind
    assert refused.value.field == f"parallelism_config.parallelism_config_{field}"
    assert says in refused.value.message
    assert refused.value.accepted
    assert refused.value.line


OTHERS = [
    ("axolotl", {"base_model": "m", "context_parallel_size": 2}, "context_parallel_size"),
    ("axolotl", {"base_model": "m", "sequence_parallel_degree": 2}, "sequence_parallel_degree"),
    ("llama_factory", {"finetuning_type": "full", "cp_size": 2, "cp_mode": "ulysses"}, "cp_size"),
    ("llama_factory", {"finetuning_type": "full", "sequence_parallel_size": 2}, "sequence_parallel_size"),
    ("llama_factory", {"finetuning_type": "full", "tensor_model_parallel_size": 2}, "tensor_model_parallel_size"),
    ("trainer", {"parallelism_config": {"sp_size": 2}}, "parallelism_config"),
    ("torchtitan", {"parallelism": {"context_parallel_degree": 2}}, "parallelism.context_parallel_degree"),
    ("deepspeed", {"data_parallel_size": 2, "sequence_parallel_size": 2, "bf16": {}}, "data_parallel_size"),
    ("deepspeed", {"tensor_parallel": {"autotp_size": 2}, "bf16": {}}, "tensor_parallel.autotp_size"),
]


@pytest.mark.parametrize(("kind", "data", "field"), OTHERS, ids=[f"{case[0]} {case[2]}" for case in OTHERS])
def test_other_ways_to_cut_a_sequence_or_a_layer_are_refused(kind: str, data: dict[str, Any], field: str) -> None:
    with pytest.raises(NotModeled) as refused:
        detect.read(parse_yaml(yaml.safe_dump(data), "config.yaml"), kind)
    assert refused.value.field == field
    if "data_parallel" not in field and "tensor" not in field and kind != "trainer":
        assert "sequence_parallel_size of a scenario" in str(refused.value.accepted)
