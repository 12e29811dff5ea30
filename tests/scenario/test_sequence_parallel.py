"""sequence_parallel_size of a scenario: what it means for the batch, and where DeepSpeed refuses it."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from zsim.errors import InputError, NotModeled
from zsim.model.architecture import Architecture
from zsim.model.families import FAMILIES
from zsim.model.huggingface import from_config
from zsim.model.kernels import Attention
from zsim.model.spec import Module, Workload
from zsim.plan.spec import DeepSpeedPlan
from zsim.scenario import Setup
from zsim.scenario.load import load
from zsim.scenario.sequences import check_shared

ROOT = Path(__file__).parents[2]
LLAMA = str(ROOT / "scenarios/models/llama-3.1-8b/config.json")  # 32 heads, 8 for keys and values

SHARED = Workload(1, 4800, sequence_parallel_size=2)

Write = Callable[..., Path]


def resolved(write: Write, *overrides: str, **fields: str) -> Setup:
    given = {"model": LLAMA, "zero": "{stage: 3}", "seq_len": "8192", "sequence_parallel_size": "4"} | fields
    return load(write(**given), overrides).resolve()


@pytest.mark.parametrize(
    ("fields", "micro_batch", "grad_accum"),
    [
        ({"micro_batch": "3"}, 3, 1),
        ({"micro_batch": "1", "train_batch_size": "16"}, 1, 8),
        ({"micro_batch": "", "train_batch_size": "16", "grad_accum": "2"}, 4, 2),
    ],
)
def test_groups_of_ranks_are_what_the_batch_counts(
    write: Write, fields: dict[str, str], micro_batch: int, grad_accum: int
) -> None:
    """train_batch_size = micro_batch x grad_accum x (8 ranks / 4)."""
    setup = resolved(write, **fields)
    assert isinstance(setup.plan, DeepSpeedPlan)
    assert (setup.workload.micro_batch, setup.plan.grad_accum) == (micro_batch, grad_accum)
    assert (setup.plan.sequence_parallel_size, setup.plan.data_parallel_size) == (4, 2)
    tokens = setup.workload.tokens * setup.plan.world_size * setup.plan.grad_accum
    assert tokens == micro_batch * grad_accum * 2 * 8192
    assert any("4 neighbouring GPUs share each sequence, 2,048 tokens each" in note for note in setup.assumptions)


REFUSED: list[tuple[dict[str, str], type[InputError], str, str]] = [
    ({"sequence_parallel_size": "3"}, InputError, "sequence_parallel_size", "3 does not divide the 8 ranks"),
    ({"sequence_parallel_size": "16"}, InputError, "sequence_parallel_size", "16 does not divide the 8 ranks"),
    ({"sequence_parallel_size": "0"}, InputError, "sequence_parallel_size", "0 is out of range"),
    ({"seq_len": "8190"}, InputError, "seq_len", "8190 is not divisible by sequence_parallel_size 4"),
    ({"attention": "eager"}, InputError, "attention", "eager needs a mask, which Ulysses leaves away"),
    ({"train_batch_size": "3"}, InputError, "train_batch_size", "3 is no multiple of 2 ranks"),
    ({"kernels": "unsloth"}, NotModeled, "kernels", "Unsloth's kernels"),
    ({"kernels": "flash-attn"}, NotModeled, "kernels", "flash-attn's kernels"),
    (
        {"framework": "{name: deepspeed, version: 0.16.9}"},
        InputError,
        "sequence_parallel_size",
        "DeepSpeed 0.16.9 has no UlyssesSPAttentionHF",
    ),
    ({"framework": "fsdp2", "zero": ""}, NotModeled, "sequence_parallel_size", "sequence parallelism with fsdp2"),
]


@pytest.mark.parametrize(("fields", "kind", "field", "says"), REFUSED, ids=[case[3] for case in REFUSED])
def test_refused(write: Write, fields: dict[str, str], kind: type[InputError], field: str, says: str) -> None:
    with pytest.raises(kind) as refused:
        resolved(write, **fields)
    assert type(refused.value) is kind
    assert says in refused.value.message
    assert refused.value.field == field
    assert refused.value.line
    assert refused.value.accepted


def test_sdpa_loses_the_window_of_sliding_layers(write: Write, tmp_path: Path) -> None:
    config = {
        "model_type": "mistral", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
        "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 96, "sliding_window": 256, "head_dim": 16,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for attention, loses in (("sdpa", True), ("flash", False)):
        setup = resolved(write, model=str(tmp_path / "config.json"), attention=attention)
        windows = {kernel.window for kernel in attentions(setup.tree)}
        assert windows == ({None} if loses else {256})
        assert loses == any("sliding layers attend to the whole sequence" in note for note in setup.assumptions)


def attentions(module: Module) -> Iterator[Attention]:
    for item in module.body:
        if isinstance(item, Module):
            yield from attentions(item)
        else:
            yield from (kernel for kernel in item.forward if isinstance(kernel, Attention))


@pytest.mark.parametrize("stage", ["0", "{stage: 1, grad_accum_dtype: float32}"])
def test_optimizers_without_zero_are_not_simulated(write: Write, stage: str) -> None:
    from zsim.program.lower import lower

    setup = resolved(write, zero=stage if stage.startswith("{") else f"{{stage: {stage}}}")
    with pytest.raises(NotModeled, match="sequence parallelism in stage"):
        lower(setup.model, setup.tree, setup.plan, setup.workload)


SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "vocab_size": 96,
}


def test_families_are_taken_where_their_configuration_has_what_deepspeed_asks_for() -> None:
    """register_with_transformers reads num_key_value_heads of the model's configuration."""
    transformers = pytest.importorskip("transformers")
    model = from_config({"model_type": "llama", **SIZES}, "llama")
    assert isinstance(model.arch, Architecture)
    taken = Counter[bool]()
    for family in FAMILIES:
        other = replace(model, arch=replace(model.arch, family=family))
        config = transformers.AutoConfig.for_model(family).get_text_config()
        takes = accepted(lambda: check_shared(other, SHARED, 4, "deepspeed"), InputError)  # noqa: B023
        # and whose head_dim is the width of a query (DeepSeek's is that of the rotated part alone) in every layer
        heads = {getattr(layer, "head_dim", None) for layer in getattr(config, "per_layer_config", ())}
        one_width = len(heads) < 2 and getattr(config, "qk_head_dim", None) in (None, getattr(config, "head_dim", None))
        assert takes == (hasattr(config, "num_key_value_heads") and one_width), family
        taken[takes] += 1
    assert taken[True] > taken[False] > 5


