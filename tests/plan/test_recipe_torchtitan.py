"""torchtitan's TOML: what is refused, and its own defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plan.recipes import said
from zsim.errors import InputError, NotModeled
from zsim.plan import detect
from zsim.plan.torchtitan import parse_toml

TITAN = [
    ("[parallelism]\ntensor_parallel_degree = 2\n", NotModeled, "tensor parallelism"),
    ("[activation_checkpoint]\nselective_ac_option = 'all'\n", InputError, "'all' is not known"),
    ("[training]\nlocal_batch_size = 0\n", InputError, "0 is not greater than 0"),
    ("[model]\nconverters = ['mx']\n", NotModeled, "mx"),
    ("[optimizer]\nimplementation = 'quick'\n", InputError, "'quick' is not known"),
    ("[model]\nname = 'flux'\n", NotModeled, "flux, which is no language model alone"),
    ("[model]\nconfig = 'configs/gla.json'\n", NotModeled, "a job of flame"),
    ("[fault_tolerance]\nenable = true\n", NotModeled, "torchft"),
    ("[activation_checkpoint]\nearly_stop = 1\n", InputError, "1 is not of the right kind"),
    ("[training]\ndtype = 'float8'\n", InputError, "'float8' is not known"),
    ("[training\n", InputError, "not TOML"),
]


@pytest.mark.parametrize(("text", "error", "says"), TITAN, ids=[case[2] for case in TITAN])
def test_torchtitan_refused(tmp_path: Path, text: str, error: type, says: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(error, match=says) as refused:
        detect.read(parse_toml(path), "torchtitan")
    assert refused.value.file == path
    assert refused.value.line == (1 if "TOML" in says else 2)


def test_torchtitan_checkpoints_every_second_block_unless_told(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[activation_checkpoint]\nmode = 'selective'\n")
    assert said(detect.read(parse_toml(path), "torchtitan"))["checkpointing.every"] == 2
    path.write_text("[activation_checkpoint]\nselective_ac_option = 'op'\n")
    assert said(detect.read(parse_toml(path), "torchtitan"))["checkpointing"] == "selective"


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("[model]\nhf_assets_path = 'x'\n[activation_checkpoint]\nmode = 'full'\n", False),
        ("[activation_checkpoint]\nmode = 'full'\nearly_stop = false\n", False),
        ("[model]\nhf_assets_path = 'x'\n[activation_checkpoint]\nmode = 'full'\nearly_stop = true\n", None),
        ("[model]\ntokenizer_path = 'x'\n[activation_checkpoint]\nmode = 'full'\n", None),  # until August 2025
        ("[model]\nhf_assets_path = 'x'\n[compile]\nenable = true\n[activation_checkpoint]\nmode = 'full'\n", None),
    ],
)
def test_torchtitan_runs_a_block_again_to_its_end(tmp_path: Path, text: str, stops: bool | None) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text)
    fields = said(detect.read(parse_toml(path), "torchtitan"))
    assert fields.get("checkpointing.early_stop") is stops
    assert fields.get("checkpointing.policy", fields.get("checkpointing")) == "full"


def test_torchtitan_ddp(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        "[training]\nglobal_batch_size = 64\n[activation_checkpoint]\nmode = 'none'\n"
        "[parallelism]\ndata_parallel_replicate_degree = 4\ndata_parallel_shard_degree = 1\n"
    )
    fields = said(detect.read(parse_toml(path), "torchtitan"))
    assert (fields["framework.name"], fields["train_batch_size"], fields["checkpointing"]) == ("ddp", 64, "none")
    assert (fields["micro_batch"], fields["seq_len"]) == (8, 2048)  # torchtitan's defaults


@pytest.mark.parametrize(
    ("section", "compiled", "loss"),
    [
        ("enable = true", True, "compiled"),
        ('enable = true\ncomponents = ["model"]', True, None),
        ('enable = true\ncomponents = ["loss"]', None, "compiled"),
        ("enable = false", None, None),
    ],
)
def test_torchtitan_compiles_what_components_name(tmp_path: Path, section: str, compiled, loss) -> None:
    """torchtitan's config: Compile.components, ["model", "loss"] by default."""
    path = tmp_path / "job.toml"
    path.write_text(f'[model]\nname = "llama3"\nflavor = "8B"\n[compile]\n{section}\n')
    fields = said(detect.read(parse_toml(path), "torchtitan"))
    assert (fields.get("compile"), fields.get("loss")) == (compiled, loss)


def test_torchtitan_stores_in_the_type_of_training(tmp_path: Path) -> None:
    """job_config.py: training.dtype is of parameters, gradients and states of the optimizer."""
    path = tmp_path / "job.toml"
    path.write_text("[training]\ndtype = 'bfloat16'\n")
    assert said(detect.read(parse_toml(path), "torchtitan"))["fsdp.storage_dtype"] == "bfloat16"
    path.write_text("[training]\ndtype = 'float32'\n")
    assert "fsdp.storage_dtype" not in said(detect.read(parse_toml(path), "torchtitan"))
    degrees = "[parallelism]\ndata_parallel_replicate_degree = 4\ndata_parallel_shard_degree = 1\n"
    path.write_text(f"[training]\ndtype = 'bfloat16'\n{degrees}")
    assert said(detect.read(parse_toml(path), "torchtitan"))["ddp.dtype"] == "bfloat16"


def test_keys_of_other_sections_are_not_read_as_those_of_one(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[optimizer]\nlr = 1e-3\nmode = 'full'\n[training]\nsteps = 3\n")
    reading = detect.read(parse_toml(path), "torchtitan")
    assert "optimizer.mode" in reading.not_read
    assert any(text.startswith("optimizer.lr, training.steps (data") for text in reading.without_effect)
