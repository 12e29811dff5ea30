"""Gemma 4 as transformers 5.24 has it: counts of the published sizes, and what is not simulated."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.model.ledger import computes
from zsim.errors import InputError, NotModeled
from zsim.model import pixels
from zsim.model.families.gemma4 import sharing
from zsim.model.huggingface import from_config
from zsim.model.kernels import DTYPE_BYTES, Attention
from zsim.model.lora import Lora, Tuning, tune
from zsim.model.parts import part_of
from zsim.model.spec import Images, ModelSpec, Workload
from zsim.model.trace import trace
from zsim.plan.spec import DdpPlan, Fsdp1Plan, Fsdp2Plan, Saving
from zsim.program.lower import lower
from zsim.program.ops import Alloc
from zsim.program.units import groups_of

S, F = "sliding_attention", "full_attention"
COMMON = {
    "model_type": "gemma4_text", "vocab_size": 262144, "final_logit_softcapping": 30.0, "head_dim": 256,
    "global_head_dim": 512,
}  # fmt: skip
E2B = {
    **COMMON, "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35, "num_attention_heads": 8,
    "num_key_value_heads": 1, "sliding_window": 512, "num_kv_shared_layers": 20, "hidden_size_per_layer_input": 256,
    "use_double_wide_mlp": True, "layer_types": ([S] * 4 + [F]) * 7,
}  # fmt: skip
BIG = {**COMMON, "attention_k_eq_v": True, "sliding_window": 1024, "hidden_size_per_layer_input": 0}
MODELS: dict[str, tuple[int, dict[str, Any]]] = {  # parameters of Gemma4ForCausalLM on the meta device
    "E2B": (4_628_569_344, E2B),
    "E4B": (
        7_463_013_376,
        {
            **COMMON, "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 42,
            "num_attention_heads": 8, "num_key_value_heads": 2, "sliding_window": 512, "num_kv_shared_layers": 18,
            "hidden_size_per_layer_input": 256, "layer_types": ([S] * 5 + [F]) * 7,
        },
    ),
    "31B": (
        30_697_345_280,
        {
            **BIG, "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60, "num_attention_heads": 32,
            "num_key_value_heads": 16, "num_global_key_value_heads": 4,
        },
    ),
    "26B-A4B": (
        25_233_141_760,
        {
            **BIG, "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16,
            "num_key_value_heads": 8, "num_global_key_value_heads": 2, "enable_moe_block": True, "num_experts": 128,
            "top_k_experts": 8, "moe_intermediate_size": 704,
        },
    ),
}  # fmt: skip


def model(**changes: Any) -> ModelSpec:
    return from_config(E2B | changes, "gemma")


@pytest.mark.parametrize("name", MODELS)
def test_parameters_of_the_published_sizes(name: str) -> None:
    count, config = MODELS[name]
    assert from_config(config, name).numel == count


def test_buffers_are_tables_and_scales() -> None:
    """E2B: frequencies of both kinds of layers, in float32 and twice, and 37 scales of one number."""
    assert model().buffers_bytes == 4 * (256 + 512 + 2 + 35)


def test_last_layers_read_keys_and_values_of_the_last_ones_that_make_them() -> None:
    modes = sharing(model().arch)  # type: ignore[arg-type]
    assert [layer for layer, mode in enumerate(modes) if mode == "store"] == [13, 14]
    assert modes[15:] == ("reuse",) * 20
    names = {p.name for p in model().parameters}
    assert "model.layers.14.self_attn.k_proj.weight" in names
    assert not any(name.startswith("model.layers.15.self_attn.k") for name in names)


@pytest.mark.parametrize("digits", [1, 2, 3])
def test_a_file_that_transformers_wrote_is_the_same_model(digits: int) -> None:
    """It states the layers that differ one by one, in place of global_head_dim, with as many digits as the last has."""
    written = {key: value for key, value in E2B.items() if key != "global_head_dim"}
    written["per_layer_config"] = {str(layer).zfill(digits): {"head_dim": 512} for layer in range(4, 35, 5)}
    assert from_config(json.loads(json.dumps(written)), "gemma").parameters == model().parameters


def kernels(spec: ModelSpec, **workload: Any) -> set[tuple[Any, ...]]:
    works = [work for each in computes(trace(spec, Workload(1, 1024, **workload))) for work in each.forward]
    return {(k.impl, k.head_dim, k.kv_heads, k.causal, k.window) for k in works if isinstance(k, Attention)}


def test_sdpa_runs_the_memory_efficient_kernel() -> None:
    """Of heads of 512, and where a mask holds the window, if cuDNN's is not first; FlashAttention below the window."""
    assert kernels(model(), attention="sdpa") == {("efficient", 512, 8, True, None), ("masked", 256, 8, False, None)}
    longer = kernels(model(sliding_window=2048), attention="sdpa")
    assert longer == {("efficient", 512, 8, True, None), ("sdpa", 256, 1, True, 2048)}


