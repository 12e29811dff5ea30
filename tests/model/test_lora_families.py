"""Adapters on every Linear of every family, among them those whose weight another module reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.model import test_families, test_seq2seq, test_vision
from zsim.errors import InputError, NotModeled
from zsim.model.huggingface import from_config
from zsim.model.lora import ALL_LINEAR, Lora, Tuning, tune
from zsim.model.spec import Compute, Images, Module, Workload
from zsim.model.trace import trace

MODELS: dict[str, Any] = {
    f"{file.__name__.rpartition('_')[2]}-{name}": model
    for file in (test_families, test_seq2seq, test_vision)
    for name, model in file.recorded().items()
}
# peft 0.21 raises for one of their Linear modules, or they have none (Conv1D, FalconLinear)
WITHOUT = ("mamba2", "nemotron_h", "falcon_h1", "gpt2", "falcon")
# The last of four layers, whose result vision_feature_layer: -2 does not take
UNREAD = dict.fromkeys(("vision-llava", "vision-llava_next"), "vision_tower.encoder.layers.3.")


def accumulated(module: Module) -> Iterator[int]:
    for item in module.body:
        yield from item.grads if isinstance(item, Compute) else accumulated(item)


def workload(run: dict[str, Any]) -> Workload:
    images = Images(run["images"], *run["size"]) if "images" in run else None
    return Workload(run["batch"], run["seq"], attention=run["attention"], device="cpu", images=images)


@pytest.mark.parametrize("name", [name for name, each in MODELS.items() if each["config"]["model_type"] not in WITHOUT])
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