def test_heads_are_refused_as_deepspeed_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.sequence_parallel import ulysses_sp

    model = from_config({"model_type": "llama", **SIZES}, "llama")
    arch = model.arch
    assert isinstance(arch, Architecture)
    monkeypatch.setattr(ulysses_sp, "register_all_to_all_group", lambda group: "")
    monkeypatch.setattr(ulysses_sp.dist, "get_rank", lambda group: 0)
    compared = set()
    for size in (2, 3, 4, 6, 8, 12, 16):
        monkeypatch.setattr(ulysses_sp.dist, "get_world_size", lambda group, size=size: size)
        for heads, kv_heads in ((8, 8), (8, 2), (12, 4), (12, 1), (16, 6), (24, 8), (28, 4)):
            other = replace(model, arch=replace(arch, heads=heads, kv_heads=kv_heads))
            workload = replace(SHARED, sequence_parallel_size=size)
            takes = accepted(lambda: check_shared(other, workload, size, "deepspeed"), InputError)  # noqa: B023
            theirs = accepted(
                lambda: ulysses_sp.UlyssesSPAttentionHF(None, 1, heads, 16, kv_heads, 2, None, True),  # noqa: B023
                ValueError,
            )
            assert takes == theirs, (size, heads, kv_heads)
            compared.add(takes)
    assert compared == {True, False}


def accepted(act: Callable[[], object], error: type[Exception]) -> bool:
    try:
        act()
    except error:
        return False
    return True
