"""Vision-language models against the real ones, run under fake tensors (validation/oracles/vision.py)."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.model.ledger import Ledger, block, computes, flops
from tests.model.vision_counts import COUNTS
from zsim.errors import InputError, NotModeled
from zsim.model import pixels
from zsim.model.families import VISION
from zsim.model.huggingface import from_config, read_config
from zsim.model.spec import Compute, Images, ModelSpec, Module, Workload
from zsim.model.trace import trace

FILE = Path(__file__).parents[2] / "validation" / "oracles" / "families" / "vision.json.gz"


@cache
def recorded() -> dict[str, Any]:
    return json.loads(gzip.decompress(FILE.read_bytes()))["models"]


# What zsim knows to differ: tables and masks that only some layers use live until the first block's backward, as in
# test_families. Two of 2 x 96 x 96 and of 96 x 32, in bf16.
LATE = {"gemma3": 2 * (2 * 96 * 96 + 2 * 96 * 32), "paligemma2": 2 * 2 * 96 * 96, "qwen3_5": 2 * 2 * 96 * 96}
# And a copy that experts make before a layer runs again, as in test_families: of all rows for each of four, or of two
# for each row, 64 wide.
MISSED = {"llama4": 4 * 2 * 96 * 64 * 2, "qwen3_omni": 2 * 2 * 96 * 64 * 2}
CASES = [(name, index) for name, model in recorded().items() for index in range(len(model["runs"]))]


def frozen(spec: ModelSpec, what: str) -> ModelSpec:
    def trains(name: str) -> bool:
        if any(part in name for part in ("merger", "projector", "connector", "embed_vision", "vision_projection")):
            return True
        return not what or (
            what == "tower"
            and not any(part in name for part in ("visual.", "vision_tower.", "vision_model.", "vision_encoder."))
        )

    return replace(spec, parameters=tuple(replace(p, trainable=trains(p.name)) for p in spec.parameters))


def test_every_family_has_a_recording():
    assert {model["config"]["model_type"] for model in recorded().values()} == set(VISION)


@pytest.mark.parametrize("name", recorded())
def test_parameters_are_those_of_named_parameters(name: str):
    model = recorded()[name]
    ours = [[p.name, list(p.shape), p.module_class] for p in from_config(model["config"], name).parameters]
    assert ours == model["parameters"]


@pytest.mark.parametrize(("name", "index"), CASES)
def test_a_step_is_the_recorded_one(name: str, index: int):
    model = recorded()[name]
    run = model["runs"][index]
    spec = frozen(from_config(model["config"], name), run["frozen"])
    workload = Workload(
        run["batch"], run["seq"], attention=run["attention"], checkpointing=run["checkpointing"], device="cpu",
        images=Images(run["images"], *run["size"]),
    )  # fmt: skip
    ledger = Ledger(spec, trace(spec, workload))
    assert ledger.calls == [tuple(call) for call in run["calls"]]
    assert ledger.ready == run["ready"]
    assert flops(ledger.forward_kernels) == run["flops"]["forward"]
    assert flops(ledger.backward_kernels) == run["flops"]["backward"]
    assert ledger.after_forward == run["after_forward"]
    assert ledger.peak_forward == run["peak"]["forward"]
    late = LATE.get(name, 0) if run["checkpointing"] == "full" else 0
    missed = MISSED.get(name, 0) if run["checkpointing"] == "full" else 0
    assert -missed <= ledger.peak_backward - run["peak"]["backward"] <= late


@pytest.mark.parametrize("name", recorded())
@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_a_frozen_tower_keeps_nothing_of_a_region_without_gradients(name: str, checkpointing: str):
    """Regions of checkpointing keep what they have for their second run, which a tower without gradients has not: after
    forward all is as where the tower is not checkpointed. Selective checkpointing holds results of attention and of
    products to the end of a block (torch.utils.checkpoint's `_CachingTorchDispatchMode`, seen on torch 2.13)."""
    model = recorded()[name]
    run = model["runs"][0]
    spec = frozen(from_config(model["config"], name), "tower")
    workload = Workload(
        run["batch"], run["seq"], attention=run["attention"], checkpointing=checkpointing,
        images=Images(run["images"], *run["size"]),
    )  # fmt: skip
    ours, bare = (
        Ledger(spec, trace(spec, replace(workload, checkpoint_frozen_tower=tower))) for tower in (True, False)
    )
    if not spec.arch.vision.input_embedding:  # else its patches are made to require a gradient
        assert ours.after_forward == bare.after_forward


def test_selective_checkpointing_of_a_frozen_block_holds_its_results_until_it_is_over():
    """Of Qwen3.5's tower, whose products have biases and are not kept (addmm): what attention returns, of 120 patches
    and 48 channels in 3 heads, its logsumexp, seed and offset."""
    model = recorded()["qwen3_5"]
    spec = frozen(from_config(model["config"], "qwen3_5"), "tower")
    workload = Workload(1, 96, checkpointing="selective", images=Images(1, 160, 192))
    held, bare = (
        [work.forward_live for work in computes(block(trace(spec, replace(workload, checkpoint_frozen_tower=tower))))]
        for tower in (True, False)
    )
    aside = 4 * 3 * 120 + 3 * 8
    more = [0, 0, aside, *[2 * 120 * 48 + aside] * 6, 0]  # what it returns is alive anyway, until it is projected
    assert [with_it - without for with_it, without in zip(held, bare, strict=True)] == more


def saved(module: Module) -> int:
    return sum(item.saved_bytes if isinstance(item, Compute) else saved(item) for item in module.body)


@pytest.mark.parametrize("name", sorted(recorded().keys() - {"llama4"}))
def test_a_fused_loss_saves_less_as_in_a_text_model(name: str):
    """Liger's lce_forward of each and cut-cross-entropy: the head is not called, nor are logits made, as in Qwen2."""
    model, losses = recorded()[name], ("hf", "fused")
    run, spec = model["runs"][0], from_config(model["config"], name)
    pictures = {"attention": run["attention"], "images": Images(run["images"], *run["size"])}
    text = {
        "model_type": "qwen2", "hidden_size": spec.arch.hidden, "vocab_size": spec.arch.vocab, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64,
        "tie_word_embeddings": spec.arch.tied,
    }  # fmt: skip
    plain, fused = (saved(trace(spec, Workload(run["batch"], run["seq"], loss=loss, **pictures))) for loss in losses)
    sizes = run["batch"], run["seq"]
    expected = [saved(trace(from_config(text, "text"), Workload(*sizes, loss=loss))) for loss in losses]
    capped = 2 * run["batch"] * run["seq"] * spec.arch.vocab if spec.arch.final_softcap else 0  # the tanh's result
    assert plain - fused == expected[0] - expected[1] + capped


def test_no_fused_loss_of_a_text_model_that_returns_logits():
    with pytest.raises(NotModeled, match="fused loss of llama4"):
        trace(
            from_config(recorded()["llama4"]["config"], "llama4"),
            Workload(1, 96, loss="fused", images=Images(1, 56, 56)),
        )


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_of_published_models(name: str):
    count, config = COUNTS[name]
    assert from_config(config, name).numel == count


# Whether transformers 5.24 ties the output projection, by what the whole configuration and its text_config say of it.
_SAID = ((True, True), (True, False), (False, True), (False, None), (None, True), (None, None))
TIED = {
    **dict.fromkeys(("LLaVA-1.5-7B", "LLaVA-OneVision-7B", "GLM-4.1V-9B"), (True, True, True, False, True, False)),
    **dict.fromkeys(
        ("Qwen3-VL-8B", "Qwen3-VL-30B-A3B", "Qwen3.5-9B", "SmolVLM-Instruct", "LLaVA-v1.6-Mistral-7B"),
        (True, True, False, False, False, False),
    ),
    **dict.fromkeys(
        ("Gemma-3-4B", "PaliGemma-3B", "Mistral-Small-3.1-24B", "InternVL3-8B"), (True, True, False, False, True, True)
    ),
    "Llama-4-Scout-17B-16E": (True, False, True, False, True, False),
}


@pytest.mark.parametrize("name", TIED)
def test_which_of_two_configurations_ties_the_output_projection(name: str):
    config = COUNTS[name][1]
    for (whole, text), tied in zip(_SAID, TIED[name], strict=True):
        changed = {key: value for key, value in config.items() if key != "tie_word_embeddings"}
        inner = {key: value for key, value in config["text_config"].items() if key != "tie_word_embeddings"}
        changed |= {"tie_word_embeddings": whole} if whole is not None else {}
        inner |= {"tie_word_embeddings": text} if text is not None else {}
        assert from_config(changed | {"text_config": inner}, name).arch.tied is tied, (whole, text)


def test_the_shipped_model_has_the_published_count():
    shipped = Path(__file__).parents[2] / "scenarios" / "models" / "qwen2.5-vl-7b"
    assert read_config(shipped).numel == 8_292_166_656


@pytest.mark.parametrize(
    ("size", "tokens", "windows"),
    [
        # (height, width), tokens of the text model, windows by patches: as get_vision_window_index has them
        ((112, 112), 16, {64: 1}),
        ((168, 196), 42, {64: 1, 48: 1, 32: 1, 24: 1}),
        ((756, 756), 729, {64: 36, 48: 12, 36: 1}),
        ((1080, 1920), 39 * 69, {64: 9 * 17, 16: 9, 48: 17, 12: 1}),
    ],
)
def test_tokens_and_windows_of_an_image(size: tuple[int, int], tokens: int, windows: dict[int, int]):
    spec = read_config(Path(__file__).parents[2] / "scenarios" / "models" / "qwen2.5-vl-7b")
    vision, images = spec.arch.vision, Images(1, *size)
    assert pixels.image_tokens(vision, images) == tokens
    assert Counter(pixels.window_order(vision, images)) == windows
    assert sum(length * count for length, count in windows.items()) == 4 * tokens


@pytest.mark.parametrize(
    ("size", "squares"), [((384, 384), 1), ((384, 385), 3), ((1152, 1536), 13), ((1536, 1536), 17)]
)
def test_an_image_of_smolvlm_is_cut_into_squares(size: tuple[int, int], squares: int):
    """As Idefics3ImageProcessor.split_images does, with the small copy; 81 tokens each."""
    vision = from_config(COUNTS["SmolVLM-Instruct"][1], "smolvlm").arch.vision
    assert pixels.image_tokens(vision, Images(1, *size)) == 81 * squares


def test_a_model_without_images_is_refused():
    config = recorded()["llava"]["config"]
    with pytest.raises(NotModeled, match="without images"):
        trace(from_config(config, "llava"), Workload(1, 64))


def test_paligemma_needs_a_mask():
    """Image and prompt see each other; Gemma 2 under it caps its scores, which SDPA does not."""
    for name, refused in (("paligemma", ("flash", "sdpa")), ("paligemma2", ("flash", "sdpa", "efficient"))):
        spec = from_config(recorded()[name]["config"], name)
        for attention in refused:
            with pytest.raises(NotModeled, match="under a mask"):
                trace(spec, Workload(1, 64, attention=attention, images=Images(1, 56, 56)))
    trace(from_config(recorded()["paligemma"]["config"], "p"), Workload(1, 64, attention="efficient",
          images=Images(1, 56, 56)))  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"vision_feature_layer": [-2, -5]}, "vision_feature_layer"),
        ({"vision_config": {"model_type": "siglip_vision_model"}}, "vision_config.model_type"),
        ({"vision_config": {"model_type": "pixtral"}}, "vision_feature_layer"),  # its class's is the last but one
        ({"text_config": {"model_type": "gemma"}}, "text_config.model_type"),
        ({"vision_config": {"num_attention_heads": 7}}, "vision_config.num_attention_heads"),
    ],
)
def test_what_a_config_of_llava_cannot_say(changes: dict[str, Any], field: str):
    with pytest.raises(InputError) as refused:
        from_config(recorded()["llava"]["config"] | changes, "llava")
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"scale_factor": 3}, "scale_factor"),  # 4 x 4 patches
        ({"vision_config": {"model_type": "siglip_vision_model"}}, "vision_config.model_type"),
        ({"text_config": {"model_type": "gemma"}}, "text_config.model_type"),
    ],
)
def test_what_a_config_of_idefics_cannot_say(changes: dict[str, Any], field: str):
    with pytest.raises(InputError) as refused:
        from_config(recorded()["idefics3"]["config"] | changes, "idefics3")
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("part", "changes", "field"),
    [
        ("text_config", {"cross_attention_layers": [1, 8]}, "cross_attention_layers"),  # of layers 0 to 7
        ("vision_config", {"intermediate_layers_indices": [0, 1, 2]}, "vision_output_dim"),
        ("vision_config", {"intermediate_layers_indices": [0, -1]}, "intermediate_layers_indices"),
    ],
)
def test_what_a_config_of_mllama_cannot_say(part: str, changes: dict[str, Any], field: str):
    config = recorded()["mllama"]["config"]
    with pytest.raises(InputError) as refused:
        from_config(config | {part: config[part] | changes}, "mllama")
    assert refused.value.field == f"{part}.{field}"