@pytest.mark.parametrize("attention", ["flash", "flash3", "flash4", "cudnn"])
def test_kernels_that_do_not_take_heads_of_512_are_refused(attention: str) -> None:
    with pytest.raises(NotModeled, match="heads of 512"):
        kernels(model(), attention=attention)
    assert kernels(model(global_head_dim=256), attention=attention)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "both ways"),
        ({"hidden_size_per_layer_input": 0}, "transformers 5.24 fails"),
        ({"per_layer_config": {"4": {"head_dim": 512, "sliding_window": 3}}}, "otherwise than in their type"),
        ({"per_layer_config": {"3": {"head_dim": 512}}}, "otherwise than in their type"),
        ({"per_layer_config": {"04": {"head_dim": 512}, "4": {"head_dim": 512}}}, "otherwise than in their type"),
    ],
)
def test_what_is_not_simulated(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(NotModeled, match=message):
        model(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_shared_layers": 33}, "a layer of each type"),
        ({"num_kv_shared_layers": 36}, "num_kv_shared_layers"),
        ({"enable_moe_block": True}, "num_experts"),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 8, "moe_intermediate_size": 8}, "more than"),
        ({"per_layer_config": []}, "an object"),
        ({"per_layer_config": {"last": {"head_dim": 512}}}, "has a key 'last'"),
        ({"layer_types": ["chunked_attention"] * 35}, "chunked_attention"),
    ],
)
def test_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        model(**changes)


SMALL_TOWER = {"model_type": "gemma4_vision", "hidden_size": 768, "num_hidden_layers": 16, "use_clipped_linears": True}
LARGE_TOWER = {
    "model_type": "gemma4_vision", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 72, "standardize": True,
}  # fmt: skip


def with_tower(name: str, **changes: Any) -> ModelSpec:
    text, tower = MODELS[name][1], SMALL_TOWER if name.startswith("E") else LARGE_TOWER
    return from_config({"model_type": "gemma4", "text_config": text, "vision_config": tower} | changes, name)


@pytest.mark.parametrize(
    ("name", "count", "buffers"),  # of Gemma4ForConditionalGeneration on the meta device, without sound
    [
        ("E2B", 4_797_113_600, 5140),
        ("E4B", 7_632_344_064, 5168),
        ("31B", 31_273_086_512, 12_676),
        ("26B-A4B", 25_805_933_872, 12_556),
    ],
)
def test_parameters_and_buffers_with_the_vision_tower(name: str, count: int, buffers: int) -> None:
    spec = with_tower(name)
    assert (spec.numel, spec.buffers_bytes) == (count, buffers)


@pytest.mark.parametrize(
    ("size", "grid"),  # rows and columns of patches, as get_aspect_ratio_preserving_size has them
    [((768, 768), (48, 48)), ((1080, 1920), (36, 66)), ((224, 280), (42, 54)), ((20, 9000), (3, 840)),
     ((9000, 40), (750, 3))],
)  # fmt: skip
def test_images_are_resized_to_what_280_tokens_hold(size: tuple[int, int], grid: tuple[int, int]) -> None:
    vision = with_tower("E2B").arch.vision  # type: ignore[attr-defined]
    assert pixels.grid(vision, Images(1, *size)) == grid
    assert pixels.image_tokens(vision, Images(1, *size)) == grid[0] * grid[1] // 9 <= 280


