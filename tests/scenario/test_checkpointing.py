"""Activation checkpointing of some blocks only: memory and time lie between those of none and of all."""

import json

import pytest

import zsim
from tests.result.test_commands import MODEL, ROOT
from zsim.errors import InputError
from zsim.scenario import load

LAYERS = 8


@pytest.fixture(scope="module")
def scenario(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpointing")
    (folder / "config.json").write_text(json.dumps(MODEL | {"num_hidden_layers": LAYERS}))
    path = folder / "small.yaml"
    path.write_text(
        f"model: config.json\ncluster: {ROOT}/topologies/hgx_h100_8.yaml\nframework: fsdp2\n"
        "micro_batch: 4\nseq_len: 1024\n"
    )
    return path


def run(scenario, checkpointing):
    return zsim.simulate(scenario, [f"checkpointing={checkpointing}"])


def test_between_none_and_all(scenario):
    chosen = ["none", "{every: 4}", "{every: 2}", "{blocks: [1, 2, 3, 4, 5, 7]}", "full"]
    results = [run(scenario, each) for each in chosen]
    activations = [result.gpu.by_category["activations"] for result in results]
    recompute = [result.time.compute_by_phase.get("recompute", 0.0) for result in results]
    assert activations == sorted(activations, reverse=True)
    assert len(set(activations)) == len(chosen)
    assert recompute == sorted(recompute)
    executed = [result.throughput.hardware_flops - results[0].throughput.hardware_flops for result in results]
    assert [flops / executed[-1] for flops in executed] == pytest.approx([0, 2 / 8, 4 / 8, 6 / 8, 1])
    steps = [result.time.step_s for result in results]
    assert steps == sorted(steps)


def test_every_block_is_all_of_them(scenario):
    every, full = run(scenario, "{every: 1}"), run(scenario, "full")
    assert every.headline.workload == full.headline.workload
    assert every.time == full.time


def test_a_block_is_named_once(scenario):
    with pytest.raises(InputError, match=r"checkpointing.blocks.1: block 0 stands here twice"):
        load(scenario, ["checkpointing={blocks: [0, 0]}"]).resolve()


@pytest.mark.parametrize(
    ("text", "tokens"), [("4k", 4096), ("128K", 131_072), ("2.5k", 2560), ("4096", 4096), ("4e3", 4000)]
)
def test_thousands_of_tokens_are_1024(scenario, text, tokens):
    assert load(scenario, [f"seq_len={text}"]).fields.seq_len == tokens


def test_every_second_is_the_second_the_fourth_and_so_on(scenario):
    """As torchtitan counts (`_apply_layer_sac`)."""
    setup = load(scenario, ["checkpointing.every=2", "checkpointing.policy=selective"]).resolve()
    assert setup.workload.checkpointed == (1, 3, 5, 7)
    assert setup.workload.checkpointing == "selective"
    checkpointed = [module.name for module in _blocks(setup.tree) if module.checkpointed]
    assert checkpointed == [f"model.layers.{number}" for number in (1, 3, 5, 7)]


def _blocks(module):
    inner = [item for item in module.body if hasattr(item, "role")]
    return [block for item in inner for block in ([item] if item.role == "block" else _blocks(item))]


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ("{policy: none, every: 2}", "every"),
        ("{every: 2, blocks: [1]}", "blocks"),
        ("{every: 9}", "every"),
        ("{blocks: [8]}", "blocks"),
        ("{blocks: []}", "blocks"),
        ("{blocks: [-1]}", "blocks"),
    ],
)
def test_choices_that_make_no_sense(scenario, value, field):
    with pytest.raises(InputError) as caught:
        load(scenario, [f"checkpointing={value}"]).resolve()
    assert caught.value.field.startswith(f"checkpointing.{field}")


def test_a_block_that_is_not_there_is_named(scenario):
    with pytest.raises(InputError, match="there is no block 8") as caught:
        load(scenario, ["checkpointing={blocks: [1, 8]}"]).resolve()
    assert caught.value.accepted.startswith("0 to 7, ")
