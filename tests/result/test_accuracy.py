"""What the report says of its own error: whose runs stand behind it, and how far they are from this one."""

import dataclasses
import json
from pathlib import Path

import pytest
import yaml

import zsim
from tests.model.relative_counts import MODELS as relatives
from tests.model.test_hybrids import MODELS as hybrids
from tests.model.test_linear_attention import MODELS as linear
from tests.model.test_seq2seq import COUNTS as seq2seq
from zsim.api import simulate
from zsim.cost.profile import Evidence, load_profile
from zsim.errors import InputError
from zsim.model.huggingface import from_config
from zsim.result.accuracy import accuracy, unmeasured, waits_for_host
from zsim.result.reported import NEVER_SEEN
from zsim.validation.calibrate import float8_evidence
from zsim.validation.evidence import setup_of
from zsim.validation.fit_cases import cases
from zsim.validation.printed_error import section
from zsim.validation.report import ROUNDS
from zsim.validation.rows import read_folder

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "validation" / "published"


def config(name: str) -> dict:
    return json.loads((ROOT / "scenarios" / "models" / name / "config.json").read_text())


TITAN = Evidence("torchtitan", 11.0, 3.0, 1, 8, 8, "H100-SXM", "torchtitan (FSDP2)")
FOUNDRY = Evidence("llm-foundry", 2.0, 0.5, 20, 8, 64, "H100-SXM", "Composer (PyTorch FSDP1)")
OTHERS = Evidence("GPUs of which no run was fitted", 9.5, -5.0, 248, 1, 512)
UNSEEN = NEVER_SEEN.mape


def said(*evidence, gpus=8, framework="fsdp2", on_cpu=False, adapters=False, tokens=4096):
    profile = dataclasses.replace(load_profile("H100-SXM"), evidence=evidence)
    return accuracy(profile, gpus, framework, on_cpu, adapters, tokens)


def percent(of):
    return pytest.approx(of / 100)


def test_a_source_counts_beside_those_never_seen():
    assert said(TITAN).step_time_error == percent((11.0 + 4 * UNSEEN) / 5)
    assert said().step_time_error == percent(UNSEEN)
    assert said().evidence.startswith(f"nothing measured on this device stands behind the times; {UNSEEN:.0f}% on")


def test_runs_of_the_same_framework_come_first():
    assert said(FOUNDRY, TITAN).evidence.startswith("11% on 1 run with FSDP2 on H100-SXM (8 GPUs, by torchtitan); ")
    own = said(FOUNDRY, TITAN, gpus=512, framework="fsdp1")
    text = "2% on 20 runs with FSDP1 on H100-SXM (8 to 64 GPUs, by llm-foundry), and this is on 512; "
    assert own.evidence.startswith(text)
    assert own.step_time_error == percent((2.0 + 4 * UNSEEN) / 5)


def test_all_that_is_near_counts_together():
    other = Evidence("litgpt", 12.0, -4.0, 5, 8, 16, "H100-SXM", "litgpt (FSDP1)")
    both = said(FOUNDRY, other, TITAN, framework="fsdp1")
    assert both.step_time_error == percent((2 * (2.0 * 20 + 12.0 * 5) / 25 + 4 * UNSEEN) / 6)
    assert "4% on 25 runs with FSDP1 on H100-SXM (8 to 64 GPUs, by llm-foundry and 1 more source)" in both.evidence


def test_a_source_counts_once():
    again = dataclasses.replace(FOUNDRY, framework="Composer (PyTorch FSDP1, compiled)")
    assert said(FOUNDRY, again, framework="fsdp1") == dataclasses.replace(
        said(FOUNDRY, framework="fsdp1"), evidence=said(FOUNDRY, again, framework="fsdp1").evidence
    )


def test_borrowed_runs_are_called_so():
    borrowed = said(FOUNDRY, TITAN, framework="deepspeed")
    assert borrowed.step_time_error == percent((2 * (2.0 * 20 + 11.0) / 21 + 4 * UNSEEN) / 6)
    assert ", none with DeepSpeed; " in borrowed.evidence


def test_runs_of_the_gpu_that_this_one_is_like_are_called_so():
    profile = dataclasses.replace(load_profile("H200-SXM"), evidence=(TITAN,))
    assert accuracy(profile, 8, "fsdp2").evidence.startswith(
        "none on H200-SXM itself; 11% on 1 run with FSDP2 on H100-SXM"
    )


def test_an_optimizer_on_the_cpu_is_said_to_be_less_certain():
    assert said(FOUNDRY, on_cpu=True).evidence.endswith("steps up to twice as long as predicted were measured")
    assert "CPU" not in said(FOUNDRY).evidence


def test_a_gpu_that_nobody_measured():
    alone = said(OTHERS).evidence
    assert alone.startswith(
        "no run on this kind of GPU; 10% on 248 runs of GPUs of which no run was fitted, on 1 to 512"
    )


