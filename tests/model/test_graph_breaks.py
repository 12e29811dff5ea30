"""Which blocks torch.compile leaves eager, beside what it does with transformers' own."""

from __future__ import annotations

from typing import Any

import pytest

from zsim.model.huggingface import from_config
from zsim.model.spec import Compute, Float8, Module, Workload
from zsim.model.trace import trace

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
}


def computes(module: Module) -> list[Compute]:
    return [work for item in module.body for work in (computes(item) if isinstance(item, Module) else [item])]


def block(**workload: Any) -> list[Compute]:
    tree = trace(from_config({"model_type": "qwen3"} | SMALL, "x"), Workload(seq_len=32, **workload))
    (found,) = [module for module in modules(tree) if module.role == "block"]
    return computes(found)


def modules(module: Module) -> list[Module]:
    return [module, *(one for item in module.body if isinstance(item, Module) for one in modules(item))]


def compiled(**workload: Any) -> bool:
    """Whether torch.compile makes anything else of a block."""
    return block(compile=True, **workload) != block(**workload)


def graphs(batch: int, checkpointed: bool, attention: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is in the graphs of transformers' model, compiled as a whole."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5.24")
    from transformers import modeling_flash_attention_utils as flash

    def attend(q: Any, k: Any, v: Any, *_: Any, causal: bool = False, **__: Any) -> Any:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(
            1, 2
        )

    monkeypatch.setattr(flash, "_lazy_imports", lambda *_, **__: (attend, attend, None, attend, attend))
    torch._dynamo.reset()
    config = transformers.Qwen3Config(**SMALL, attn_implementation="sdpa", use_cache=False)
    model = transformers.Qwen3ForCausalLM(config).train().bfloat16()
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = attention
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    seen: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
        seen.extend(node for part in parts for node in part.graph.nodes)
        return graph.forward

    ids = torch.randint(0, 64, (batch, 16))
    torch.compile(model, backend=backend)(input_ids=ids, labels=ids).loss.backward()
    assert seen
    return seen


@pytest.mark.parametrize(
    ("attention", "checkpointed", "batch"),
    [("flash", True, 1), ("flash", True, 2), ("flash", False, 1), ("sdpa", True, 1)],
)
def test_blocks_are_eager_where_those_of_transformers_are(
    attention: str, checkpointed: bool, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = {"flash": "flash_attention_2"}.get(attention, attention)
    policy = "full" if checkpointed else "none"
    ours = compiled(micro_batch=batch, checkpointing=policy, attention=attention)
    assert ours == (attention == "sdpa" or not checkpointed or batch > 1)
    found = graphs(batch, checkpointed, theirs, monkeypatch)
    assert ours == any("silu" in str(node.target) for node in found)
    masks = [node.kwargs.get("attn_mask") for node in found if "scaled_dot_product" in str(node.target)]
    if attention == "sdpa":  # scenario.releases makes it `efficient`
        assert masks
        assert None not in masks


def test_only_releases_that_look_at_positions_and_modules_of_transformers() -> None:
    def at(release: tuple[int, ...], batch: int) -> bool:
        return compiled(micro_batch=batch, checkpointing="full", transformers=release)

    assert at((4, 43), 1)
    assert not at((4, 45), 2)
    assert compiled(micro_batch=1, checkpointing="full", implementation="torchtitan")


def test_float8_of_blocks_left_eager_is_cast_by_kernels_of_its_own() -> None:
    float8 = Float8(exclude=("lm_head",))
    assert not compiled(micro_batch=1, checkpointing="full", float8=float8)
    assert compiled(micro_batch=1, float8=float8)