def test_image_tokens_of_the_larger_ones_see_each_other() -> None:
    """In layers with a window, which have a mask then, however short the sequence."""
    vision = {**SMALL_TOWER, "default_output_length": 70}
    for both, expected in ((None, {"sdpa"}), ("vision", {"masked"})):
        text = {**E2B, "use_bidirectional_attention": both}
        spec = from_config({"model_type": "gemma4", "text_config": text, "vision_config": vision}, "gemma")
        tree = trace(spec, Workload(1, 256, attention="sdpa", images=Images(1, 64, 64)))
        works = [work for each in computes(tree) for work in each.forward]
        assert {k.impl for k in works if isinstance(k, Attention) and k.head_dim == 256} == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_config": None}, "without its vision tower"),
        ({"vision_config": {"model_type": "siglip_vision_model"}}, "a vision tower siglip"),
    ],
)
def test_towers_that_are_not_simulated(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(NotModeled, match=message):
        with_tower("E2B", **changes)


SOUND = {"audio_config": {"model_type": "gemma4_audio"}}


@pytest.mark.parametrize(
    ("name", "count", "buffers"), [("E2B", 5_104_297_504, 9156), ("E4B", 7_941_100_832, 9184)]
)  # as published
def test_parameters_and_buffers_with_the_audio_tower(name: str, count: int, buffers: int) -> None:
    spec = with_tower(name, **SOUND)
    assert (spec.numel, spec.buffers_bytes) == (count, buffers)
    assert any("given nothing" in note for note in spec.notes)
    heard = [p.name for p in spec.parameters if part_of(p.name) != "language_model" and "audio" in p.name]
    assert heard == [p.name for p in spec.parameters if "audio" in p.name]


def test_an_audio_tower_that_is_given_nothing() -> None:
    """Its layers are units of FSDP that nobody gathers, and have no states; DDP takes it frozen:
    validation/oracles/sequences, `*_vlm_silent_*`."""
    spec = with_tower("E2B", **SOUND)
    workload = Workload(1, 512, attention="sdpa", images=Images(1, 768, 768))
    tree = trace(spec, workload)
    silent = {i for i, p in enumerate(spec.parameters) if ".audio_tower.layers." in p.name}
    units = groups_of(spec, tree)
    assert [set(unit.params) <= silent for unit in units].count(True) == 12
    assert sorted(param for unit in units for param in unit.params) == list(range(len(spec.parameters)))
    rest = sum(p.numel for i, p in enumerate(spec.parameters) if i not in silent)
    for plan in (Fsdp1Plan(world_size=2), Fsdp2Plan(world_size=2)):
        program = lower(spec, tree, plan, workload)
        held = [item for item in (*program.init, *program.steps[0]) if isinstance(item, Alloc)]
        shards = sum(item.nbytes for item in held if item.key.startswith("shard:"))
        states = sum(item.nbytes for item in held if item.category == "optimizer_states")
        size = int(DTYPE_BYTES[plan.storage_dtype])
        assert shards == pytest.approx(size * spec.numel / 2, rel=1e-3)
        assert states == pytest.approx(2 * size * rest / 2, rel=5e-3)  # FSDP2 has none for the projection at the root
        with pytest.raises(NotModeled, match="so has no states"):
            lower(spec, tree, replace(plan, saving=Saving()), workload)
    with pytest.raises(InputError, match="waits for the gradients"):
        lower(spec, tree, DdpPlan(world_size=2), workload)


def test_adapters_in_an_audio_tower_that_is_given_nothing_are_no_units() -> None:
    spec = tune(with_tower("E2B", **SOUND), Tuning(Lora(4)))
    workload = Workload(1, 512, attention="sdpa", images=Images(1, 768, 768))
    with pytest.raises(NotModeled, match="units of adapters in an audio tower"):
        lower(spec, trace(spec, workload), Fsdp2Plan(world_size=2, adapter_units=True), workload)
    spec = tune(with_tower("E2B", **SOUND), Tuning(Lora(4, exclude=("audio_tower", "embed_audio"))))
    lower(spec, trace(spec, workload), Fsdp2Plan(world_size=2, adapter_units=True), workload)


def test_flash_attention_is_refused_with_images() -> None:
    spec = from_config({"model_type": "gemma4", "text_config": {**E2B, "global_head_dim": 256},
                        "vision_config": SMALL_TOWER}, "gemma")  # fmt: skip
    with pytest.raises(NotModeled, match="with its tower"):
        trace(spec, Workload(1, 512, attention="flash", images=Images(1, 768, 768)))


def test_sequences_cannot_be_shared() -> None:
    with pytest.raises(NotModeled, match="sequence parallelism"):
        trace(model(), Workload(1, 1024, attention="sdpa", sequence_parallel_size=2))