def test_each_shipped_evidence_names_its_framework():
    for device in ("H100-SXM", "A100-SXM-80GB", "RTX 4090", "RTX 3090", "V100-SXM2-32GB", "A40"):
        profile = load_profile(device)
        assert profile.evidence
        for evidence in profile.evidence:
            assert any(evidence.is_of(name) for name in ("deepspeed", "fsdp2", "fsdp1", "ddp")), evidence


def test_what_adapters_have_to_do_with_it_is_said() -> None:
    full = Evidence("TinyLlama", 2.0, 0.5, 4, 1, 8, "H100-SXM", "Trainer (DDP)")
    lora = Evidence("Qwen", 15.0, -10.0, 18, 1, 1, "H100-SXM", "peft (DDP)", adapters=True)
    both = said(full, lora, gpus=4, framework="ddp", adapters=True).evidence
    assert "of adapters" not in both
    assert "(1 to 8 GPUs, by Qwen and 1 more source); " in both
    assert said(lora, gpus=4, framework="ddp").evidence.split("; ")[0].endswith("all of adapters, and this is on 4")
    assert ", none of adapters; " in said(full, gpus=4, framework="ddp", adapters=True).evidence


def test_short_micro_batches_do_not_speak_for_long_ones() -> None:
    """What Python holds up says nothing of a GPU that is busy, and the other way round."""
    short = Evidence("bf16 example", 51.0, -51.0, 2, 4, 4, "H100-SXM", "DeepSpeed", min_tokens=512, max_tokens=512)
    found = said(short, TITAN, framework="deepspeed")
    assert found.step_time_error == percent((2 * (2 * 51.0 + 11.0) / 3 + 4 * UNSEEN) / 6)
    assert "none with DeepSpeed and about 4,096 tokens in a micro-batch" in found.evidence
    alike = said(short, TITAN, framework="deepspeed", tokens=1024)
    assert alike.evidence.startswith("51% on 2 runs with DeepSpeed on H100-SXM (4 GPUs, by bf16 example)")


def test_the_printed_error_is_about_what_sources_never_seen_were_off() -> None:
    """Left out in turn; the draw towards those never seen leaves 11 of 72 more than twice as far off, of 15 without."""
    lines = list(section([PUBLISHED / name for name in ROUNDS.values()]))
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")][1:]
    alone, drawn, _ = ([float(cell.split(" of ")[0]) for cell in row[1:]] for row in rows)
    assert rows[1][0] == "4 sources"
    assert 0.8 < drawn[0] / drawn[1] < 1.2
    assert (drawn[2], alone[2]) == (11, 15)


def test_no_published_run_has_a_kind_of_layer_that_is_called_unmeasured() -> None:
    """One that is published takes its kind off the list."""
    folders, models = {file.parent for file in PUBLISHED.rglob("*.csv")}, {}
    for row in (row for folder in sorted(folders) for row in read_folder(folder)):
        if row["model"] in models:
            continue
        try:
            models[row["model"]] = setup_of(row).model.arch
        except InputError:  # another row of the model may be of what is simulated
            continue
    assert len(models) > 35
    assert {name: kinds for name, arch in models.items() if (kinds := unmeasured(arch))} == {}


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        (hybrids["LFM2-1.2B"], ("short convolutions",)),
        (hybrids["LFM2-8B-A1B"], ("short convolutions", "experts")),
        (hybrids["mamba2-2.7b"], ("state spaces",)),
        (hybrids["Nemotron-Nano-9B-v2"], ("state spaces",)),
        (hybrids["Nemotron-3-Nano-30B-A3B"], ("state spaces", "experts")),
        (hybrids["Granite-4.0-H-Tiny"], ("state spaces", "experts")),
        (hybrids["Granite-4.0-H-Micro"], ("state spaces",)),
        (hybrids["Bamba-9B"], ("state spaces",)),
        (hybrids["Falcon-H1-7B"], ("state spaces",)),
        (linear["Qwen3-Next-80B-A3B"], ("linear attention", "experts")),
        (linear["Qwen3.5-9B (text)"], ("linear attention",)),
        (relatives["Moonlight-16B-A3B"], ("experts", "latent attention")),
        (seq2seq["flan-t5-xl"], ("cross-attention",)),
        ((0, config("qwen2.5-vl-7b")), ("a vision tower",)),
        ((0, config("qwen2.5-7b")), ()),
    ],
)
def test_kinds_of_layers_that_nobody_measured(model: tuple[int, dict], kinds: tuple[str, ...]) -> None:
    assert unmeasured(from_config(model[1], "a model").arch) == kinds


