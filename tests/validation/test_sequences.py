"""Every committed recording of a real run is predicted call by call, and a rule that is off by little is noticed."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from zsim.cli.app import dispatch
from zsim.errors import InputError
from zsim.program.lower import lower
from zsim.validation import sequences
from zsim.validation.recording import Call, Recording, differences, plan_of, read, setup

FOLDER = Path(__file__).parents[2] / "validation" / "oracles" / "sequences"
RECORDINGS = sorted(FOLDER.glob("*.jsonl.gz"))


def test_there_are_recordings_of_every_engine():
    engines = {path.name.split("_")[0] for path in RECORDINGS}
    assert engines == {"ddp", "ds", "fsdp1", "fsdp2"}
    assert len(RECORDINGS) > 200


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_recorded_collectives_are_predicted(path: Path):
    found = read(path)
    outcome = sequences.compare(found)
    assert outcome.matches, outcome.refused or outcome.difference
    assert outcome.calls > 0 or found.header["world"] == 1  # FSDP2 on one GPU calls nothing


def recording(name: str) -> Recording:
    return read(FOLDER / f"{name}.jsonl.gz")


def predicted(found: Recording, **changes: object) -> list[tuple[Call, ...]]:
    model, tree, workload = setup(found.header)
    plan = replace(plan_of(found.header), **changes)
    program = lower(model, tree, plan, workload, steps=3)
    return [sequences.collectives(program, instructions) for instructions in (program.init, *program.steps)]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ddp_cap1_w2_ga1", {"bucket_cap_mb": 1.35}),
        ("ddp_cap1_w2_ga1", {"static_graph": True}),
        ("ds_z2_small_w2_ga1", {"reduce_bucket_size": 250000}),
        ("ds_z3_regather_w2_ga2", {"stage3_prefetch_bucket_size": 0}),
        ("ds_z3_zeropp_w4_ga1", {"gpus_per_node": 1}),
        ("ds_z3_qwz_w4_ga2", {"zero_quantized_weights": False}),
        ("ds_z3_qnz_frozen_w4_ga2", {"zero_quantized_nontrainable_weights": False}),
        ("ds_z3_leaf_name_w2_ga2", {"leaf_names": ("model.layers.1", "lm_head")}),
        ("ds_z3_coarse_attention_w2_ga1_gpt2", {"stage3_module_granularity_threshold": 87720}),
        ("fsdp2_raf_true_w4_ga1", {"reshard_after_forward": False}),
        ("fsdp2_prefetch2_w2_ga1", {"prefetch": 1}),
        ("fsdp2_hsdp2x2_w4_ga1", {"mesh": (4, 1)}),
        ("fsdp1_full_shard_w2_ga1", {"backward_prefetch": None}),
        ("fsdp1_full_shard_fwdprefetch_w2_ga1", {"forward_prefetch": False}),
    ],
)
def test_another_setting_is_another_sequence(name: str, changes: dict[str, object]):
    found = recording(name)
    assert any(
        differences(ours, theirs) is not None
        for ours, theirs in zip(predicted(found, **changes), found.steps, strict=True)
    )


def first_reduction(calls: tuple[Call, ...]) -> int:
    return next(call.in_numel for call in calls if call.kind == "all_reduce" and call.phase == "backward")


def test_bucket_limits_hold_to_the_byte():
    ddp = recording("ddp_cap1_w2_ga1")
    elements = first_reduction(ddp.steps[3])
    megabytes = elements * 4 / 2**20  # a bucket that reaches its limit exactly is closed
    assert first_reduction(predicted(ddp, bucket_cap_mb=megabytes)[3]) == elements
    assert first_reduction(predicted(ddp, bucket_cap_mb=megabytes + 2**-20)[3]) > elements

    zero2 = recording("ds_z2_small_w2_ga1")
    elements = first_reduction(zero2.steps[3])  # a bucket may be filled exactly, not beyond
    assert first_reduction(predicted(zero2, reduce_bucket_size=elements)[3]) == elements
    assert first_reduction(predicted(zero2, reduce_bucket_size=elements - 1)[3]) < elements


def test_differences_finds_op_size_group_order_and_length():
    call = Call("all_gather", "bfloat16", 8, 16, (0, 1), "forward", 0)
    other = call._replace(in_numel=9)
    assert differences([call, other], [call, other]) is None
    assert differences([call, other], [other, call]) == 0
    assert differences([call], [call, other]) == 1
    assert differences([call._replace(group=(0, 2))], [call]) == 0
    assert differences([call._replace(reduce_op="SUM")], [call]) is None  # the recorder did not see the operation
    assert differences([call._replace(reduce_op="SUM")], [call._replace(reduce_op="AVG")]) == 0


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_command_reports_a_line_per_file_and_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    good = FOLDER / "ddp_default_w2_ga1.jsonl.gz"
    assert dispatch(["validate", "sequences", str(good)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 matched of 1"

    lines = gzip.decompress(good.read_bytes()).decode().splitlines()
    changed = json.loads(lines[2]) | {"in_numel": 139, "out_numel": 139}
    bad = write(tmp_path / "bad.jsonl", *[json.loads(line) for line in lines[:2]], changed)
    assert dispatch(["validate", "sequences", str(good), str(bad), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["matched"], found["of"]) == (1, 2)
    difference = found["files"][1]["difference"]
    assert (difference["step"], difference["index"]) == (0, 1)
    assert (difference["predicted"]["in_numel"], difference["recorded"]["in_numel"]) == (138, 139)


def test_a_setting_without_a_field_is_refused_by_name(tmp_path: Path):
    header = dict(recording("fsdp2_raf_true_w2_ga1").header)
    header["config"] = {**header["config"], "fsdp": {"set_symm_mem_for_comm": True}}
    outcome = sequences.compare(read(write(tmp_path / "x.jsonl", header)))
    assert not outcome.matches
    assert "set_symm_mem_for_comm" in (outcome.refused or "")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not a header"),
        ("{not json\n", "not JSON"),
        ("[1]\n", "not a JSON object"),
        ('{"kind": "header"}\n', "missing"),
    ],
)
def test_unreadable_files_are_input_errors(tmp_path: Path, text: str, says: str):
    path = tmp_path / "broken.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=says):
        read(path)


def test_a_missing_path_is_an_input_error(tmp_path: Path):
    with pytest.raises(InputError, match="no such file"):
        sequences.validate([tmp_path / "nothing.jsonl"])
    with pytest.raises(InputError, match="no recordings"):
        sequences.validate([tmp_path])
