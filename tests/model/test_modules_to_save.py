"""Modules that train whole beside adapters, as peft's ModulesToSaveWrapper has them. What a step of theirs does under
each framework is recorded: validation/oracles/configurations_adapters.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from zsim.errors import InputError, NotModeled
from zsim.model.huggingface import from_config, read_config
from zsim.model.lora import Lora, Tuning, tune
from zsim.model.spec import ModelSpec, Workload
from zsim.model.trace import trace
from zsim.plan.spec import DdpPlan, Fsdp2Plan
from zsim.program.lower import lower, under
from zsim.program.units import groups_of
from zsim.program.walk import modules_in_order

MODELS = Path(__file__).parents[2] / "scenarios" / "models"
BOTH = ("embed_tokens", "lm_head")
TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def tiny(tied: bool = False, **lora: object) -> ModelSpec:
    base = from_config(TINY | {"tie_word_embeddings": tied}, "tiny")
    return tune(base, Tuning(Lora(4, ("q_proj",), **lora)))  # type: ignore[arg-type]


def copies(model: ModelSpec) -> list[str]:
    return [parameter.name for parameter in model.parameters if ".modules_to_save." in parameter.name]


def test_trainable_parameters_of_llama_3_8b() -> None:
    """The 6,815,744 of adapters, and twice 128,256 x 4,096; the frozen ones stay where they were."""
    model = tune(read_config(MODELS / "llama-3.1-8b"), Tuning(Lora(16, ("q_proj", "v_proj"), save=BOTH)))
    both = 2 * 128_256 * 4_096
    assert model.trainable_numel == 6_815_744 + both
    assert model.numel == 8_030_261_248 + 6_815_744 + both
    assert copies(model) == [
        "model.embed_tokens.modules_to_save.default.weight", "lm_head.modules_to_save.default.weight",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("save", "tie", "count"),
    [(BOTH, False, 2), (BOTH, True, 1), (("lm_head",), True, 1), (("embed_tokens",), False, 1), (("norm",), True, 5)],
)
def test_copies_of_tied_embeddings(save: tuple[str, ...], tie: bool, count: int) -> None:
    """ensure_weight_tying takes the embedding for the head, and means nothing where neither is named. "norm" is the end
    of every norm's name."""
    model = tiny(tied=True, save=save, tie=tie)
    assert len(copies(model)) == count
    assert next(p.name for p in model.parameters if p.name.endswith("original_module.weight")) == (
        "model.embed_tokens.original_module.weight"
        if save != ("norm",)
        else "model.layers.0.input_layernorm.original_module.weight"
    )


def test_the_copy_alone_is_called() -> None:
    model, workload = tiny(save=BOTH), Workload(1, 16)
    names = [module.name for module in modules_in_order(trace(model, workload))]
    assert "lm_head.modules_to_save.default" in names
    assert not any("original_module" in name for name in names)


def test_what_is_saved_gets_no_adapter() -> None:
    model = tune(from_config(TINY, "tiny"), Tuning(Lora(4, save=("q_proj",))))
    names = [parameter.name for parameter in model.parameters]
    assert "model.layers.0.self_attn.q_proj.modules_to_save.default.weight" in names
    assert not any("q_proj.lora_" in name for name in names)


def test_names_that_the_model_has_not_are_passed_over() -> None:
    model = tiny(save=("lm_head", "score"))
    assert model.notes[-1] == "lora.modules_to_save: the model has no score, which peft passes over"


@pytest.mark.parametrize(
    ("save", "error", "says"),
    [
        (("layers.0.input_layernorm",), NotModeled, "some layers only"),
        (("mlp",), NotModeled, r"model.layers.0.mlp, which is no module that has weights of its own alone"),
        (("proj",), InputError, "q_proj has an adapter"),
        (("default",), InputError, "is a part of one"),
    ],
)
def test_what_is_refused(save: tuple[str, ...], error: type[InputError], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        tiny(save=save)
    assert caught.value.field == "lora.modules_to_save"
    assert "embed_tokens, lm_head" in str(caught.value.accepted)


def test_quantized_modules_cannot_be_copied_and_trained() -> None:
    with pytest.raises(InputError, match="q_proj is quantized"):
        tune(from_config(TINY, "tiny"), Tuning(Lora(4, ("v_proj",), save=("q_proj",)), "nf4"))


def test_units_hold_the_frozen_module_that_nobody_calls() -> None:
    """accelerate shards the wrapper: 128 x 64 frozen and as many trained, of which adapter_units takes the latter."""
    model, workload = tiny(save=BOTH), Workload(1, 16)
    tree = trace(model, workload)
    numels = {
        units: [
            sum(model.parameters[param].numel for param in group.params) for group in groups if group.role != "block"
        ]
        for units in (False, True)
        for groups in [groups_of(model, tree, "accelerate", adapter_units=units)]
    }
    adapters = [4 * 64, 4 * 64] * 2
    assert sorted(numels[False]) == sorted([64, 2 * 128 * 64, 2 * 128 * 64])  # the root has the norm
    assert sorted(numels[True]) == sorted([64, *adapters, *[128 * 64] * 4])


def test_two_units_cannot_share_what_is_tied() -> None:
    """As torch says: "is shared with a parameter already managed by another FSDP group"."""
    model, workload = tiny(tied=True, save=BOTH), Workload(1, 16)
    plan = Fsdp2Plan(world_size=2, grouping="accelerate")
    with pytest.raises(InputError, match=r"embed_tokens.original_module.weight is shared by two groups"):
        lower(model, trace(model, workload), plan, workload)
    one = tiny(tied=True, save=BOTH, tie=True)
    lower(one, trace(one, workload), plan, workload)


def test_autocast_hands_adapters_an_input_of_their_own() -> None:
    """peft casts it to the float32 of A, autocast casts it back: what A saves is not what its neighbours save."""
    workload = Workload(1, 16)
    assert under(DdpPlan(world_size=2, autocast="bfloat16"), workload).adapters == "float32"
    assert under(DdpPlan(world_size=2, dtype="bfloat16"), workload).adapters is None