def test_the_error_of_layers_that_nobody_measured_is_unknown(tmp_path: Path) -> None:
    """And never a figure beside a note that no run with them has been measured."""
    (tmp_path / "config.json").write_text(json.dumps(hybrids["mamba2-2.7b"][1] | {"num_hidden_layers": 2}))
    (tmp_path / "one.yaml").write_text(
        f"model: config.json\ncluster: {ROOT}/topologies/hgx_h100_8.yaml\nframework: fsdp2\nmicro_batch: 1\n"
        "seq_len: 256\n"
    )
    result = zsim.simulate(tmp_path / "one.yaml")
    assert any("no run with it has been measured" in text for text in result.assumptions)
    assert result.accuracy.step_time_error is None
    assert result.accuracy.evidence == "no run of validation/published has state spaces"


def test_two_published_steps_of_linear_attention_are_named() -> None:
    profile = load_profile("H100-SXM")
    alone = accuracy(profile, 8, "fsdp2", unmeasured=("linear attention",))
    assert alone.step_time_error is None
    assert alone.evidence.endswith(
        "has linear attention; two published steps of Qwen3.5-9B alone were compared (docs/linear-attention.md)"
    )
    both = accuracy(profile, 8, "fsdp2", unmeasured=("linear attention", "experts"))
    assert both.evidence == "no run of validation/published has linear attention or experts"


def test_the_error_in_float8_is_that_of_the_published_runs() -> None:
    errors = yaml.safe_load((PUBLISHED / "float8" / "blind.yaml").read_text())["errors"]
    low = [case for case in cases(read_folder(PUBLISHED / "float8")) if case.setup.workload.float8]
    found = float8_evidence(low, {row: error["step"] for row, error in errors.items()})
    assert {gpu: (round(each["mape"], 1), each["rows"]) for gpu, each in found.items()} == {
        "H100": (9.8, 7), "H200": (2.5, 2), "MI300X": (32.6, 3), "B200": (42.6, 2)
    }  # fmt: skip
    later = [case for case in cases(read_folder(PUBLISHED / "fourth_holdout")) if case.setup.workload.float8]
    assert len(later) == 9  # on H100
    latest = [case for case in cases(read_folder(PUBLISHED / "sixth_holdout")) if case.setup.workload.float8]
    assert len(latest) == 4  # on H100, too
    newest = [case for case in cases(read_folder(PUBLISHED / "seventh_holdout")) if case.setup.workload.float8]
    assert len(newest) == 1  # on H100, too
    shipped = {device: load_profile(device).float8 for device in ("H100-SXM", "H100-PCIe", "H200-NVL", "H800-SXM")}
    assert [evidence and evidence.rows for evidence in shipped.values()] == [7 + 9 + 4 + 1, 7 + 9 + 4 + 1, 2, None]


def test_float8_is_as_uncertain_as_its_runs() -> None:
    profile = load_profile("MI300X")
    mi300x = accuracy(profile, 8, "fsdp2", float8=True)
    assert mi300x.step_time_error == percent(profile.float8.mape)  # more than in 16 bits
    assert mi300x.evidence.startswith("32% on 3 published runs in float8 on this kind of GPU; in 16 bits ")
    h100 = dataclasses.replace(load_profile("H100-SXM"), evidence=(TITAN,))
    fitted = accuracy(h100, 8, "fsdp2", float8=True)
    assert fitted.step_time_error == said(TITAN).step_time_error
    assert fitted.evidence.startswith("11% on 21 published runs in float8 on this kind of GPU; in 16 bits 11% on 1 run")
    nobody = accuracy(load_profile("RTX 4090"), 8, "fsdp2", float8=True)
    assert nobody.step_time_error is None
    assert nobody.evidence == "no run in float8 on this kind of GPU has been measured"


WAITING = Evidence("steps that wait for a host of unknown speed", 30.0, -29.0, 23, 1, 32)


def test_a_step_that_a_host_of_unknown_speed_holds_up_says_how_far_off_such_ones_were(tmp_path: Path) -> None:
    """The share decides; and not where the host's own pace was measured."""
    profile = dataclasses.replace(load_profile("H100-SXM"), evidence=(FOUNDRY,), held_up=WAITING)
    found = accuracy(profile, 8, "fsdp1", held_up=True)
    assert found.step_time_error == percent(30.0)
    assert found.evidence.endswith(
        "; steps that wait for a host of unknown speed: 30% on 23 runs, 29% too fast on average"
    )
    assert "unknown speed" not in accuracy(profile, 8, "fsdp1").evidence
    time = simulate(ROOT / "scenarios" / "llama31_8b_4xa100_zero3.yaml").time
    assert not waits_for_host(time)
    assert waits_for_host(dataclasses.replace(time, host_s=0.21 * time.step_s))
    assert load_profile("H100-SXM").held_up is not None
    for measured in (False, True):
        own = {"device": "H100-SXM", "base": "default", "values": {}, "host": {"pace": 1.4} if measured else {}}
        (tmp_path / "mine.yaml").write_text(json.dumps(own))
        assert (load_profile("H100-SXM", str(tmp_path / "mine.yaml")).held_up is None) is measured
