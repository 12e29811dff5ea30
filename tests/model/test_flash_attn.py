"""Kernels of flash-attn and xformers: what they keep, by arithmetic, and where xformers has weights in one storage."""

from __future__ import annotations

import pytest

from tests.model.ledger import computes
from zsim.errors import NotModeled
from zsim.model.huggingface import from_config
from zsim.model.kernels import Gemm
from zsim.model.spec import Compute, ModelSpec, Workload
from zsim.model.trace import trace
from zsim.plan.spec import AnyPlan, DdpPlan, DeepSpeedPlan, Fsdp2Plan
from zsim.program.lower import under

LAYERS, WIDTH, KV, FFN, VOCAB, B, S = 2, 64, 32, 176, 300, 2, 24
TOKENS = B * S


def model() -> ModelSpec:
    config = {
        "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": S,
    }  # fmt: skip
    return from_config(config, "x")


def works(kernels: str, **workload: bool) -> list[Compute]:
    return list(computes(trace(model(), Workload(B, S, kernels=kernels, **workload))))


def saved(kernels: str) -> int:
    return sum(work.saved_bytes for work in works(kernels) if work.category == "activations")


def test_bytes_saved_per_token() -> None:
    """SwiGLU: gate, its activation, up and their product, 2 bytes each; xformers' kernel keeps gate and up alone.

    Norms: the input, which the residual stream holds anyway, and two statistics, of which Liger has one."""
    norms = 2 * LAYERS + 1
    assert saved("flash-attn") - saved("liger") == TOKENS * (LAYERS * 2 * FFN + norms * 4)
    assert saved("flash-attn") - saved("flash-attn packed") == TOKENS * LAYERS * 2 * 2 * FFN


def test_the_packed_kernel_multiplies_as_much_as_three_products() -> None:
    def flops(kernels: str, phase: str) -> float:
        of_phase = [kernel for work in works(kernels) for kernel in getattr(work, phase)]
        return sum(kernel.flops for kernel in of_phase if isinstance(kernel, Gemm))

    for phase in ("forward", "backward"):
        assert flops("flash-attn packed", phase) == flops("flash-attn", phase)
    grads = [sorted(grad for work in works(k) for grad in work.grads) for k in ("flash-attn", "flash-attn packed")]
    assert grads[0] == grads[1] == list(range(len(model().parameters)))


def test_loss_keeps_a_copy_of_the_logits_and_makes_a_gradient_beside_it() -> None:
    """Float32, of all tokens but the last of each sequence; the copy's gradient is scattered into a tensor of all."""
    logits = [work for work in works("flash-attn") if work.category == "logits"]
    copy, whole = 4 * B * (S - 1) * VOCAB, 4 * TOKENS * VOCAB
    kept = sum(work.saved_bytes for work in logits) - 2 * TOKENS * WIDTH  # but what the head keeps
    assert copy <= kept <= copy + 64 * TOKENS
    loss = next(work for work in logits if work.label == "cross_entropy")
    assert copy + copy <= loss.saved_bytes + loss.backward_peak <= copy + whole + 64 * TOKENS


def test_a_cache_in_float32_is_there_until_the_forward_is_over() -> None:
    bare, wide = (
        next(w for w in works("flash-attn", wide_cache=wide) if w.label == "cross_entropy") for wide in (False, True)
    )
    assert wide.saved == bare.saved
    assert wide.forward_live == bare.forward_live
    cache = [number for number, nbytes in wide.forward_alive[0] if nbytes == 4 * TOKENS * KV]
    assert len(cache) == 2 * LAYERS


@pytest.mark.parametrize(
    ("plan", "kernels"),
    [
        (DdpPlan(world_size=2), "flash-attn"),
        (DeepSpeedPlan(world_size=2, stage=1), "flash-attn packed"),
        (DeepSpeedPlan(world_size=2, stage=2), "flash-attn packed"),
    ],
)
def test_zero_packs_weights_by_flattening_them(plan: AnyPlan, kernels: str) -> None:
    for before in ("flash-attn", "flash-attn packed"):
        assert under(plan, Workload(B, S, kernels=before)).kernels == kernels


@pytest.mark.parametrize("plan", [DeepSpeedPlan(world_size=2, stage=3), Fsdp2Plan(world_size=2)])
def test_gathered_shards_are_refused(plan: AnyPlan) -> None:
    with pytest.raises(NotModeled, match="xformers") as refused:
        under(plan, Workload(B, S, kernels="flash-attn"))
    assert refused.value.field == "kernels"
