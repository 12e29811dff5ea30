"""The planner's choice is what a simulation of it says, and no simulated neighbour is better."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.api import load_scenario, simulate
from zsim.cli.app import dispatch
from zsim.cluster.classes import rank_classes
from zsim.document import Document, read_yaml
from zsim.engine.cycle import cycle
from zsim.engine.simulator import Simulation
from zsim.errors import InputError
from zsim.plan.spec import DeepSpeedPlan, Fsdp2Plan
from zsim.program.lower import lower
from zsim.sweep import launch, plan_plots, planner
from zsim.sweep.choices import INDISTINGUISHABLE, Choice, Plan, by_cost, by_time
from zsim.sweep.evaluate import evaluate, setup_of
from zsim.sweep.glance import glance, whole_seconds
from zsim.sweep.probe import least_seconds, price_of, probe_memory
from zsim.sweep.space import CHECKPOINTING, Candidate, Machine, Strategy, candidates, keep_what_is_saved, strategies

from .conftest import REPOSITORY
from .test_runs import Inline

H100 = Machine(REPOSITORY / "topologies" / "hgx_h100_8.yaml", None, 8, 8)
PCIE = Machine(REPOSITORY / "topologies" / "rtx4090_8_pcie4.yaml", None, 8, 8)
TWO_NODES = Machine(REPOSITORY / "topologies" / "h100_8x64_ib400.yaml", 2, 16, 8)
# Few layers, so that programs are short. Small: everything fits. Large: 7e9 parameters, 112 GB of states, which is
# where sharding and offload begin to matter. Huge: 0.4e12.
SMALL, LARGE, HUGE = {"hidden": 512, "layers": 2}, {"hidden": 10240, "layers": 4}, {"hidden": 65536, "layers": 6}


def base(folder: Path, size: dict[str, int], seq_len: int = 512) -> Document:
    hidden = size["hidden"]
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": size["layers"],
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": hidden // 128,
        "vocab_size": 2048,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / "base.yaml"
    path.write_text(f"model: config.json\nseq_len: {seq_len}\n")
    return read_yaml(path)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Document]:
    document = base(tmp_path_factory.mktemp("plan"), LARGE, 8192)
    return planner.plan(document, [H100], 64, Inline(), 1), document


def test_every_candidate_is_accounted_for_once(found: tuple[Plan, Document]) -> None:
    plan, _ = found
    assert plan.candidates == len(list(candidates(H100, 64))) == 588
    assert sum(plan.searched.values()) == plan.candidates
    assert 0 < plan.searched["simulated"] < 0.1 * plan.candidates
    assert plan.searched[planner.NO_MEMORY_AT_ALL] > 0
    assert plan.searched[planner.BATCH_TOO_LARGE] > 0
    assert plan.searched[planner.BOUND] > 0


def test_the_written_winner_is_the_one_that_was_promised(found: tuple[Plan, Document], tmp_path: Path) -> None:
    plan, document = found
    winner = plan.winner(by_time)
    assert winner is not None
    scenario, config = launch.write(winner, document, tmp_path / "out")
    result = simulate(scenario)
    assert result.fits
    assert result.time.step_s == pytest.approx(winner.step_s, rel=1e-9)
    assert result.gpu.headroom_bytes == winner.outcome["headroom_bytes"]
    assert result.headline.tokens_per_step == 64 * 8192
    assert config.exists()


def test_no_candidate_is_better_beyond_what_is_not_distinguished(tmp_path: Path) -> None:
    """All candidates of a small space, one by one, against what the search found with a few simulations."""
    document = base(tmp_path, SMALL)
    everything = [Choice(c, evaluate(c.task(document))) for c in candidates(H100, 8)]
    fitting = [choice for choice in everything if choice.outcome["fits"]]
    best = min(choice.step_s for choice in fitting)
    plan = planner.plan(document, [H100], 8, Inline(), 1)
    fastest = plan.best(by_time)
    assert fastest is not None
    assert len(plan.choices) < len(fitting) / 2
    assert best <= fastest.step_s <= best * (1 + INDISTINGUISHABLE)


def sample() -> list[Candidate]:
    return [c for machine in (H100, TWO_NODES) for c in candidates(machine, 32)][::61]


@pytest.mark.parametrize("candidate", sample(), ids=lambda candidate: f"{candidate.title} {candidate.machine}")
def test_bounds_are_below_what_happens(candidate: Candidate, tmp_path: Path) -> None:
    document = base(tmp_path, SMALL)
    task = candidate.task(document)
    outcome, least, probe = evaluate(task), least_seconds(task), probe_memory(task)
    if outcome["status"] != "ok":
        assert probe.need is None
        return
    assert probe.need is not None
    assert probe.need.peak_allocated <= outcome["peak_allocated_bytes"]
    if outcome["fits"]:
        assert not probe.excluded
        assert least.step <= outcome["step_s"] * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_bounds_hold_for_whatever_is_accumulated(data: st.DataObject) -> None:
    machine = data.draw(st.sampled_from([H100, TWO_NODES, PCIE]), "machine")
    strategy = data.draw(st.sampled_from(list(strategies(machine))), "strategy")
    tuning = data.draw(st.integers(0, len(strategy.tunings) - 1), "tuning")
    checkpointing = data.draw(st.sampled_from(CHECKPOINTING), "checkpointing")
    candidate = Candidate(
        machine, strategy, data.draw(st.integers(1, 3)), data.draw(st.integers(2, 7)), checkpointing, tuning
    )
    size = {"hidden": data.draw(st.sampled_from([512, 2048, 4096]), "hidden"), "layers": data.draw(st.integers(1, 3))}
    with TemporaryDirectory() as folder:
        task = candidate.task(base(Path(folder), size, data.draw(st.sampled_from([128, 1024]), "length")))
        outcome = evaluate(task)
        if outcome["decided_by"] == "clock":
            assert least_seconds(task).step <= outcome["step_s"] * (1 + 1e-9)


def test_offload_of_checkpointed_inputs_is_carried(tmp_path):
    document = base(tmp_path, SMALL)
    found = {candidate.checkpointing: candidate for candidate in candidates(H100, 8)}
    for offload in (True, "stream"):
        data = document.data | {"checkpointing": {"policy": "none", "offload": offload}}
        chosen = {name: c.data(replace(document, data=data))["checkpointing"] for name, c in found.items()}
        assert chosen == {"none": "none", "selective": "selective", "full": {"policy": "full", "offload": offload}}
    assert found["full"].data(document)["checkpointing"] == "full"


def test_what_offloads_shares_the_cores():
    shared = replace(H100, threads=14)
    for strategy in strategies(shared):
        candidate = Candidate(shared, strategy, 1, 1, "full")
        assert dict(candidate.settings).get(("omp_num_threads",)) == (14 if strategy.offloads else None)
        assert ("OMP_NUM_THREADS=14" in candidate.title) == strategy.offloads


@pytest.mark.parametrize("strategy", list(strategies(H100)), ids=lambda strategy: strategy.name)
def test_micro_steps_that_repeat_are_not_simulated(strategy: Strategy, tmp_path: Path) -> None:
    document = base(tmp_path, SMALL)
    task = Candidate(H100, strategy, 1, 8, "full", strategy.usual).task(document)
    outcome, seen = evaluate(task), glance(task)
    for name in ("status", "fits", "headroom_bytes", "needed_bytes", "tokens_per_step"):
        assert seen[name] == outcome[name]
    for name in ("step_s", "tokens_per_s", "mfu"):
        assert seen[name] == pytest.approx(outcome[name], rel=1e-9)
    assert whole_seconds(task) == pytest.approx(outcome["step_s"], rel=1e-9)


def test_a_cycle_is_one_only_if_it_repeats(tmp_path: Path) -> None:
    """What the first micro-step leaves behind is none: here ZeRO-2's reductions, which reach into the second.

    They do where DeepSpeed does not wait for the GPU after each micro-step.
    """
    document = base(tmp_path, LARGE, 2048)
    strategy = next(one for one in strategies(H100) if one.name == "ZeRO-2")
    setup = setup_of(Candidate(H100, strategy, 1, 6, "full", strategy.usual).task(document))
    plan = replace(setup.plan, throughput_timer=False)
    program = lower(setup.model, setup.tree, plan, setup.workload)
    simulation = Simulation(program, rank_classes(setup.cluster), price_of(setup))
    simulation.run()
    assert cycle(simulation, 2) is None
    assert cycle(simulation, 4) is not None


def choice(free: float, step_s: float, strategy: str = "ZeRO-3", tuning: int | None = None) -> Choice:
    chosen = next(one for one in strategies(H100) if one.name == strategy)
    number = chosen.usual if tuning is None else tuning
    outcome = {"headroom_bytes": free * 2**30, "needed_bytes": (80 - free) * 2**30, "step_s": step_s}
    return Choice(Candidate(H100, chosen, 1, 1, "full", number), outcome)


def test_memory_to_the_last_gib_is_shown_and_not_offered() -> None:
    tight, roomy, slow = choice(1, 1.0), choice(5, 1.2), choice(40, 1.3)
    plan = Plan(choices=[tight, roomy, slow])
    assert plan.winner(by_time) == roomy
    assert plan.better_but_tight(roomy, by_time) == tight
    assert Plan(choices=[tight]).winner(by_time) == tight


def test_of_equals_the_plainest_wins() -> None:
    plain = choice(10, 1.005)
    same = [choice(10, 1.0, tuning=0), choice(30, 1.0, "ZeRO-3, optimizer on the CPU"), choice(30, 1.0, "FSDP2")]
    assert Plan(choices=[*same, plain], framework="deepspeed").winner(by_time) == plain
    assert Plan(choices=[*same, plain], framework="fsdp2").winner(by_time) == same[2]
    assert Plan(choices=[*same, choice(10, 1.02)]).winner(by_time) == same[0]  # slower than can be overlooked


def test_memory_rises_with_the_micro_batch_and_falls_with_checkpointing(tmp_path: Path) -> None:
    """What rounds 1 and 2 of the search rest on."""
    document = base(tmp_path, SMALL)
    for strategy in strategies(H100):
        need = {
            (size, checkpointing): probe_memory(
                Candidate(H100, strategy, size, 8 // size, checkpointing).task(document)
            ).need
            for size in (1, 8)
            for checkpointing in ("none", "selective", "full")
        }
        peaks = {key: value.peak_allocated for key, value in need.items() if value is not None}
        assert all(peaks[1, kind] <= peaks[8, kind] for kind in ("none", "selective", "full"))
        assert all(peaks[size, "full"] <= peaks[size, "selective"] <= peaks[size, "none"] for size in (1, 8))


def test_a_better_runner_up_says_why_it_lost() -> None:
    """Within what can be told apart, the plainest wins."""
    plain, *_, offloading = [s for s in strategies(H100) if s.framework == "deepspeed"]
    assert offloading.offloads
    outcome = {"headroom_bytes": 40 * 2**30, "needed_bytes": 40 * 2**30}

    def choice(strategy: Strategy, step_s: float) -> Choice:
        return Choice(Candidate(H100, strategy, 1, 1, "full", strategy.usual), {**outcome, "step_s": step_s})

    first, second = choice(plain, 1.0), choice(offloading, 0.995)
    plan = Plan(choices=[first, second])
    assert plan.winner(by_time) == first
    assert plan.why_not(second, first, by_time) == (
        "within 1%, which cannot be told apart; offloads what the best keeps on the GPU"
    )
    assert plan.why_not(choice(offloading, 1.005), first, by_time) is None


@pytest.mark.parametrize("machine", [H100, TWO_NODES], ids=str)
def test_written_configurations_say_the_same_plan(machine: Machine, tmp_path: Path) -> None:
    """Every strategy's DeepSpeed or accelerate file, read again."""
    from zsim.plan import detect

    document = base(tmp_path, SMALL)
    for index, strategy in enumerate(strategies(machine)):
        candidate = Candidate(machine, strategy, 1, 2, "full", strategy.usual)
        wanted = setup_of(candidate.task(document))
        scenario, config = launch.write(Choice(candidate, {}), document, tmp_path / str(index))
        assert load_scenario(scenario).resolve().plan == wanted.plan
        if isinstance(wanted.plan, Fsdp2Plan):
            reading = detect.read(detect.parse(config), detect.identify(detect.parse(config)), machine.ranks)
            section = reading.nested()["fsdp"]
            assert section["reshard_after_forward"] is wanted.plan.reshard_after_forward
            assert section.get("cpu_offload", False) is wanted.plan.cpu_offload
            assert section.get("mesh") == (list(wanted.plan.mesh) if wanted.plan.mesh else None)
            assert reading.nested()["checkpointing"] == "full"
        else:
            text = "model: ../config.json\nseq_len: 512\ncheckpointing: full\nframework: deepspeed\n"
            text += "optimizer: {decay_groups: false}\n"  # what the Trainer adds to a file without an optimizer
            topology = f"cluster: {{topology: {machine.topology}, nodes: {machine.nodes or 1}}}\n"
            (config.parent / "back.yaml").write_text(f"{text}{topology}deepspeed_config: ds_config.json\n")
            assert load_scenario(config.parent / "back.yaml").resolve().plan == wanted.plan


