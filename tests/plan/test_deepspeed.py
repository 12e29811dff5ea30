"""DeepSpeed configurations: what is understood, and what is refused for which reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zsim.document import Document
from zsim.errors import InputError, NotModeled
from zsim.plan.deepspeed import read_deepspeed, read_document
from zsim.plan.reading import Reading

DATA = Path(__file__).parents[1] / "data" / "ds_config"


def read(data: dict[str, Any], version: str = "0.19.8") -> Reading:
    return read_document(Document("ds.json", data), version)


def zero(**keys: Any) -> dict[str, Any]:
    return {"train_batch_size": 8, "zero_optimization": {"stage": 3} | keys}


def fields(reading: Reading) -> dict[str, Any]:
    return {".".join(map(str, path)): value for path, value in reading.fields.items()}


def test_the_text_books_snippet() -> None:
    reading = read_deepspeed(DATA / "textbook.json")
    assert fields(reading) == {
        "framework.name": "deepspeed",
        "zero.stage": 3,
        "zero.offload_optimizer.device": "cpu",
        "zero.offload_optimizer.pin_memory": True,
        "zero.overlap_comm": True,
        "zero.contiguous_gradients": True,
        "precision": "fp16",
        "micro_batch": 1,
        "grad_clip": 1.0,
    }
    assert reading.missing == ["model", "cluster", "seq_len"]
    assert reading.not_modeled == []


def test_comments_floats_and_text() -> None:
    reading = read_deepspeed(DATA / "commented_stage3.json")
    said = fields(reading)
    assert said["zero.stage3_max_live_parameters"] == 1_000_000_000  # under the field's own name, as a float
    assert said["zero.stage3_max_reuse_distance"] == 500_000_000  # as text
    assert said["micro_batch"] == 2
    assert said["zero.reduce_bucket_size"] == "auto"
    assert said["zero.zero_init"] is True
    assert reading.places[("zero", "stage3_max_live_parameters")] == (DATA / "commented_stage3.json", 12)


def test_a_floor_of_the_loss_scale_below_one() -> None:
    """DeepSpeed before 0.17 takes it, unchecked (after a configuration that is in use)."""
    reading = read_deepspeed(DATA / "small_loss_scale.json", "0.10.0")
    assert fields(reading)["zero.stage"] == 2
    assert any("fp16.min_loss_scale" in text for text in reading.without_effect)
    with pytest.raises(InputError, match="any number for a framework"):
        read_deepspeed(DATA / "small_loss_scale.json")


def test_old_spellings() -> None:
    reading = read_deepspeed(DATA / "old_spellings.json")
    said = fields(reading)
    assert said["precision"] == "bf16"
    assert said["zero.offload_optimizer.device"] == "cpu"
    assert (said["optimizer.name"], said["optimizer.impl"]) == ("adamw", "foreach")
    assert any("cpu_offload is the old way" in note for note in reading.notes)
    assert any("did you mean gradient_accumulation_steps" in note for note in reading.notes)
    assert reading.not_modeled == ["wall_clock_breakdown: timers that synchronize host and GPU"]


@pytest.mark.parametrize(
    ("file", "line", "says"),
    [
        ("shell_variables.json", 4, "$ZERO_STAGE is a shell variable"),
        ("python_literals.json", 5, "True is Python; JSON writes true"),
        ("misspelt.json", 5, "did you mean stage3_param_persistence_threshold?"),
    ],
)
def test_files_refused(file: str, line: int, says: str) -> None:
    with pytest.raises(InputError) as refused:
        read_deepspeed(DATA / file)
    assert says in refused.value.message
    assert (refused.value.file, refused.value.line) == (DATA / file, line)


REFUSED = [
    (zero(stage=4), InputError, "4 is not a stage"),
    (zero(reduce_bucket_size=0), InputError, "0 is too small"),
    (zero(reduce_bucket_size=-1), InputError, "-1 is too small"),
    (zero(reduce_bucket_size="5e8"), InputError, '"5e8" is not a whole number'),  # pydantic takes 5e8, not "5e8"
    (zero(reduce_bucket_size="500000000 * 2"), InputError, "is a calculation"),
    (zero(reduce_bucket_size="BUCKET_SIZE,"), InputError, "BUCKET_SIZE is a placeholder"),
    (zero(reduce_bucket_size="${BUCKET}"), InputError, "is a shell variable"),
    (zero(reduce_bucket_size=[5e7, 5e8]), InputError, "list of values to tune"),
    (zero(overlap_comm=3), InputError, "3 is not true or false"),
    (zero(offload_param=False), InputError, "false is not a section"),
    (zero(offload_param={"device": "gpu"}), InputError, "'gpu' is not a device"),
    (zero(offload_optimizer={"device": "cpu", "pin_memry": True}), InputError, "did you mean pin_memory?"),
    (zero(cpu_offload=True, offload_optimizer={"device": "cpu"}), InputError, "cannot stand together"),
    (zero(stage=2, offload_optimizer={"device": "cpu", "ratio": 0.5}), InputError, "only supported for ZeRO stage 3"),
    (zero(max_live_parameters=1, stage3_max_live_parameters=2), InputError, "stands here twice"),
    (zero(mics_shard_size=8), InputError, "DeepSpeed has removed MiCS"),
    ({"train_batch_size": 8, "amp": {"enabled": False}}, InputError, "has removed Apex AMP"),
    ({"train_batch_size": 8, "elasticity": {"enabled": False}}, InputError, "has removed elastic training"),
    ({"train_batch_size": 0}, InputError, "has to be greater than 0"),
    (
        {"train_batch_size": 8, "bf16": {"enabled": True}, "fp16": {"enabled": True}},
        InputError,
        "cannot both be enabled",
    ),
    (
        {"train_batch_size": 8, "bf16": {"enabled": True, "loss_scale": 0}},
        InputError,
        "DeepSpeed does not know this key",
    ),
    ({"train_batch_size": 8, "fp16": {"enabled": True, "min_loss_scale": 1e-10}}, InputError, "not a whole number"),
    ({"train_batch_size": 8, "communication_data_type": "fp8"}, InputError, "'fp8' is not a type"),
    (
        {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}},
        InputError,
        "DeepSpeed refuses it here",
    ),
    ({"train_batch_size": 8, "optimizer": {"type": "OneBitAdam"}}, NotModeled, "OneBitAdam"),
    ({"train_batch_size": 8, "optimizer": {"type": "Lamb"}}, NotModeled, "Lamb"),
]


@pytest.mark.parametrize(("data", "kind", "says"), REFUSED, ids=[case[2][:40] for case in REFUSED])
def test_refused(data: dict[str, Any], kind: type, says: str) -> None:
    with pytest.raises(kind) as refused:
        read(data)
    assert says in refused.value.message


def test_mics_is_simulated_where_deepspeed_still_has_it() -> None:
    mics = zero(stage=3, mics_shard_size=8, mics_hierarchical_params_gather=False)
    found = fields(read(mics, "0.19.6"))
    assert (found["zero.mics_shard_size"], found["zero.mics_hierarchical_params_gather"]) == (8, False)
    assert "zero.mics_shard_size" not in fields(read(zero(stage=3, mics_shard_size=-1), "0.18.9"))
    with pytest.raises(InputError, match="DeepSpeed has removed MiCS"):
        read(mics, "0.19.7")
    with pytest.raises(NotModeled, match="LoCo"):
        read(zero(stage=3, zeropp_loco_param={"err_beta": 0.8}), "0.19.7")


@pytest.mark.parametrize("key", ["enabled", "synchronized"])
def test_the_throughput_timer_can_be_switched_off_since_0_14_3(key: str) -> None:
    data = zero() | {"timers": {"throughput": {key: False}}}
    assert fields(read(data, "0.14.3"))["zero.throughput_timer"] is False
    assert "zero.throughput_timer" not in fields(read(data, "0.14.2"))


def test_what_older_versions_took() -> None:
    """bf16 and fp16 were not checked before 0.17, and the removed sections worked until 0.19.6 or 0.19.7."""
    data = {"train_batch_size": 8, "bf16": {"enabled": True, "loss_scale": 0}, "elasticity": {"enabled": False}}
    reading = read(data, "0.16.9")
    assert fields(reading)["precision"] == "bf16"
    with pytest.raises(NotModeled, match="elastic training"):
        read(data | {"elasticity": {"enabled": True}}, "0.16.9")
    assert fields(read({"train_batch_size": 8}, "0.19.2"))["grad_clip"] == 0.0
    assert fields(read({"train_batch_size": 8}))["grad_clip"] == 1.0
    with pytest.raises(InputError, match="is not a version"):
        read(data, "latest")


def test_offload_in_the_wrong_stage_has_no_effect() -> None:
    reading = read(zero(stage=2, offload_param={"device": "cpu", "pin_memory": True}))
    assert not any("offload_param" in name for name in fields(reading))
    assert any("offload_param has no effect in stage 2" in note for note in reading.notes)


def test_auto() -> None:
    """What the Trainer fills is left open, any other auto is dropped and DeepSpeed's default stands."""
    reading = read(
        {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "sub_group_size": "auto"},
        }
    )
    assert fields(reading) == {"framework.name": "deepspeed", "zero.stage": 2, "zero.reduce_bucket_size": "auto"}
    open_ = {what.split(" ")[0] for what in reading.missing}
    assert open_ == {"micro_batch", "grad_accum", "grad_clip", "precision", "model", "cluster", "seq_len"}
    assert any("sub_group_size: auto is DeepSpeed's default, 1000000000" in note for note in reading.notes)


