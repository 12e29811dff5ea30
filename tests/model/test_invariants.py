"""What holds for every model and every way to run it."""

from __future__ import annotations

import time
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.ledger import Ledger, block, computes, flops, modules
from zsim.errors import InputError, NotModeled
from zsim.model.bare import from_params
from zsim.model.huggingface import from_config
from zsim.model.kernels import Gemm
from zsim.model.spec import ModelSpec, Workload
from zsim.model.trace import trace

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 199,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kernels", "checkpointing"),
    [
        *product(("torch", "liger"), ("none", "full", "selective")),
        *product(("flash-attn", "flash-attn packed"), ("none", "full")),
    ],
)
def test_sizes_of_temporaries_add_up(kernels: str, checkpointing: str) -> None:
    """To what is alive at the peak and after each op; below zero, where more counts as saved than there is, to none."""
    workload = Workload(2, 16, kernels=kernels, checkpointing=checkpointing)
    works = list(computes(trace(from_config(LLAMA, "x"), workload)))
    for work in works:
        for phase in ("forward", "backward", "recompute"):
            alive = getattr(work, f"{phase}_alive")
            sums = [max(0, getattr(work, f"{phase}_{when}")) for when in ("peak", "live")]
            assert [sum(nbytes for _, nbytes in tensors) for tensors in alive] == sums, (work.label, phase)
    assert any(len(work.backward_alive[0]) > 2 for work in works)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Small models of several families."""
    head_dim = draw(st.sampled_from([8, 16]))
    groups, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = groups * kv_heads
    family = draw(st.sampled_from(["llama", "qwen2", "qwen3", "gemma2", "mixtral", "gpt2", "phi", "gpt_neox"]))
    layers, vocab = draw(st.integers(1, 4)), draw(st.integers(10, 300))
    if family == "gpt2":
        return {
            "model_type": family, "n_embd": heads * head_dim, "n_layer": layers, "n_head": heads, "vocab_size": vocab,
            "resid_pdrop": draw(st.sampled_from([0.0, 0.1])),
        }  # fmt: skip
    return {
        "model_type": family, "hidden_size": heads * head_dim, "intermediate_size": draw(st.integers(8, 200)),
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": head_dim, "vocab_size": vocab, "num_local_experts": 4, "num_experts_per_tok": 2,
        "tie_word_embeddings": draw(st.booleans()),
    }  # fmt: skip


workloads = st.builds(
    Workload,
    micro_batch=st.integers(1, 3),
    seq_len=st.integers(2, 40),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    attention=st.sampled_from(["flash", "efficient", "eager"]),
    checkpointing=st.sampled_from(["none", "full", "selective"]),
    loss=st.sampled_from(["hf", "fused"]),
    device=st.sampled_from(["cuda", "cpu"]),
)


def frozen(spec: ModelSpec, *patterns: str) -> ModelSpec:
    parameters = tuple(
        replace(p, trainable=not any(fnmatchcase(p.name, pattern) for pattern in patterns)) for p in spec.parameters
    )
    return replace(spec, parameters=parameters)


@given(configs(), workloads)
@settings(max_examples=120, deadline=None)
def test_every_step_is_consistent(config: dict[str, Any], workload: Workload):
    spec = from_config(config, "x")
    if workload.loss == "fused" and any(p.name == "lm_head.bias" for p in spec.parameters):
        with pytest.raises(NotModeled, match="head with a bias"):
            trace(spec, workload)
        return
    tree = trace(spec, workload)
    ledger = Ledger(spec, tree, itemsize=4 if workload.dtype == "float32" else 2)
    assert sorted(ledger.ready) == sorted(parameter.name for parameter in spec.parameters)
    assert ledger.saved == 0
    assert ledger.after_forward <= ledger.peak_forward
    work = list(computes(tree))
    assert all(item.forward_peak >= item.forward_live >= 0 for item in work)
    for item in work:
        gradients = sum(spec.parameters[i].numel * ledger.itemsize for i in item.grads)
        assert item.backward_peak + item.saved_bytes + item.resaved_bytes + gradients >= item.backward_live
        if workload.checkpointing != "selective":  # which drops in recomputation what still counts as saved
            assert item.backward_peak + gradients >= 0
            assert item.backward_live >= 0
    assert all(kernel.bytes >= 0 and kernel.launches >= 1 for kernel in ledger.forward_kernels)
    names = [(module.name, item.label) for module in modules(tree) for item in module.body if item in work]
    assert len(names) == len(set(names))
    rerun = sum(flops(list(item.recompute)) for item in work)
    assert rerun <= flops(ledger.forward_kernels)
    assert (rerun > 0) == (workload.checkpointing != "none")


@given(configs(), st.integers(1, 3), st.integers(2, 40))
@settings(max_examples=40, deadline=None)
def test_products_do_what_the_parameters_ask(config: dict[str, Any], batch: int, seq: int):
    """2 FLOP per weight and token forward, twice that backward: each trainable matrix once, experts top-k of all."""
    spec = from_config(config, "x")
    tree = trace(spec, Workload(batch, seq))
    ledger = Ledger(spec, tree)
    matrices = 0.0
    for parameter in spec.parameters:
        if len(parameter.shape) < 2 or "embed" in parameter.name or "wte" in parameter.name or "wpe" in parameter.name:
            continue
        matrices += parameter.numel * (2 / 4 if parameter.expert else 1)
    if spec.arch.tied:
        matrices += spec.arch.vocab * spec.arch.hidden
    products = [kernel for kernel in ledger.forward_kernels if isinstance(kernel, Gemm)]
    assert sum(kernel.flops for kernel in products) == 2 * batch * seq * matrices
    backward = [kernel for kernel in ledger.backward_kernels if isinstance(kernel, Gemm)]
    assert sum(kernel.flops for kernel in backward) == 4 * batch * seq * matrices


@given(configs(), st.integers(2, 30))
@settings(max_examples=30, deadline=None)
def test_checkpointing_keeps_the_input_and_changes_no_gradient(config: dict[str, Any], seq: int):
    spec = from_config(config, "x")
    plain, full, some = (
        Ledger(spec, trace(spec, Workload(1, seq, checkpointing=policy))) for policy in ("none", "full", "selective")
    )
    assert plain.ready == full.ready == some.ready
    assert plain.calls == full.calls == some.calls
    assert flops(plain.forward_kernels) == flops(full.forward_kernels) == flops(some.forward_kernels)
    kept = sum(item.saved_bytes for item in computes(block(full.tree)))
    assert kept == seq * spec.arch.hidden * 2
    rebuilt = sum(item.saved_bytes + item.resaved_bytes for item in computes(block(full.tree)))
    once = sum(item.saved_bytes for item in computes(block(plain.tree)))
    assert once <= rebuilt <= once + kept
    assert kept <= sum(item.saved_bytes for item in computes(block(some.tree))) <= rebuilt
    assert flops(some.backward_kernels) <= flops(full.backward_kernels)


@given(configs(), st.integers(1, 4), st.sampled_from([8, 24]))
@settings(max_examples=30, deadline=None)
def test_saved_bytes_grow_with_the_batch(config: dict[str, Any], batch: int, seq: int):
    spec = from_config(config, "x")

    def saved(size: int) -> int:
        return sum(item.saved_bytes for item in computes(block(trace(spec, Workload(size, seq)))))

    assert saved(batch + 1) - saved(batch) == saved(2) - saved(1) > 0


def test_blocks_share_what_names_no_parameter():
    spec = from_config({**LLAMA, "num_hidden_layers": 64}, "deep")
    tree = trace(spec, Workload(1, 64))
    blocks = [module for module in modules(tree) if module.role == "block"]
    assert [module.name for module in blocks] == [f"model.layers.{i}" for i in range(64)]
    first, last = list(computes(blocks[0])), list(computes(blocks[-1]))
    for ours, theirs in zip(first, last, strict=True):
        assert (ours is theirs) == (not ours.grads)
        assert ours.forward is theirs.forward
        assert ours.saved is theirs.saved
    assert [spec.parameters[i].name for item in last for i in item.grads] == [
        spec.parameters[i].name.replace("layers.0.", "layers.63.") for item in first for i in item.grads
    ]
    assert trace(spec, Workload(1, 64)) is tree


def test_frozen_parameters_cost_no_gradient():
    spec = from_config(LLAMA, "x")
    workload = Workload(1, 32)
    everything = Ledger(spec, trace(spec, workload))
    some = frozen(spec, "model.layers.0.*", "model.layers.2.mlp.*")
    partly = Ledger(some, trace(some, workload))
    wanted = [name for name in everything.ready if not name.startswith(("model.layers.0.", "model.layers.2.mlp."))]
    assert partly.ready == wanted
    assert flops(partly.backward_kernels) < flops(everything.backward_kernels)


def test_nothing_runs_backward_below_the_lowest_trainable_parameter():
    spec = from_config(LLAMA, "x")
    top = frozen(spec, "model.embed_tokens.*", "model.layers.[01].*")
    tree = trace(top, Workload(1, 32))
    blocks = [module for module in modules(tree) if module.role == "block"]
    for lower in blocks[:2]:
        assert not any(item.backward or item.saved for item in computes(lower))
    assert any(item.backward for item in computes(blocks[2]))
    head = frozen(spec, "model.*")
    ledger = Ledger(head, trace(head, Workload(1, 32)))
    assert ledger.ready == ["lm_head.weight"]


def test_nothing_trainable_is_refused():
    with pytest.raises(InputError, match="no parameter is trainable"):
        trace(frozen(from_config(LLAMA, "x"), "*"), Workload(1, 32))


def test_fused_loss_never_holds_all_logits():
    spec = from_config({**LLAMA, "vocab_size": 4096}, "x")
    logits = 2 * 256 * 4096
    plain = Ledger(spec, trace(spec, Workload(1, 256)))
    fused = Ledger(spec, trace(spec, Workload(1, 256, loss="fused")))
    assert plain.peak_backward > 6 * logits
    assert fused.peak_backward < 2 * logits + 2 * spec.numel
    assert fused.ready == plain.ready
    products = [sum(flops(k) for k in (run.forward_kernels, run.backward_kernels)) for run in (plain, fused)]
    assert products[0] == products[1]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_torchtitan_multiplies_the_same_matrices(family: str):
    spec = from_config({**LLAMA, "model_type": family}, "x")
    theirs, ours = (Ledger(spec, trace(spec, Workload(2, 32, implementation=i))) for i in ("torchtitan", "hf"))
    assert sorted(theirs.ready) == sorted(ours.ready)
    assert flops(theirs.forward_kernels) == flops(ours.forward_kernels)
    assert [name for name, _ in theirs.calls][:2] == ["", "tok_embeddings"]
    with pytest.raises(NotModeled):
        trace(from_config({**LLAMA, "model_type": "gemma"}, "x"), Workload(1, 32, implementation="torchtitan"))


def test_torchtitan_of_its_time():
    """Repeated heads until January 2026, norms in pieces until torch had a kernel for them in August 2025; compiled,
    norms are fused from their pieces."""
    spec = from_config({**LLAMA, "model_type": "llama"}, "x")

    def made(label: str, month: tuple[int, int] | None, compile: bool = False) -> float:
        tree = trace(spec, Workload(2, 32, implementation="torchtitan", torchtitan=month, compile=compile))
        return sum(k.bytes for c in computes(block(tree)) for k in c.forward if getattr(k, "label", "") == label)

    assert made("norm", None) < 0.2 * made("norm", (2025, 7))
    assert made("norm", (2025, 8)) == made("norm", None)
    assert made("norm", None, compile=True) == made("norm", (2024, 12), compile=True)
    for month, heads in ((2026, 1), LLAMA["num_attention_heads"]), (None, LLAMA["num_key_value_heads"]):
        tree = trace(spec, Workload(2, 32, implementation="torchtitan", torchtitan=month))
        assert {k.kv_heads for c in computes(block(tree)) for k in c.forward if hasattr(k, "kv_heads")} == {heads}


def test_compiled_activations_without_a_gate():
    """However many kernels NewGELUActivation has: the product's result in and as much out, with a gradient backward."""
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 32}
    one = 2 * 2 * 32 * 4 * 64
    for weights in (None, "float32"):  # pure 16 bits, and under autocast, where the power is in float32
        tree = trace(from_config(config, "x"), Workload(2, 32, compile=True, weights=weights))
        work = next(c for c in computes(block(tree)) if c.label.startswith("activation"))
        assert [sum(k.bytes for k in way if k.label == "activation") for way in (work.forward, work.backward)] == [
            2 * one,
            3 * one,
        ]