def test_a_written_scenario_names_its_files_from_its_own_folder(tmp_path: Path) -> None:
    document = base(tmp_path, SMALL)
    document.data["profile"] = "mine.yaml"
    (tmp_path / "mine.yaml").write_text("device: H100-SXM\nvalues: {launch_gap: 1e-6}\n")
    strategy = next(strategies(H100))
    candidate = Candidate(H100, strategy, 1, 2, "full", strategy.usual)
    scenario, _ = launch.write(Choice(candidate, {}), document, tmp_path / "a" / "b")
    assert load_scenario(scenario).fields.profile == "../../mine.yaml"
    assert simulate(scenario).profile.launch_gap == 1e-6


def test_a_written_configuration_says_what_is_quantized_and_gathered_whole(tmp_path: Path) -> None:
    zero = {
        "stage": 3, "zero_hpz_partition_size": 8, "zero_quantized_weights": True, "zero_quantized_gradients": True,
        "zero_quantized_nontrainable_weights": True, "stage3_module_granularity_threshold": 1000,
        "leaf_module": {"classes": ["LlamaMLP"], "names": ["lm_head"]},
    }  # fmt: skip
    base(tmp_path, SMALL)
    cluster = {"topology": str(TWO_NODES.topology), "nodes": TWO_NODES.nodes}
    data = {"model": "config.json", "cluster": cluster, "framework": "deepspeed", "seq_len": 512}
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(json.dumps({**data, "micro_batch": 1, "zero": zero}))
    setup = load_scenario(first).resolve()
    assert isinstance(setup.plan, DeepSpeedPlan)
    (tmp_path / "ds_config.json").write_text(json.dumps(launch.deepspeed(setup, setup.plan)))
    one_group = {"optimizer": {"decay_groups": False}}  # the Trainer makes two where the file names no optimizer
    second.write_text(json.dumps({**data, **one_group, "deepspeed_config": "ds_config.json"}))
    assert load_scenario(second).resolve().plan == setup.plan


