"""Float8 in torchtitan's jobs of each year, in accelerate's configurations and options, and in axolotl's recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.plan.recipes import read, said
from tests.plan.test_launch import launched
from zsim.errors import InputError, NotModeled
from zsim.plan import detect
from zsim.plan.reading import Reading
from zsim.plan.torchtitan import parse_toml

FSDP2 = {
    "distributed_type": "FSDP", "mixed_precision": "fp8",
    "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
}  # fmt: skip
GATHERS = {"float8.all_gather": True, "float8.precompute": True}


def titan(folder: Path, text: str) -> Reading:
    path = folder / "job.toml"
    path.write_text(text)
    return detect.read(parse_toml(path), "torchtitan")


def float8(reading: Reading) -> dict[str, Any]:
    return {name: value for name, value in said(reading).items() if name.startswith("float8")}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[float8]\nenable_float8_linear = false\n", {}),
        # the end of 2024: a switch, and the output left out in code
        (
            "[float8]\nenable_float8_linear = true\nenable_fsdp_float8_all_gather = true\n"
            "precompute_float8_dynamic_scale_for_fsdp = true\n",
            {"float8.recipe": "tensorwise", "float8.exclude": ["output"], **GATHERS},
        ),
        # March 2025: converters in a text
        ('[model]\nconverters = "float8"\n', {"float8.recipe": "tensorwise", "float8.exclude": ["output"]}),
        # June 2025: a list, and filters in the file
        (
            '[model]\nconverters = ["float8"]\n[float8]\nfilter_fqns = ["output"]\nrecipe_name = "rowwise"\n',
            {"float8.recipe": "rowwise", "float8.exclude": ["output"]},
        ),
        (
            '[model]\nconverters = ["float8"]\n[float8]\nenable_fsdp_float8_all_gather = true\n',
            {"float8.recipe": "tensorwise", "float8.exclude": [], "float8.all_gather": True},
        ),
        # autumn of 2025
        (
            '[model]\nconverters = ["quantize.linear.float8"]\n[quantize.linear.float8]\n'
            'filter_fqns = ["auto_filter_small_kn", "output"]\nenable_fsdp_float8_all_gather = true\n'
            "precompute_float8_dynamic_scale_for_fsdp = true\n",
            {"float8.recipe": "tensorwise", "float8.exclude": ["auto_filter_small_kn", "output"], **GATHERS},
        ),
        ('[quantize.linear.float8]\nrecipe_name = "rowwise"\n', {}),  # not among the converters
        (
            '[model]\nconverters = ["float8"]\n[float8]\nenable_fsdp_float8_all_gather = true\n[parallelism]\n'
            "data_parallel_shard_degree = 1\ndata_parallel_replicate_degree = 8\n",
            {"float8.recipe": "tensorwise", "float8.exclude": []},  # DDP shards nothing
        ),
    ],
)  # fmt: skip
def test_torchtitan(tmp_path: Path, text: str, expected: dict[str, Any]) -> None:
    assert float8(titan(tmp_path, text)) == expected


def test_what_torchtitan_lists_besides(tmp_path: Path) -> None:
    text = '[model]\nconverters = ["float8"]\n[float8]\nforce_recompute_fp8_weight_in_bwd = true\nodd = 1\n'
    reading = titan(tmp_path, text)
    effect = reading.without_effect
    assert "float8.force_recompute_fp8_weight_in_bwd (torchao no longer reads it)" in effect
    assert reading.not_read == ["float8.odd"]
    assert not any("converters" in what for what in effect)


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("[model]\nconverters = ['float8', 'mx']\n", NotModeled, "mx"),
        ("[training]\nfp8_linear = 'dynamic'\n", NotModeled, "float8_experimental"),
        ("[float8]\nscaling_type_input = 'delayed'\nenable_float8_linear = true\n", NotModeled, "delayed scaling"),
        ("[float8]\nemulate = true\nenable_float8_linear = true\n", NotModeled, "emulate"),
        ("[float8]\nrecipe_name = 'blockwise'\nenable_float8_linear = true\n", InputError, "'blockwise' is not known"),
    ],
)
def test_torchtitan_refused(tmp_path: Path, text: str, error: type, says: str) -> None:
    with pytest.raises(error, match=says) as refused:
        titan(tmp_path, text)
    assert refused.value.line == 2


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (FSDP2 | {"fp8_config": {"backend": "AO"}}, GATHERS),
        (FSDP2 | {"fp8_config": {"backend": "AO", "enable_fsdp_float8_all_gather": False}}, {}),
        ({"distributed_type": "MULTI_GPU", "mixed_precision": "fp8", "fp8_config": {"backend": "ao"}}, {}),
    ],
)
def test_accelerate(data: dict[str, Any], expected: dict[str, Any]) -> None:
    reading = read("accelerate", data)
    assert float8(reading) == {"float8.recipe": "tensorwise", **expected}
    assert said(reading)["precision"] == "bf16"
    assert any("pad_inner_dim" in what for what in reading.not_modeled)


@pytest.mark.parametrize(
    ("config", "says"),
    [({"backend": "TE"}, "TransformerEngine"), ({"backend": "MSAMP"}, "MS-AMP"), (None, "whichever library")],
)
def test_other_backends_are_refused(config: dict[str, Any] | None, says: str) -> None:
    with pytest.raises(NotModeled, match=says):
        read("accelerate", FSDP2 | {"fp8_config": config})


def test_accelerates_options(tmp_path: Path) -> None:
    options = "--use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --mixed_precision fp8"
    reading = launched(tmp_path, f"{options} --fp8_backend ao")
    assert float8(reading) == {"float8.recipe": "tensorwise", **GATHERS}
    plain = launched(tmp_path, f"{options} --fp8_backend ao --fp8_enable_fsdp_float8_all_gather false")
    assert float8(plain) == {"float8.recipe": "tensorwise"}
    with pytest.raises(NotModeled, match="TransformerEngine"):
        launched(tmp_path, f"{options} --fp8_backend te")


def test_axolotl() -> None:
    base = {"base_model": "m", "micro_batch_size": 1, "sequence_len": 512, "bf16": True, "fp8": True}
    sharded = {"fsdp_version": 2, "fsdp_config": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
    assert float8(read("axolotl", base)) == {"float8.recipe": "tensorwise"}
    assert float8(read("axolotl", base | {"fp8": False})) == {}
    both = base | sharded | {"fp8_enable_fsdp_float8_all_gather": True}
    assert float8(read("axolotl", both)) == {"float8.recipe": "tensorwise", **GATHERS}
    assert float8(read("axolotl", base | sharded)) == {"float8.recipe": "tensorwise"}


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("[model]\nconverters = 3\n", "model.converters"),
        ('[model]\nconverters = ["float8"]\n[float8]\nfilter_fqns = 3\n', "float8.filter_fqns"),
    ],
)
def test_what_is_no_list_of_names_is_refused(tmp_path: Path, text: str, field: str) -> None:
    with pytest.raises(InputError, match="3 is not a list of names") as error:
        titan(tmp_path, text)
    assert error.value.field == field