@pytest.mark.parametrize("field", ["vision_output_dim", "projector_input_dim", "intermediate_size"])
def test_widths_of_llama4_that_do_not_fit_each_other(field: str):
    config = recorded()["llama4"]["config"]
    with pytest.raises(InputError) as refused:
        from_config(config | {"vision_config": config["vision_config"] | {field: 81}}, "llama4")
    assert refused.value.field == f"vision_config.{field}"


def test_a_file_without_its_tower_is_said_to_be_one():
    """transformers' defaults of Llama 4's tower do not fit each other: 768 wide, 4 of them merged, and 5,632."""
    config = recorded()["llama4"]["config"]
    with pytest.raises(InputError, match="there is no vision_config in it") as refused:
        from_config({name: value for name, value in config.items() if name != "vision_config"}, "llama4")
    assert refused.value.field == "vision_config.intermediate_size"
    with pytest.raises(InputError) as refused:
        from_config(config | {"vision_config": {}}, "llama4")
    assert not refused.value.notes


def test_masks_rule_flash_attention_out():
    spec = from_config(recorded()["mllama"]["config"], "mllama")
    with pytest.raises(NotModeled, match="flash attention in Llama"):
        trace(spec, Workload(1, 64, attention="flash", images=Images(1, 56, 56)))


@pytest.mark.parametrize(("side", "copies"), [(56, 3), (98, 0)])
def test_a_mask_of_odd_rows_is_copied_by_every_layer_that_reads_it(side: int, copies: int):
    """4 x 17 keys are 68, for which torch makes rows of 72 elements on GPUs; 4 x 50 are a multiple of 8."""
    config = recorded()["mllama"]["config"]
    spec = from_config(config | {"vision_config": config["vision_config"] | {"image_size": side}}, "mllama")
    tree = trace(spec, Workload(1, 64, attention="sdpa", images=Images(1, side, side)))
    shapes = [saved.shape for compute in computes(tree) for saved in compute.saved]
    keys = 4 * ((side // 14) ** 2 + 1)
    assert shapes.count((1, 1, 64, -(-keys // 8) * 8)) == (copies or 1)
    assert shapes.count((1, 1, 64, keys)) == 1  # what the copies are made of