def test_plots_show_every_choice(found: tuple[Plan, Document], tmp_path: Path) -> None:
    plan, _ = found
    picture, page = plan_plots.write(plan, by_time, tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert text.count("<tr") == 1 + len(plan.choices)
    assert text.count('class="best"') == 1
    assert "<svg" in text
    assert "src=" not in text  # needs nothing else
    winner = plan.winner(by_time)
    assert winner is not None
    assert winner.candidate.title in text


def test_nothing_fits(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zsim", "plan", str(base(tmp_path, HUGE).file), "--workers", "1", "--json"]
    options = ["--cluster", str(REPOSITORY / "topologies" / "rtx6000ada_4.yaml"), "--global-batch", "4"]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    answer = json.loads(done.stdout)
    assert answer["winner"] is None
    assert answer["nearest_miss"]["missing_bytes"] > 0
    assert sum(answer["searched"].values()) == answer["candidates"]


def test_what_all_setups_refuse_is_bad_input(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zsim", "plan", str(base(tmp_path, HUGE, -1).file), "--workers", "1", "--json"]
    options = ["--cluster", str(REPOSITORY / "topologies" / "rtx6000ada_4.yaml"), "--global-batch", "4"]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "setups are refused: -1 is out of range" in done.stderr


def test_cost_decides_between_machines(tmp_path: Path) -> None:
    """The same machine at two prices: equally fast, and the cheaper one is cheapest."""
    from dataclasses import replace

    document = base(tmp_path, SMALL)
    machines = [replace(H100, price=2.0), replace(TWO_NODES, price=2.0)]
    plan = planner.plan(document, machines, 16, Inline(), 1)
    fastest, cheapest = plan.best(by_time), plan.best(by_cost)
    assert fastest is not None
    assert cheapest is not None
    assert cheapest.cost <= fastest.cost
    assert cheapest.candidate.machine.ranks == 8  # twice the GPUs are never twice as fast here
    front = plan.pareto
    assert front[0] == fastest
    assert all(a.step_s <= b.step_s and a.cost > b.cost for a, b in pairwise(front))


@pytest.mark.parametrize("prices", [("=nan",), ("=-1",), ("=0",), ("=cheap",), ("=2.5", "")])
def test_a_price_is_a_number_above_zero_for_all_machines_or_none(prices: tuple[str, ...], tmp_path: Path) -> None:
    scenario = str(base(tmp_path, SMALL).file)
    topology = REPOSITORY / "topologies" / "rtx6000ada_4.yaml"
    options = [word for price in prices for word in ("--cluster", f"{topology}{price}")]
    with pytest.raises(InputError, match=r"--cluster: .* is no price|--cluster: one has a price"):
        dispatch(["plan", scenario, "--global-batch", "4", *options])


@pytest.mark.parametrize("says", ["zero", "deepspeed_config", "nobody"])
def test_what_checkpoints_hold_stays_as_it_was(says: str, tmp_path: Path) -> None:
    """stage3_gather_16bit_weights_on_model_save: without it the saved model has no weights."""
    document, section = base(tmp_path, SMALL), {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    if says == "zero":
        document.data["zero"] = section
    elif says == "deepspeed_config":
        (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": section}))
        document.data["deepspeed_config"] = "ds.json"
    keep_what_is_saved(document)
    for index, strategy in enumerate(strategies(H100)):
        candidate = Candidate(H100, strategy, 1, 2, "full", strategy.usual)
        stage = dict(strategy.settings).get(("zero", "stage"))
        _, config = launch.write(Choice(candidate, {}), document, tmp_path / str(index))
        gathers = "stage3_gather_16bit_weights_on_model_save" in config.read_text()
        assert gathers is (stage == 3 and says != "nobody")