@pytest.mark.parametrize(
    ("params", "kind"), [({}, "adamw"), ({"adam_w_mode": False}, "adam"), ({"adam_w_mode": True}, "adamw")]
)
def test_adam_means_adamw(params: dict[str, Any], kind: str) -> None:
    reading = read({"train_batch_size": 8, "optimizer": {"type": "Adam", "params": params}})
    assert fields(reading)["optimizer.name"] == kind


def test_zero_as_a_switch() -> None:
    assert fields(read({"train_batch_size": 8, "zero_optimization": True}))["zero.stage"] == 1
    assert fields(read({"train_batch_size": 8, "zero_optimization": False}))["zero.stage"] == 0


@pytest.mark.parametrize(("params", "kept"), [({"lr": 0.1}, False), ({"lr": 0.1, "momentum": 0.9}, True)])
def test_sgd_keeps_a_momentum_where_it_has_one(params: dict[str, Any], kept: bool) -> None:
    reading = read({"optimizer": {"type": "SGD", "params": params}})
    assert fields(reading)["optimizer.momentum"] is kept


def test_the_trainer_makes_two_groups_where_the_file_names_no_optimizer(tmp_path: Path) -> None:
    """In a scenario that names the file, and in the Trainer's own arguments; not where the file or the user says."""
    from zsim.plan import detect
    from zsim.scenario.load import load

    folder = Path(__file__).parents[2]
    text = f"model: {{params: 1e9}}\ncluster: {folder}/topologies/hgx_h100_8.yaml\nframework: deepspeed\nseq_len: 512\n"
    scenario, config = tmp_path / "s.yaml", tmp_path / "ds.json"
    scenario.write_text(f"{text}deepspeed_config: ds.json\n")
    for optimizer, groups in (("", True), (', "optimizer": {"type": "AdamW"}', False)):
        config.write_text(f'{{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {{"stage": 2}}{optimizer}}}')
        loaded = load(scenario)
        assert loaded.resolve().plan.optimizer.decay_groups is groups
        assert any("two parameter groups" in note for note in loaded.notes) is groups
    config.write_text(
        '{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}'
    )
    assert not load(scenario, ["optimizer.decay_groups=false"]).resolve().plan.optimizer.decay_groups
    arguments = tmp_path / "arguments.json"
    arguments.write_text('{"per_device_train_batch_size": 1, "output_dir": "x", "bf16": true, "deepspeed": "ds.json"}')
    found = detect.parse(arguments)
    assert detect.read(found, detect.identify(found)).fields["optimizer", "decay_groups"] is True


