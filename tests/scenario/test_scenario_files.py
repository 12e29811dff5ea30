"""Reading scenario files: what is accepted, and what every error says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zsim.errors import InputError
from zsim.scenario import json_schema, load

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
SCENARIOS = sorted((ROOT / "scenarios").glob("*.yaml"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_shipped_scenarios_load(path: Path) -> None:
    scenario = load(path)
    assert scenario.fields.name
    assert scenario.folder == path.parent


def test_short_and_long_forms_mean_the_same(write) -> None:
    short = load(write("zero: {stage: 2, offload_optimizer: cpu}\n")).fields
    long = load(
        write(
            "zero: {stage: 2, offload_optimizer: {device: cpu}}\noptimizer: {name: adamw}\n",
            framework="{name: deepspeed}",
        )
    ).fields
    assert short == long.model_copy(update={"optimizer": short.optimizer})
    assert short.optimizer.name == long.optimizer.name


def test_numbers_as_people_write_them(write) -> None:
    zero = load(write("zero: {stage: 3, reduce_bucket_size: 5e8, stage3_prefetch_bucket_size: 50M}\n")).fields.zero
    assert zero is not None
    assert zero.reduce_bucket_size == 500_000_000
    assert zero.stage3_prefetch_bucket_size == 50_000_000


# what is written, the line it stands on, the field, what the message holds, what is accepted
BAD = [
    ("microbatch: 3\n", 6, "microbatch", "did you mean micro_batch?", "micro_batch"),
    ("zero: {stage: 4}\n", 6, "zero.stage", "4 is not known", "0, 1, 2 or 3"),
    ("zero:\n  stage: 3\n  overlap_com: true\n", 8, "zero.overlap_com", "did you mean overlap_comm?", "overlap_comm"),
    ("zero:\n  stage: 3\n  reduce_bucket_size: 5 GB\n", 8, "zero.reduce_bucket_size", "unit 'GB'", "5e8"),
    ("zero:\n  stage: 3\n  reduce_bucket_size: 0\n", 8, "zero.reduce_bucket_size", "0 is out of range", "1 to"),
    ("zero: {stage: 2, offload_optimizer: gpu}\n", 6, "zero.offload_optimizer", "'gpu' is not known", "cpu"),
    (
        "zero: {stage: 2, offload_optimizer: {devic: cpu}}\n",
        6,
        "zero.offload_optimizer.devic",
        "mean device?",
        "device",
    ),
    (
        "zero: {stage: 3, ignore_unused_parameters: true}\n",
        6,
        "zero.ignore_unused_parameters",
        "has no effect on",
        None,
    ),
    (
        "zero: {stage: 3, legacy_stage1: true}\n",
        6,
        "zero.legacy_stage1",
        "the old stage 1",
        None,
    ),
    ("zero: 3\n", 6, "zero", "3 is not a section", "stage"),
    (
        "zero: {stage: 2, overlap_comm: maybe}\n",
        6,
        "zero.overlap_comm",
        "'maybe' is not true or false",
        "true or false",
    ),
    ("grad_accum: -2\n", 6, "grad_accum", "-2 is out of range", "1 to 10,000"),
    ("grad_accum: .nan\n", 6, "grad_accum", "not a finite count", "5e8"),
    ("grad_accum: 1.5\n", 6, "grad_accum", "not a whole number", "5e8"),
    ("grad_clip: .inf\n", 6, "grad_clip", "inf is not a finite number", "number"),
    ("grad_clip: -1\n", 6, "grad_clip", "-1 is out of range", "greater than or equal to 0"),
    ("precision: fp8\n", 6, "precision", "'fp8' is not known", "bf16"),
    ("checkpointing: true\n", 6, "checkpointing", "True is not known", "none, full or selective"),
    ("attention: flsh\n", 6, "attention", "did you mean flash?", "flash"),
    ("optimizer: adamW2\n", 6, "optimizer", "'adamW2' is not known", "adamw"),
    ("fsdp: {mesh: [2, 4]}\n", 6, "fsdp", "belongs to framework fsdp2 or fsdp1", "zero"),
    ("compile: 2024-01-01\n", 6, "compile", "is not true or false", "true or false"),
    (
        "checkpointing: {offload: disk}\n",
        6,
        "checkpointing.offload",
        "'disk' is not true, false, stream",
        "true, false, stream",
    ),
    ("profile: [a]\n", 6, "profile", "is not text", None),
    ("seq_len: 5\n", 6, "seq_len", "stands here twice", None),
    ("name: [unclosed\n", 7, None, "not YAML", None),
    ("name: !!python/name:os.system x\n", 6, "name", "not plain YAML", None),
]


@pytest.mark.parametrize(
    ("text", "line", "field", "says", "accepted"), BAD, ids=[str(case[2]) + case[0][:18] for case in BAD]
)
def test_errors_point_at_the_line(write, text: str, line: int, field: str, says: str, accepted: str | None) -> None:
    path = write(text)
    with pytest.raises(InputError) as refused:
        load(path)
    error = refused.value
    assert (error.file, error.line, error.field) == (path, line, field)
    assert says in error.message
    assert accepted is None or accepted in (error.accepted or "")
    assert str(error).startswith(f"{path}:{line}: ")


def test_a_missing_field_is_named(write) -> None:
    with pytest.raises(InputError, match="seq_len: is missing") as refused:
        load(write(seq_len=""))
    assert "tokens per sequence" in (refused.value.accepted or "")


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "qwen.yaml").write_text("a: 1\n")
    with pytest.raises(InputError, match="no such scenario") as refused:
        load(tmp_path / "qwem.yaml")
    assert "qwen.yaml" in refused.value.notes[0]


@pytest.mark.parametrize(
    ("content", "says"), [(b"", "holds no fields"), (b"- 1\n", "holds no fields"), (b"\xff\xfe\x00", "cannot be read")]
)
def test_unreadable_files(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=says) as refused:
        load(path)
    assert refused.value.file == path


def test_anchors_and_merge_keys(write) -> None:
    text = "zero: &zero {stage: 2}\n"
    assert load(write(text)).fields.zero.stage == 2  # type: ignore[union-attr]
    with pytest.raises(InputError, match="contains itself"):
        load(write("zero: &a {stage: *a}\n"))


def test_overrides(write) -> None:
    path = write("zero: {stage: 3}\n")
    fields = load(
        path, ["zero.stage=2", "zero.offload_optimizer.device=cpu", "micro_batch=4", "model.freeze=[a.*]"]
    ).fields
    assert fields.zero is not None
    assert fields.zero.offload_optimizer is not None
    assert (fields.zero.stage, fields.zero.offload_optimizer.device, fields.micro_batch) == (2, "cpu", 4)
    assert fields.model.config  # the plain value kept its meaning
    assert fields.model.freeze == ["a.*"]


def test_text_on_the_command_line_needs_no_quotes(write) -> None:
    """The shell takes them: --set framework.version='2.10' arrives as a number that YAML makes 2.1."""
    fields = load(write(framework="fsdp2"), ["framework.version=2.10", "framework.transformers='4.50'"]).fields
    assert (fields.framework.version, fields.framework.transformers) == ("2.10", "4.50")


def test_an_override_of_another_framework(write) -> None:
    path = write("zero: {stage: 3}\n")
    with pytest.raises(InputError, match="belongs to framework deepspeed") as refused:
        load(path, ["framework=ddp"])
    assert refused.value.notes == ("--set zero=null leaves it out",)
    assert load(path, ["framework=ddp", "zero=null"]).fields.framework.name == "ddp"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("zero.stage=5", "zero.stage: 5 is not known"),
        ("stage", "is not field=value"),
        ("=3", "is not field=value"),
        ("seq_len.x=1", "seq_len: is a plain value"),
        ("name=[1", "not YAML"),
        ("micro_batch=zero", "is not a count"),
    ],
)
def test_a_bad_override_is_named(write, override: str, says: str) -> None:
    with pytest.raises(InputError) as refused:
        load(write("zero: {stage: 3}\n"), [override])
    assert str(refused.value).startswith(f"--set {override}: ")
    assert says in str(refused.value)


def test_a_deepspeed_file_and_the_scenario_are_one(write) -> None:
    path = write("", framework="", micro_batch="", deepspeed_config=str(DATA / "ds_config/commented_stage3.json"))
    scenario = load(path)
    fields = scenario.fields
    assert fields.framework.name == "deepspeed"
    assert fields.zero is not None
    assert (fields.zero.stage, fields.zero.reduce_bucket_size, fields.zero.stage3_max_live_parameters) == (
        3,
        "auto",
        10**9,
    )
    assert (fields.precision, fields.train_batch_size, fields.micro_batch, fields.grad_clip) == ("bf16", 64, 2, 0.5)
    assert DATA / "ds_config/commented_stage3.json" in scenario.sources


def test_what_a_deepspeed_file_leaves_to_the_trainer_is_said(write, tmp_path: Path) -> None:
    config = tmp_path / "auto.json"
    config.write_text(
        '{"gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "bf16": {"enabled": "auto"},'
        ' "zero_optimization": {"stage": 2}}'
    )
    scenario = load(write("", framework="", deepspeed_config=str(config)))
    said = [note for note in scenario.notes if ": auto is" in note]
    assert [note.partition(" unless")[0] for note in said] == [
        "precision: auto is bf16", "grad_accum: auto is 1", "grad_clip: auto is 1.0",
    ]  # fmt: skip
    assert (scenario.fields.precision, scenario.fields.grad_clip) == ("bf16", 1.0)
    chosen = load(write("grad_clip: 0.5\ngrad_accum: 2\nprecision: fp16\n", framework="", deepspeed_config=str(config)))
    assert not [note for note in chosen.notes if ": auto is" in note]


def test_contradictions_are_refused_unless_set_on_the_command_line(write) -> None:
    config = str(DATA / "ds_config/commented_stage3.json")
    path = write("precision: fp16\n", micro_batch="", deepspeed_config=config)
    with pytest.raises(InputError, match=r"commented_stage3\.json:5 says bf16") as refused:
        load(path)
    assert (refused.value.line, refused.value.field) == (6, "precision")
    scenario = load(path, ["precision=fp16", "zero.stage=2"])
    assert (scenario.fields.precision, scenario.fields.zero.stage) == ("fp16", 2)  # type: ignore[union-attr]
    assert any("zero.stage: 2 on the command line" in note for note in scenario.notes)


def test_a_deepspeed_file_that_is_not_there(write) -> None:
    with pytest.raises(InputError, match="deepspeed_config: no such file"):
        load(write(deepspeed_config="nowhere.json"))


def test_the_schema_knows_every_field() -> None:
    schema = json_schema()
    assert json.loads(json.dumps(schema)) == schema
    assert {"model", "cluster", "framework", "zero", "fsdp", "ddp", "micro_batch"} <= schema["properties"].keys()
    assert "stage3_prefetch_bucket_size" in schema["$defs"]["ZeroField"]["properties"]
    forms = schema["$defs"]["FrameworkField"]["anyOf"]
    assert forms[0]["enum"] == ["deepspeed", "fsdp2", "fsdp1", "ddp"]
