"""What an accelerate configuration says beside how it shards: compilation, older spellings, keys that are ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.plan.recipes import read, read_file, said
from zsim.errors import InputError, NotModeled

DATA = Path(__file__).parents[1] / "data"


def accelerate(data: dict[str, Any]):
    return read("accelerate", {"distributed_type": "MULTI_GPU"} | data)


def test_keys_of_older_releases() -> None:
    section = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_backward_prefetch_policy": "BACKWARD_PRE"}
    reading = accelerate({"distributed_type": "FSDP", "fsdp_config": section})
    assert said(reading)["fsdp.backward_prefetch"] == "NONE"
    assert "fsdp_backward_prefetch_policy is ignored from accelerate 1.0 on; before, it was backward_prefetch" in (
        reading.notes
    )
    with pytest.raises(NotModeled, match=r"tp_config: a key of accelerate 1\.4 to 1\.6"):
        accelerate({"tp_config": {"tp_size": 4}})


@pytest.mark.parametrize(
    ("data", "compiled"),
    [
        ({"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, True),
        ({"dynamo_config": {"backend": "inductor"}}, True),
        ({"dynamo_backend": "INDUCTOR"}, True),
        ({"dynamo_backend": "NO"}, None),
        ({"dynamo_backend": False}, None),  # NO without quotes
        ({"dynamo_config": {}}, None),
        ({"dynamo_config": {"dynamo_backend": "EAGER"}}, None),
    ],
)
def test_compilation(data: dict[str, Any], compiled: bool | None) -> None:
    reading = accelerate(data)
    assert said(reading).get("compile") is compiled
    assert bool(reading.not_modeled) is (data == {"dynamo_config": {"dynamo_backend": "EAGER"}})


def test_no_backend_of_compilation() -> None:
    with pytest.raises(InputError, match="'yes' is no backend"):
        accelerate({"dynamo_backend": "yes"})


def test_a_file_of_an_older_accelerate() -> None:
    kind, reading = read_file(DATA / "accelerate" / "compiled.yaml")
    assert kind == "accelerate"
    assert (said(reading)["precision"], said(reading)["compile"]) == ("fp16", True)
    assert said(accelerate({"fp16": True, "mixed_precision": "bf16"}))["precision"] == "bf16"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({"compute_environment": "AMAZON_SAGEMAKER", "ec2_instance_type": "x"}, "SAGEMAKER"),
        ({"use_cpu": True, "distributed_type": "NO"}, "CPUs"),
    ],
)
def test_other_machines(data: dict[str, Any], why: str) -> None:
    with pytest.raises(NotModeled, match=why):
        accelerate(data)


def test_use_cpu_of_several_processes_leaves_them_on_gpus() -> None:
    """launch.py asks for --cpu alone before it starts DeepSpeed, FSDP or several processes; use_cpu sets threads."""
    offload = {"zero_stage": 3, "offload_optimizer_device": "cpu", "gradient_accumulation_steps": 1}
    data = {"distributed_type": "DEEPSPEED", "num_processes": 8, "deepspeed_config": offload, "mixed_precision": "bf16"}
    fields = said(read("accelerate", data))
    assert (fields["zero.offload_optimizer.device"], fields["omp_num_threads"]) == ("cpu", 1)
    reading = read("accelerate", data | {"use_cpu": True})
    assert (said(reading)["framework.name"], said(reading).get("omp_num_threads")) == ("deepspeed", None)
    assert any(what.startswith("omp_num_threads (use_cpu") for what in reading.still_missing())
    assert not any(note.startswith("omp_num_threads") for note in reading.notes)
    plain = read("accelerate", {"distributed_type": "MULTI_GPU", "use_cpu": True})
    assert not any(what.startswith("omp_num_threads") for what in plain.still_missing())


def test_what_deepspeeds_section_does_not_know_is_said() -> None:
    """commands/launch.py takes what it has an option for; a whole DeepSpeed file belongs in deepspeed_config_file."""
    section = {"zero_stage": 3, "zero_optimization": {"stage": 2}, "ofload_param_device": "cpu"}
    reading = read("accelerate", {"distributed_type": "DEEPSPEED", "deepspeed_config": section})
    assert said(reading)["zero.stage"] == 3
    assert "zero.offload_param.device" not in said(reading)
    ignored = sorted(note for note in reading.notes if "ignored" in note)
    assert ignored == [
        "deepspeed_config.ofload_param_device is no option of accelerate and is ignored; "
        "did you mean offload_param_device?",
        "deepspeed_config.zero_optimization is no option of accelerate and is ignored",
    ]


def test_the_launchers_option_compiles(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    options = "--model_name_or_path m --output_dir o --per_device_train_batch_size 1 --learning_rate 1e-5"
    path.write_text(f"accelerate launch --multi_gpu --num_processes 4 --dynamo_backend inductor run_clm.py {options}\n")
    assert said(read_file(path)[1])["compile"] is True
    path.write_text(f"accelerate launch --multi_gpu --num_processes 4 --dynamo_backend no run_clm.py {options}\n")
    assert "compile" not in said(read_file(path)[1])
