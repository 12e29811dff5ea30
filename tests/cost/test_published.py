"""Published runs: reading rows, the setups they describe, predicting and scoring them, fitting constants to them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from zsim.cost import profile as profiles
from zsim.cost.profile import load_profile
from zsim.errors import InputError, NotModeled
from zsim.plan.spec import DdpPlan, DeepSpeedPlan, Fsdp1Plan, Fsdp2Plan
from zsim.validation import stated
from zsim.validation.calibrate import KNOBS, Knob, errors, fit, unfitted, with_values, without_device
from zsim.validation.evidence import setup_of
from zsim.validation.fit_cases import cases, extrapolate, micro_steps
from zsim.validation.published import Score, predict, text, to_dict
from zsim.validation.published_report import kendall
from zsim.validation.rows import REQUIRED, Row, read_folder, read_rows, split_of

FOLDER = Path(__file__).parents[2] / "validation" / "published"


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return {row.id: row for row in read_folder(FOLDER)}


@pytest.fixture
def row(rows) -> Row:
    """A small one: MPT-125M on 8 A100."""
    return rows["lf-a10040gb-125m-s2048-n8-214"]


def changed(row: Row, **cells: str | None) -> Row:
    return Row(row.file, row.line, {key: text for key, text in {**row.cells, **cells}.items() if text is not None})


def test_marks_follow_the_rule(rows):
    assert all(row.get("split") == split_of(row) for row in rows.values())
    kinds = [row.split for row in rows.values()]
    assert min(kinds.count("fit"), kinds.count("test")) > 100


def test_scales_and_versions_of_one_setup_are_on_one_side(rows):
    sides: dict[tuple[str, ...], set[str]] = {}
    for row in rows.values():
        key = row.source, row["model"], row["gpu"], row.get("seq_len")
        sides.setdefault(key, set()).add(row.split)
    assert {len(side) for side in sides.values()} == {1}


def test_step_time_from_tokens_per_second(row):
    # 26 x 3 x 2048 tokens
    assert row.step_s == pytest.approx(26 * 3 * 2048 / float(row["tokens_per_s_per_gpu"]))
    assert changed(row, step_time_s="2.5").step_s == 2.5


@pytest.mark.parametrize(
    ("cells", "kind", "what"),
    [
        ({"precision": "fp8 linear"}, NotModeled, "float8"),
        ({"notes": "FLAG: uses TP. FSDP 32 x TP 8"}, NotModeled, "parallelism"),
        ({"precision": "bf16 LoRA"}, NotModeled, "adapters"),
        ({"framework": "LLMQ (own C++/CUDA engine)"}, NotModeled, "programs of LLMQ"),
        ({"strategy": "zero9"}, NotModeled, "zero9"),
        ({"gpu": "TPU v4"}, InputError, "TPU v4"),
        ({"micro_batch": None}, InputError, "micro_batch"),
        ({"micro_batch": "two"}, InputError, "two"),
        ({"seq_len": "0"}, InputError, "seq_len"),
        ({"activation_checkpoint": None}, InputError, "activation_checkpoint"),
        ({"n_gpus": "12"}, InputError, "whole nodes"),
    ],
)
def test_refused_with_the_reason(row, cells, kind, what):
    with pytest.raises(kind) as caught:
        setup_of(changed(row, **cells))
    assert what in str(caught.value)
    assert row.file in str(caught.value)


def test_setups_say_what_the_rows_say(rows):
    foundry = setup_of(rows["lf-a10040gb-125m-s2048-n8-214"])
    assert isinstance(foundry.plan, Fsdp1Plan)
    assert (foundry.plan.reduce_dtype, foundry.plan.backward_prefetch) == ("bfloat16", "BACKWARD_POST")
    assert setup_of(rows["lf-a10080gb-7b-s2048-n8-96"]).model.numel == 6_658_859_008  # the source's own count
    titan = setup_of(rows["tt-h100-202412-8b-n128-compile"])
    assert isinstance(titan.plan, Fsdp2Plan)
    assert (titan.plan.grouping, titan.workload.compile, titan.cluster.world_size) == ("titan2024", True, 128)
    zero = setup_of(rows["gist-a800-8"])
    assert isinstance(zero.plan, DeepSpeedPlan)
    assert (zero.plan.stage, zero.plan.offload_param, zero.plan.grad_accum) == (3, "cpu", 2)


@pytest.mark.parametrize(
    ("gpu", "linked"),
    [
        ("H200", True),
        ("H20-SXM", True),
        ("GB300", True),
        ("MI300X", True),
        ("RTX A6000", False),
        ("A100 80GB PCIe", False),
        ("H100 NVL", False),
    ],
)
def test_devices_in_nodes_of_linked_gpus(row, gpu, linked):
    """Named as sources name them."""
    links = setup_of(changed(row, gpu=gpu)).cluster.links.values()
    assert any(link.kind == "nvlink" for link in links) == linked


def test_what_llama_factory_sets_for_deepspeed(rows):
    """Its ds_z3_offload.json (GitHub IST-DASLab/llmq, benchmarks/4x4090), auto as the Trainer has it."""
    plan = setup_of(rows["llmq-lf-4x4090-14b"]).plan
    assert isinstance(plan, DeepSpeedPlan)
    assert (plan.reduce_bucket_size, plan.stage3_prefetch_bucket_size) == (5120**2, 23_592_960)
    assert (plan.stage3_param_persistence_threshold, plan.grad_clip, plan.omp_num_threads) == (51_200, 1.0, 1)
    assert plan.offload_optimizer_pin_memory
    assert plan.offload_param_pin_memory
    # the last release that it took then, which does not know its file's bf16_master_weights_and_grads; its launcher's
    assert "bf16_master_weights_and_grads" in rows["llmq-lf-4x4090-14b"]["precision"]
    assert (plan.version, plan.bf16_master_weights_and_grads) == ("0.16.9", False)
    assert plan.allocator.expandable_segments
    for name in ("llmq-lf-1x4090-1.5b", "llmq-lf-4x4090-1.5b"):  # pure_bf16, without DeepSpeed
        pure = setup_of(rows[name]).plan
        assert isinstance(pure, DdpPlan)
        assert (pure.dtype, pure.autocast) == ("bfloat16", None)


@pytest.mark.parametrize(
    ("precision", "offloads", "expected"),
    [
        ("bf16, fp32 master and Adam states", False, {}),
        ("bf16 (bf16_master_weights_and_grads)", False, (True, True)),  # DeepSpeed has no other on GPUs
        ("bf16 (bf16_master_weights_and_grads)", True, (True, False)),
        ("bf16 (bf16_master_weights_and_grads, bf16_optimizer_states)", True, (True, True)),
        ("bf16, bf16 master weights and Adam states", True, (True, True)),
    ],
)
def test_master_weights_as_a_row_states_them(precision, offloads, expected):
    fields = stated.master_weights(Row("rows.csv", 2, {"precision": precision}), "0.19.8", offloads)
    assert tuple(fields.values()) == tuple(expected)
    assert stated.master_weights(Row("rows.csv", 2, {"precision": precision}), "0.16.9", offloads) == {}


def test_a_loop_of_ones_own_runs_deepspeed_as_its_version_was(rows):
    plan = setup_of(rows["gist-a800-7"]).plan
    assert isinstance(plan, DeepSpeedPlan)
    assert plan.version == "0.14.2"
    assert (plan.memory_efficient_linear, plan.offload_optimizer_pin_memory) == (False, False)
    newer = changed(rows["gist-a800-7"], framework="DeepSpeed 0.19.5, torch 2.9")
    assert setup_of(newer).plan == dataclasses.replace(
        plan, version="0.19.5", memory_efficient_linear=True, offload_optimizer_pin_memory=True,
        offload_param_pin_memory=True,
    )  # fmt: skip


def test_layers_checkpointed_by_share(rows):
    """Every second layer, where the source says so."""
    tree = setup_of(rows["tt-a100-l2-13b-sel-layer"]).tree
    blocks = [module for module in tree.body if getattr(module, "role", "") == "block"]
    assert len(blocks) == 40
    assert sum(block.checkpointed for block in blocks) == 20


def test_old_torch_recomputes_blocks_to_their_end(rows):
    row = rows["lf-v2307-a10080gb-7b-s512-n8-31"]
    assert row["activation_checkpoint"] == "full"

    def recomputed(setup):
        block = next(module for module in setup.tree.body if getattr(module, "role", "") == "block")
        works = [item for child in block.body for item in (getattr(child, "body", None) or (child,))]
        flat = [w for item in works for w in (getattr(item, "body", None) or (item,))]
        return sum(kernel.flops for work in flat for kernel in work.recompute), sum(
            kernel.flops for work in flat for kernel in work.forward
        )

    old, forward = recomputed(setup_of(row))
    new, _ = recomputed(setup_of(changed(row, precision="bf16 (amp_bf16, DEFAULT)")))
    assert old == forward
    assert new == pytest.approx(forward * (1 - 8 / 24), rel=0.03)  # without the down projection


def test_micro_steps_repeat_exactly(rows):
    """What lets a step of many micro-steps be told from steps of two and three."""
    setup = setup_of(changed(rows["lf-a10040gb-125m-s2048-n8-214"], grad_accum="6", micro_batch="2"))
    profile = load_profile("A100-SXM-40GB", "composer-2023")

    def seconds(part):
        [case] = cases([changed(rows["lf-a10040gb-125m-s2048-n8-214"], grad_accum=str(part), micro_batch="2")])
        return dataclasses.replace(case, setup=dataclasses.replace(case.setup, plan=case.runs[-1][0].plan)).simulate(
            profile
        )[0]

    two, three = seconds(2), seconds(3)
    assert [part.plan.grad_accum for part in micro_steps(setup)] == [2, 3]
    told = extrapolate(setup, [two, three])
    from zsim.cluster.classes import rank_classes
    from zsim.cost.price import Price
    from zsim.engine.simulator import run
    from zsim.program.lower import lower

    timeline = run(
        lower(setup.model, setup.tree, setup.plan, setup.workload),
        rank_classes(setup.cluster),
        Price(setup.cluster, profile, setup.plan.omp_num_threads),
    )
    steady = timeline.steps[timeline.steady_step]
    assert told == pytest.approx(steady.end_s - steady.start_s, rel=1e-6)


def test_predictions_and_their_scores(rows):
    names = ["lf-a10040gb-125m-s2048-n8-214", "lf-h10080gb-1b-s2048-n512-16", "tt-pr165-fsdp2-sac"]
    found = [predict(rows[name]) for name in names]
    found.append(predict(changed(rows[names[0]], precision="fp8")))
    assert [p.refused for p in found[:3]] == ["", "", ""]
    assert all(abs(p.error) < 15 for p in found[:3])
    assert abs(found[2].memory_error("reserved")) < 15
    assert "float8" in found[3].refused
    report = text(found)
    assert "predicted 3 of 4 rows" in report
    data = json.loads(json.dumps(to_dict(found)))
    assert data["all"]["rows"] == 3
    assert data["coverage"] == {"rows": 4, "refused": 1}


def test_score():
    score = Score.of([1.0, -3.0, None, 12.0])
    assert score == Score(rows=3, mape=16 / 3, median=3.0, worst=12.0, bias=10 / 3, beyond_10=1)
    assert Score.of([None]) is None


def test_kendall():
    assert kendall([(1, 10), (2, 20), (3, 30)]) == 1
    assert kendall([(1, 30), (2, 20), (3, 10)]) == -1
    assert kendall([(1, 30), (1.001, 20)]) is None  # a tie


def test_unreadable_files(tmp_path):
    (tmp_path / "a.csv").write_text("id,source,model\n1,2,3\n")
    with pytest.raises(InputError, match=r"missing columns: .*strategy"):
        read_rows(tmp_path / "a.csv")
    with pytest.raises(InputError, match="cannot be read"):
        read_rows(tmp_path / "none.csv")
    with pytest.raises(InputError, match="no such folder"):
        read_folder(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no CSV"):
        read_folder(tmp_path / "empty")
    (tmp_path / "b.csv").write_text(",".join(REQUIRED) + "\n")
    assert read_rows(tmp_path / "b.csv") == []


def test_fit_finds_the_constants_that_made_the_times(rows):
    """Steps simulated under other constants: the fit must come back to them."""
    names = ["lf-a10040gb-125m-s2048-n8-214", "lf-a10040gb-760m-s4096-n8-187", "lf-a10040gb-350m-s8192-n8-203"]
    known = cases([rows[name] for name in names if name in rows])
    assert len(known) >= 2
    knobs = [
        Knob("a100-sxm-80gb", "gemm.efficiency", 0.5, 0.87),
        Knob("generic", "memory_efficiency.default", 0.5, 0.95),
    ]
    truth = dict(zip(knobs, (0.71, 0.62), strict=True))
    made = with_values(unfitted, truth)
    real = [dataclasses.replace(case, measured_s=case.simulate(case.profile(made))[0]) for case in known]
    found = fit(real, knobs, rounds=2)
    assert [found[knob] for knob in knobs] == pytest.approx([0.71, 0.62], rel=0.01)
    assert max(map(abs, errors(real, with_values(unfitted, found)).values())) < 0.3


def test_fit_repeats_to_the_digit(rows):
    """From the rows on, twice: nothing in it depends on time, order of sets or chance."""
    names = ["lf-a10040gb-125m-s2048-n8-214"]
    knobs = [Knob("a100-sxm-80gb", "gemm.efficiency", 0.5, 0.87), Knob("generic", "collective_slowdown", 1.05, 1.8)]
    first, second = (fit(cases([rows[name] for name in names]), knobs, rounds=1) for _ in range(2))
    assert first == second


def test_fitted_values_act_on_every_device_that_builds_on_them():
    knob = next(knob for knob in KNOBS if knob.document == "a100-sxm-80gb" and knob.path == "gemm.efficiency")
    read = with_values(unfitted, {knob: 0.5})
    assert profiles.build("A800-SXM-80GB", "default", read).gemm.efficiency == 0.5
    assert profiles.build("H100-SXM", "default", read).gemm.efficiency != 0.5
    left = without_device("a100-sxm-80gb")
    assert profiles.build("A100-SXM-40GB", "default", left).gemm.efficiency == load_profile("generic").gemm.efficiency


def test_profiles_within_physical_bounds():
    for knob in KNOBS:
        value = profiles.document(knob.document, profiles.read)
        for part in knob.path.split("."):
            value = value[part]
        assert knob.low < value < knob.high, knob


def test_unknown_stack_is_refused():
    with pytest.raises(InputError, match="unknown software stack 'tensorflow'"):
        load_profile("A100-SXM-80GB", "tensorflow")


TINY = {"micro_batch": "1", "seq_len": "64", "d_model": "256", "n_heads": "4", "d_ff": "1024", "vocab": "1000"}


@pytest.mark.parametrize(
    ("name", "cells", "group", "word"),
    [
        # 64 tokens on one GPU through 12 layers of width 256: kernels of microseconds, issued in more
        ("lf-a10040gb-125m-s2048-n8-214", {**TINY, "n_gpus": "1", "precision": "pure bf16"}, "host", "host"),
        ("lf-a10040gb-125m-s2048-n8-214", {"micro_batch": "1", "seq_len": "131072"}, "compute", "attention"),
        (
            "fms-2024-02-7b-a100",
            {"inter_node_network": "10 Gbps", "strategy": "fsdp-full", "micro_batch": "1"},
            "communication",
            "",
        ),
    ],
)
def test_edges_name_the_right_bottleneck(rows, name, cells, group, word):
    from zsim.api import simulate

    found = simulate(setup_of(changed(rows[name], **cells))).bottleneck
    assert group in found.group.lower(), found
    assert word in f"{found.group} {found.name}".lower(), found
