"""Adapters on every Linear of every family, among them those whose weight another module reads."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.model import test_families, test_seq2seq, test_vision
from tests.model.ledger import Ledger, flops
from zsim.errors import InputError, NotModeled
from zsim.model.huggingface import from_config
from zsim.model.lora import ALL_LINEAR, Lora, Tuning, tune
from zsim.model.spec import Compute, Images, ModelSpec, Module, Workload
from zsim.model.trace import trace

MODELS: dict[str, Any] = {
    f"{file.__name__.rpartition('_')[2]}-{name}": model
    for file in (test_families, test_seq2seq, test_vision)
    for name, model in file.recorded().items()
}
ADAPTERS = json.loads(gzip.decompress((test_families.FOLDER / "adapters.json.gz").read_bytes()))["models"]
ALL = ADAPTERS["all-linear"]  # what peft 0.21 makes of it in each model
STEPS = ADAPTERS["steps"]
A = ".lora_A.default.weight"
# The last of four layers, whose result vision_feature_layer: -2 does not take
UNREAD = {
    **dict.fromkeys(("vision-llava", "vision-llava_next", "vision-llava_next_video"), "vision_tower.encoder.layers.3."),
    "vision-qwen2_5_omni": ".audio_tower.",  # which is given nothing
    **dict.fromkeys(("families-esm", "families-esm-1b"), ".contact_head."),  # which is not called
    **dict.fromkeys(
        ("families-gemma3n", "families-gemma3n-repeated"), ".correction_coefs."
    ),  # whose weight alone is read
}


# As in test_families.py: weights of attention that GPT-Neo hands out of the block, and the rows of GPT-OSS.
UNSEEN = {
    "gpt_neo": ("forward", 2 * 4 * 64**2),
    "gpt_oss": ("backward", test_families.MISSED_ROWS["gpt_oss"]),
}


def accumulated(module: Module) -> Iterator[int]:
    for item in module.body:
        yield from item.grads if isinstance(item, Compute) else accumulated(item)


def workload(run: dict[str, Any]) -> Workload:
    images = Images(run["images"], *run["size"]) if "images" in run else None
    return Workload(run["batch"], run["seq"], attention=run["attention"], device="cpu", images=images)


def test_peft_has_been_asked_about_every_model():
    assert set(ALL) == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_all_linear_adapts_what_peft_adapts(name: str) -> None:
    model, theirs = from_config(MODELS[name]["config"], name), ALL[name]
    if model.arch.labels:
        with pytest.raises(NotModeled, match="whose head peft trains whole"):
            tune(model, Tuning(Lora(4)))
    elif "parameters" in theirs:
        with pytest.raises(NotModeled, match="on the stacked experts"):
            tune(model, Tuning(Lora(4)))
    elif "modules" not in theirs:
        with pytest.raises(InputError, match="and raises"):
            tune(model, Tuning(Lora(4)))
    elif "raises_called" in theirs:
        with pytest.raises(InputError, match="which raises as it is called") as error:
            tune(model, Tuning(Lora(4)))
        assert "lora.exclude: [router]" in str(error.value.accepted)
        rest = [module for module in theirs["modules"] if not module.endswith(".router")]
        assert _adapted(tune(model, Tuning(Lora(4, exclude=("router",))))) == rest != theirs["modules"]
    else:
        assert _adapted(tune(model, Tuning(Lora(4)))) == theirs["modules"]


def _adapted(spec: ModelSpec) -> list[str]:
    return [each.name.removesuffix(A) for each in spec.parameters if each.name.endswith(A)]


@pytest.mark.parametrize("targets", [("q_proj", "gate"), (r".*(q|down)_proj",), (r".*experts.*(gate|up)_proj",)])
def test_routers_and_patterns_of_experts_are_refused(targets: tuple[str, ...]) -> None:
    lora = Lora(4, pattern=targets[0]) if len(targets) == 1 else Lora(4, targets)
    for name in ("qwen3_moe", "deepseek_v3"):  # with layers that have no experts, and with shared ones
        with pytest.raises(NotModeled, match="stacked experts"):
            tune(from_config(MODELS[f"families-{name}"]["config"], name), Tuning(lora))


@pytest.mark.parametrize(
    "number", range(len(STEPS)), ids=[f"{each['model']}-{len(each['parameters'])}-{each['dropout']}" for each in STEPS]
)
def test_a_step_with_adapters_is_the_recorded_one(number: int) -> None:
    """GPT-2's Conv1D and Falcon's Linear among them, all modules of a model or some."""
    recorded = STEPS[number]
    targets = (ALL_LINEAR,) if recorded["targets"] == ALL_LINEAR else tuple(recorded["targets"])
    config = MODELS[f"families-{recorded['model']}"]["config"]
    spec = tune(
        from_config(config, recorded["model"]), Tuning(Lora(recorded["r"], targets, dropout=recorded["dropout"]))
    )
    assert [[p.name, list(p.shape), p.module_class] for p in spec.parameters] == recorded["parameters"]
    for run in recorded["runs"]:
        ledger = Ledger.of_run(spec, run)
        assert ledger.calls == [tuple(call) for call in recorded["calls"]]
        assert ledger.ready == recorded["ready"]
        assert flops(ledger.forward_kernels) == run["flops"]["forward"]
        assert flops(ledger.backward_kernels) == run["flops"]["backward"]
        assert ledger.after_forward == run["after_forward"]
        peak = {"forward": ledger.peak_forward, "backward": ledger.peak_backward}
        if run["checkpointing"] == "full" and recorded["model"] in UNSEEN:
            phase, nbytes = UNSEEN[recorded["model"]]
            peak[phase] += nbytes * run["batch"]
        assert peak == run["peak"]


TUNED = [name for name, each in ALL.items() if set(each) == {"modules"} and not name.endswith("-classifier")]


@pytest.mark.parametrize("name", TUNED)
def test_every_adapter_gets_a_gradient(name: str) -> None:
    spec = tune(from_config(MODELS[name]["config"], name), Tuning(Lora(4)))
    unread = UNREAD.get(name, " ")
    trained = {index for index, each in enumerate(spec.parameters) if each.trainable and unread not in each.name}
    assert set(accumulated(trace(spec, workload(MODELS[name]["runs"][0])))) == trained != set()


@pytest.mark.parametrize(
    ("name", "exclude", "count"),
    [  # numel that require a gradient, of peft 0.21's get_peft_model with target_modules="all-linear"
        ("bamba", (), 15_072),
        ("granitemoehybrid", (), 10_848),
        ("bamba", ("out_proj",), 13_536),
        ("granitemoehybrid", ("out_proj",), 9_312),
        ("mamba2", ("out_proj",), 5_040),
        ("nemotron_h", ("out_proj",), 7_072),
        ("falcon_h1", ("out_proj",), 18_672),
    ],
)
def test_adapters_of_models_with_mamba_s_mixer_are_peft_s(name: str, exclude: tuple[str, ...], count: int) -> None:
    model = from_config(MODELS[f"families-{name}"]["config"], name)
    assert tune(model, Tuning(Lora(4, exclude=exclude))).trainable_numel == count


@pytest.mark.parametrize("name", ["mamba2", "nemotron_h", "falcon_h1"])
@pytest.mark.parametrize("target", [ALL_LINEAR, "out_proj"])
def test_the_output_of_a_mixer_takes_none_where_peft_raises(name: str, target: str) -> None:
    with pytest.raises(InputError, match="no adapter on the out_proj") as error:
        tune(from_config(MODELS[f"families-{name}"]["config"], name), Tuning(Lora(4, (target,))))
    assert "lora.exclude: [out_proj]" in str(error.value.accepted)


def test_kernels_that_read_weights_themselves_are_refused() -> None:
    """Past an adapter, which would get no gradient."""
    spec = tune(from_config(MODELS["families-llama"]["config"], "llama"), Tuning(Lora(4)))
    with pytest.raises(NotModeled, match="with adapters"):
        trace(spec, Workload(1, 64, kernels="flash-attn packed"))
    spec = tune(from_config(MODELS["families-bamba"]["config"], "bamba"), Tuning(Lora(4)))
    with pytest.raises(NotModeled, match="with adapters"):
        trace(spec, Workload(1, 64, kernels="mamba-ssm"))
