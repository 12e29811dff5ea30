"""Images in a scenario: what is said, what is chosen and printed, and what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from zsim.cli.app import dispatch
from zsim.errors import InputError
from zsim.model.spec import Images
from zsim.scenario import Setup, load

ROOT = Path(__file__).parents[2]
SCENARIO = ROOT / "scenarios" / "qwen25vl_7b_8xa100.yaml"
TEXT = ROOT / "scenarios" / "qwen7b_8xh100.yaml"


def setup(*overrides: str) -> Setup:
    return load(SCENARIO, overrides).resolve()


def test_size_and_number_are_as_written():
    found = setup("images.size=[1080, 1920]", "images.per_sequence=1")
    assert found.workload.images == Images(1, 1080, 1920)
    assert found.not_modeled[-1].startswith("waits for values")
    assert any("1 image of 1,092 x 1,932 pixels in every sequence, 2,691 of its 4,096" in a for a in found.assumptions)


def test_what_is_chosen_is_printed():
    found = setup("images=null")
    assert found.workload.images == Images(1, 768, 768)
    assert any(a.startswith("1 image of 756 x 756") and "images: ..." in a for a in found.assumptions)


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (("images.per_sequence=6",), "images"),  # 6 x 729 tokens are more than 4,096
        (("images=0",), "images"),
        (("model.freeze=[vision_towers]",), "model.freeze.0"),
        (("kernels=unsloth",), "kernels"),
        (("sequence_parallel_size=2",), "sequence_parallel_size"),
        (("lora=8", "lora.targets=[q_projection]", "model.freeze=[]"), "lora.targets"),
    ],
)
def test_what_cannot_be_is_refused_at_its_field(overrides: tuple[str, ...], field: str):
    with pytest.raises(InputError) as refused:
        setup(*overrides)
    assert refused.value.field == field


def test_a_text_model_has_no_images():
    with pytest.raises(InputError, match="has no vision tower"):
        load(TEXT, ["images=1"]).resolve()
    with pytest.raises(InputError, match="no parameter is named like 'vision_tower'"):
        load(TEXT, ["model.freeze=[vision_tower]"]).resolve()


def test_parts_are_frozen_by_name():
    def trained(*overrides: str) -> set[str]:
        return {p.name.split(".")[1] for p in setup(*overrides).model.parameters if p.trainable}

    assert trained() == {"language_model", "weight"}  # of lm_head
    assert trained("model.freeze=[vision_tower, language_model]") == {"visual"}
    merger = setup("model.freeze=[vision_tower, language_model]").model
    assert all(".merger." in p.name for p in merger.parameters if p.trainable)


def test_adapters_leave_parts_out():
    found = setup("lora=8", "lora.exclude=[vision_tower, multi_modal_projector]", "model.freeze=[]").model
    adapters = [p.name for p in found.parameters if ".lora_" in p.name]
    assert len(adapters) == 2 * 7 * 28
    assert all(name.startswith("model.language_model.layers.") for name in adapters)
    everywhere = setup("lora=8", "model.freeze=[]").model
    assert sum(".lora_" in p.name for p in everywhere.parameters) == 2 * (7 * 28 + 5 * 32 + 2)


def test_a_frozen_tower_costs_its_backward_where_its_patches_require_a_gradient():
    """As transformers 5 makes them where it checkpoints; LLaMA-Factory does not."""

    def flops(*overrides: str) -> float:
        tower = next(m for m in _modules(setup(*overrides).tree) if m.name == "model.visual")
        computes = [item for module in _modules(tower) for item in module.body if not hasattr(item, "body")]
        return sum(getattr(kernel, "flops", 0.0) for compute in computes for kernel in compute.backward)

    assert flops() == 0
    assert flops("checkpointing.frozen_tower=true") > 1e12
    assert flops("checkpointing=none") == 0


def test_a_recipe_becomes_a_scenario_with_its_frozen_parts(tmp_path: Path):
    recipe, config, written = tmp_path / "sft.yaml", tmp_path / "ds.json", tmp_path / "mine.yaml"
    config.write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "gradient_clipping": 1.0}')
    recipe.write_text(
        f"model_name_or_path: x\ntemplate: qwen2_vl\nstage: sft\nfinetuning_type: full\ndeepspeed: {config}\n"
        "cutoff_len: 2048\nbf16: true\n"
        "per_device_train_batch_size: 1\ngradient_accumulation_steps: 1\n"
    )
    machine = str(ROOT / "topologies" / "dgx_a100_8.yaml")

    def convert(model: str) -> Setup:
        files = [str(recipe), str(ROOT / "scenarios" / "models" / model)]
        assert dispatch(["from", *files, "--topology", machine, "--out", str(written)]) == 0
        return load(written).resolve()

    found = convert("qwen2.5-vl-7b")
    assert {p.name.split(".")[1] for p in found.model.parameters if p.trainable} == {"language_model", "weight"}
    assert not found.workload.checkpoint_frozen_tower
    assert all(p.trainable for p in convert("qwen2.5-7b").model.parameters)


def _modules(module):
    yield module
    for item in module.body:
        if hasattr(item, "body"):
            yield from _modules(item)


def test_an_image_that_nothing_states_is_named_where_it_is_too_large():
    with pytest.raises(InputError) as error:
        setup("images=null", "seq_len=256")
    assert "an image of" in error.value.message
    assert "768 x 768 pixels are taken where nothing says" in error.value.message
