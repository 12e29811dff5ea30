"""Training by preference from a scenario file to memory, time and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import zsim
from zsim.errors import InputError, NotModeled
from zsim.model.spec import Preference
from zsim.program.lower import lower
from zsim.program.ops import Alloc, Collective, Launch, Program
from zsim.result import sensitivity
from zsim.result.render.terminal import headline

Write = Callable[..., Path]
LOGITS = 2 * 1024 * 152064  # of a pair, Qwen2.5's vocabulary
P = 7_615_616_512


def preference(path: Path) -> Preference:
    found = zsim.load_scenario(path).resolve().workload.preference
    assert found is not None
    return found


def program(path: Path) -> Program:
    setup = zsim.load_scenario(path).resolve()
    return lower(setup.model, setup.tree, setup.plan, setup.workload)


def held(found: Program, key: str) -> int:
    """Bytes that are allocated for good under keys that begin so."""
    return sum(item.nbytes for item in found.init if isinstance(item, Alloc) and item.key.startswith(key))


def gathered(found: Program, phase: str) -> int:
    """Bytes that a rank receives of weights in a phase of a steady step."""
    works = [item.op for item in found.steps[-1] if isinstance(item, Launch) and item.op.phase == phase]
    return sum(
        2 * op.work.out_numel for op in works if isinstance(op.work, Collective) and op.work.kind == "all_gather"
    )


def test_a_micro_batch_counts_pairs(write: Write) -> None:
    plain, pairs = (zsim.simulate(write(zero="{stage: 2}", objective=objective)) for objective in ("", "orpo"))
    assert plain.headline.tokens_per_step == 8 * 1024
    assert pairs.headline.tokens_per_step == 8 * 2 * 1024
    assert pairs.throughput.model_flops == pytest.approx(2 * plain.throughput.model_flops, rel=1e-6)
    assert any("counts pairs, two sequences of 1,024 tokens each" in note for note in pairs.assumptions)
    assert "micro-batch 1 pair (ORPO), 2 sequences x 1,024 tokens" in headline(pairs.headline)


def test_the_forward_of_a_second_model_is_a_phase_and_counts_as_work(write: Write) -> None:
    alone, compared = (
        zsim.simulate(write(zero="{stage: 2}", objective=objective))
        for objective in ("{kind: dpo, reference: precomputed}", "dpo")
    )
    assert "reference" not in alone.time.compute_by_phase
    forward, reference = (compared.time.compute_by_phase[phase] for phase in ("forward", "reference"))
    assert reference == pytest.approx(forward, rel=0.1)
    # a forward is a third of forward and backward
    assert compared.throughput.model_flops == pytest.approx(4 / 3 * alone.throughput.model_flops, rel=0.01)


def test_a_second_model_is_whole_below_zero3_and_a_shard_under_it(write: Write) -> None:
    whole, shard = (program(write(zero=f"{{stage: {stage}}}", objective="dpo")) for stage in (2, 3))
    assert held(whole, "reference parameters") == pytest.approx(2 * P, rel=1e-3)
    assert held(shard, "reference parameter shards") == pytest.approx(2 * P / 8, rel=1e-3)
    assert gathered(whole, "reference") < 1000  # metrics are a forward's
    assert gathered(shard, "reference") == pytest.approx(2 * P, rel=0.01)


def test_fsdp2_gathers_a_second_model_as_one_unit(write: Write) -> None:
    """trl's prepare_fsdp calls fully_shard on the model alone; before 0.16 every GPU had all of it."""
    root, whole = (
        program(write(framework="fsdp2", objective=f"{{kind: dpo, version: '{version}'}}"))
        for version in ("0.16", "0.15")
    )
    calls = [
        item.op.work.out_numel
        for item in root.steps[-1]
        if isinstance(item, Launch) and item.op.phase == "reference" and isinstance(item.op.work, Collective)
    ]
    assert calls == [P]
    assert held(whole, "reference parameters") == pytest.approx(2 * P, rel=1e-3)


def test_without_adapters_zero3_prefetches_nothing(write: Write) -> None:
    """The trace of its modules breaks where an adapter is not called: from there on each is gathered as it comes."""
    compared = program(write(zero="{stage: 3}", lora="16", objective="dpo"))
    alone = program(write(zero="{stage: 3}", lora="16", objective="{kind: dpo, reference: precomputed}"))

    def calls(found: Program, phase: str) -> int:
        ops = [item.op for item in found.steps[-1] if isinstance(item, Launch) and item.op.phase == phase]
        return sum(isinstance(op.work, Collective) and op.work.kind == "all_gather" for op in ops)

    assert calls(compared, "backward") > 3 * calls(alone, "backward")