@pytest.mark.parametrize("implementation", ["hf", "torchtitan"])
def test_compiled_activations_with_a_gate(implementation: str):
    """SiLU and product: 6 of 10 bytes per element forward, 10 of 18 backward, for which 0.57 stands."""
    spec = from_config({**LLAMA, "model_type": "llama"}, "x")
    eager, compiled = (
        list(computes(block(trace(spec, Workload(2, 32, implementation=implementation, compile=on)))))
        for on in (False, True)
    )
    for way in ("forward", "backward"):
        made = [
            sum(k.bytes for c in works for k in getattr(c, way) if getattr(k, "label", "") == "activation")
            for works in (eager, compiled)
        ]
        assert made[1] == pytest.approx(0.57 * made[0])


def test_rows_of_odd_sizes():
    """Of products with a vocabulary of GPT-2's, in 16 bits: its head's three."""
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 32}

    def odd(vocab: int) -> int:
        tree = trace(from_config({**config, "vocab_size": vocab}, "x"), Workload(2, 32))
        return sum(getattr(k, "unaligned", False) for c in computes(tree) for k in (*c.forward, *c.backward))

    assert (odd(50257), odd(50304)) == (3, 0)


def test_experts_beyond_the_tokens_stay_idle():
    config = {**LLAMA, "model_type": "mixtral", "num_local_experts": 64, "num_experts_per_tok": 2}
    tree = trace(from_config(config, "x"), Workload(1, 4))
    products = [k for item in computes(block(tree)) for k in item.forward if getattr(k, "label", "") == "grouped_gemm"]
    assert {(kernel.m, kernel.batch) for kernel in products} == {(1, 8)}