def test_low_precision_master_weights_under_offload() -> None:
    data: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
    data["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    data["bf16"] = {"enabled": True, "bf16_master_weights_and_grads": True}

    def states(**sections: Any) -> Any:
        reading = read_document(Document("ds.json", data | sections))
        assert reading.fields["zero", "bf16_master_weights_and_grads"] is True
        return reading.fields.get(("zero", "bf16_optimizer_states"))

    assert states() is None
    own = {"type": "AdamW", "params": {"fp32_optimizer_states": False}}
    assert states(optimizer=own) is True
    both = data | {"bf16": data["bf16"] | {"bf16_optimizer_states": True}}
    assert any("fp32_optimizer_states=False" in note for note in read_document(Document("ds.json", both)).notes)
    with pytest.raises(NotModeled, match="in bf16 on the CPU before"):
        read_document(Document("ds.json", data | {"optimizer": own}), "0.18.9")


def test_releases_before_low_precision_master_weights() -> None:
    """config.py passed unknown keys of the section over until 0.17.0, precision_config.py stops on them."""
    data = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
    old = read_document(Document("ds.json", data), "0.16.9")
    assert ("zero", "bf16_master_weights_and_grads") not in old.fields
    assert any("bf16_master_weights_and_grads (of DeepSpeed 0.18.3" in text for text in old.without_effect)
    with pytest.raises(InputError, match="stops on it here"):
        read_document(Document("ds.json", data), "0.17.5")


def test_keys_of_a_section_that_stand_outside_of_it_and_numbers_as_text() -> None:
    optimizer = {"type": "AdamW", "params": {"lr": "1e-4", "eps": "1e-8"}}
    reading = read(zero() | {"overlap_comm": True, "offload_optimizer": {"device": "cpu"}, "optimizer": optimizer})
    assert "DeepSpeed does not know overlap_comm and ignores it; did you mean zero_optimization.overlap_comm?" in (
        reading.notes
    )
    assert any("did you mean zero_optimization.offload_optimizer?" in note for note in reading.notes)
    assert ("zero", "overlap_comm") not in reading.fields


@pytest.mark.parametrize(("value", "impl"), [("torch_impl", "foreach"), (True, "foreach"), (False, None), ("", None)])
def test_torch_adam_is_whatever_python_takes_for_true(value: Any, impl: str | None) -> None:
    """engine.py, _configure_basic_optimizer: `if torch_adam`, which nothing checks before."""
    optimizer = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": value}}
    data = {"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer}
    fields = read_document(Document("ds.json", data)).fields
    assert fields.get(("optimizer", "impl")) == impl