def test_log_probabilities_by_release(write: Write) -> None:
    def of(**objective: str) -> Preference:
        text = ", ".join(f"{name}: {value}" for name, value in ({"kind": "dpo"} | objective).items())
        return preference(write(objective=f"{{{text}}}"))

    assert (of(version="'0.9'").log_probs, of(version="'0.9'").held) == ("log_softmax", 1.5)
    assert (of(version="'0.12'").held, of(version="'0.12'").gathered) == (0, False)
    assert (of(version="'0.14'").log_probs, of(version="'0.14'").gathered) == ("log_softmax", True)
    assert of(version="'0.15'").log_probs == of(version="'0.28'").log_probs == "selective"
    assert (of().log_probs, of().held, of().surveyed) == ("shifted", 2, True)
    factory = of(trainer="llama-factory")
    assert (factory.log_probs, factory.widened, factory.held) == ("log_softmax", True, 1)
    assert not of().widened
    assert preference(write(framework="fsdp2", objective="dpo")).widened  # accelerate's autocast
    old = preference(write(framework="{name: deepspeed, transformers: '4.40'}", objective="dpo"))
    assert (old.log_probs, old.held, old.widened) == ("log_softmax", 1.5, True)


def test_likelihoods(write: Write) -> None:
    def has(objective: str) -> bool:
        return preference(write(objective=objective)).likelihood

    assert all(map(has, ("orpo", "cpo", "simpo", "{kind: dpo, likelihood: true}")))
    assert not any(map(has, ("dpo", "{kind: simpo, likelihood: false}", "{kind: orpo, trainer: llama-factory}")))


@pytest.mark.parametrize(
    ("objective", "logits"),
    [
        # log-softmax of both sequences is there for the backward, zeros and a gradient beside it
        ("{kind: dpo, reference: precomputed, version: '0.14'}", 2 + 2 + 2),
        # LLaMA-Factory has all of them in float32
        ("{kind: simpo, trainer: llama-factory}", 4 + 4 + 4),
    ],
)
def test_what_the_backward_of_the_loss_holds(write: Write, objective: str, logits: int) -> None:
    setup = zsim.load_scenario(write(objective=objective)).resolve()
    loss = setup.tree.body[-1]
    assert loss.saved_bytes + loss.backward_peak == pytest.approx(logits * LOGITS, rel=0.02)


def test_refusals(write: Write) -> None:
    vision = str(Path(__file__).parents[2] / "scenarios/models/qwen2.5-vl-7b")
    for fields, error, says in (
        ({"objective": "kto"}, InputError, "dpo, orpo, cpo"),
        ({"objective": "{kind: dpo, version: '1.16'}"}, NotModeled, "one kernel in tiles"),
        ({"objective": "{kind: dpo, version: '0.9', trainer: llama-factory}"}, InputError, "is that of trl"),
        ({"objective": "{kind: orpo, reference: model}"}, InputError, "orpo has none"),
        ({"objective": "{kind: dpo, reference: adapters}"}, InputError, "where there are any"),
        ({"objective": "{kind: dpo, reference: model}", "lora": "16"}, NotModeled, "beside one with adapters"),
        ({"loss": "hf"}, NotModeled, "a loss of its own"),
        ({"compile": "true"}, NotModeled, "compile: True"),
        ({"kernels": "unsloth"}, NotModeled, "kernels of unsloth"),
        ({"sequence_parallel_size": "2"}, NotModeled, "sequence_parallel_size: 2"),
        ({"lora": "{r: 16, modules_to_save: [lm_head]}"}, NotModeled, "modules_to_save"),
        ({"framework": "fsdp2", "fsdp": "{cpu_offload: true}"}, NotModeled, "cpu_offload"),
        ({"zero": "{stage: 3, zero_quantized_weights: true}"}, NotModeled, "quantized gathers"),
        ({"model": vision}, NotModeled, "training by preference of qwen2_5_vl"),
    ):
        with pytest.raises(error) as raised:
            zsim.simulate(write(**{"objective": "dpo", **fields}))
        assert says in f"{raised.value.message} {raised.value.accepted}"
        assert raised.value.field


def test_the_reference_has_deepspeeds_sizes_where_the_trainer_has_its_own(write: Write) -> None:
    """The configuration that its engine gets still says "auto"."""
    auto = "{stage: 3, stage3_prefetch_bucket_size: auto, stage3_param_persistence_threshold: auto}"
    given = "{stage: 3, stage3_prefetch_bucket_size: 11560550, stage3_param_persistence_threshold: 35840}"
    trained, reference = (
        [
            [item.op.work.out_numel for item in program(write(zero=zero, objective="dpo")).steps[-1]
             if isinstance(item, Launch) and item.op.phase == phase and isinstance(item.op.work, Collective)]
            for zero in (auto, given)
        ]
        for phase in ("backward", "reference")
    )  # fmt: skip
    assert trained[0] == trained[1]
    assert len(reference[0]) < len(reference[1])


def test_what_would_be_refused_is_not_advised(tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(
        f"model: {Path('scenarios/models/qwen2.5-1.5b/config.json').resolve()}\n"
        f"cluster: {Path('topologies/a100_4.yaml').resolve()}\nframework: deepspeed\nzero: {{stage: 3}}\n"
        "micro_batch: 1\nseq_len: 256\nobjective: dpo\n"
    )
    names = [variant.name for variant in sensitivity.settings(zsim.simulate(path))]
    assert names
    assert not [name for name in names if name.startswith(("loss=", "sequence_parallel_size="))]