def test_sliding_layers_have_a_window():
    config = {**LLAMA, "model_type": "gemma2", "head_dim": 16, "sliding_window": 16, "num_hidden_layers": 4}
    tree = trace(from_config(config, "x"), Workload(1, 64))
    windows = [
        [kernel.window for item in computes(module) for kernel in item.forward if hasattr(kernel, "window")]
        for module in modules(tree)
        if module.role == "block"
    ]
    assert windows == [[16], [None], [16], [None]]


@pytest.mark.parametrize("transformers", [None, (4, 46)])
def test_sdpa_is_given_a_mask_by_layers_whose_window_the_sequence_fills(transformers: tuple[int, int] | None):
    config = {**LLAMA, "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 64, "sliding_window_pattern": 2}
    spec = from_config({**config, "num_hidden_layers": 4}, "x")

    def kernels(tokens: int) -> list[str]:
        tree = trace(spec, Workload(1, tokens, attention="sdpa", transformers=transformers))
        found = [
            [k for c in computes(m) for k in c.forward if hasattr(k, "window")]
            for m in modules(tree)
            if m.role == "block"
        ]
        return [kernel.impl for (kernel,) in found]

    assert set(kernels(63)) == {"sdpa"}
    assert kernels(64) == ["masked", "sdpa"] * 2


@given(st.integers(100_000, 10**12))
@settings(max_examples=60, deadline=None)
def test_a_bare_count_is_exact(n: int):
    spec = from_params(n)
    assert spec.numel == n
    assert f"{n:,} parameters" in spec.notes[0]


@pytest.mark.parametrize("n", [0, -8e9, 99_999, 8e9 + 0.5, float("nan"), float("inf"), True])
def test_a_bare_count_that_is_none(n: float):
    with pytest.raises(InputError) as caught:
        from_params(n)
    assert caught.value.field == "params"


def test_a_bare_count_trains_like_any_model():
    for implementation in ("hf", "torchtitan"):
        spec = from_params(1_234_567)
        ledger = Ledger(spec, trace(spec, Workload(1, 64, implementation=implementation)))
        assert sorted(ledger.ready) == sorted(parameter.name for parameter in spec.parameters)


def test_a_tree_of_64_layers_is_built_in_milliseconds():
    config = {
        "model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
        "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064,
    }  # fmt: skip
    spec = from_config(config, "Qwen2.5-32B")
    best = 1.0
    for _ in range(5):
        spec._cache.clear()
        start = time.process_time()
        trace(spec, Workload(1, 2048))
        best = min(best, time.process_time() - start)
    assert best < 0.05  # 0.005 on a quiet core
