"""Losses besides transformers' own, and what compiled blocks keep: bytes by arithmetic and from torch itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from zsim.errors import NotModeled
from zsim.model.families import build
from zsim.model.huggingface import from_config, read_config
from zsim.model.layers import Net
from zsim.model.spec import Compute, ModelSpec, Module, Workload
from zsim.model.trace import parameters, trace

LLAMA = Path(__file__).parents[2] / "scenarios" / "models" / "llama-3.1-8b"
TOKENS, VOCABULARY = 512, 128256


def works(module: Module) -> list[Compute]:
    return [work for item in module.body for work in (works(item) if isinstance(item, Module) else [item])]


def of_loss(**workload: str) -> Compute:
    tree = trace(read_config(LLAMA), Workload(1, TOKENS, **workload))
    return next(work for work in works(tree) if work.label.startswith("cross_entropy"))


def test_compiled_loss_keeps_the_logits_as_they_came() -> None:
    """2 bytes per logit saved and 2 for the gradient, where eager mode saves 4 and holds 4 and 4 for gradients."""
    eager, compiled = (of_loss(implementation="torchtitan", loss=loss) for loss in ("hf", "compiled"))
    logits = TOKENS * VOCABULARY
    assert eager.backward_peak + eager.saved_bytes == pytest.approx(12 * logits, rel=0.01)
    assert compiled.backward_peak + compiled.saved_bytes == pytest.approx(4 * logits, rel=0.01)


@pytest.mark.parametrize("implementation", ["torchtitan", "hf"])
def test_logits_that_are_not_cast(implementation) -> None:
    """Logits, log-softmax and two gradients of 2 bytes; no float32 copy."""
    uncast, eager = (of_loss(implementation=implementation, loss=loss) for loss in ("uncast", "hf"))
    logits = TOKENS * VOCABULARY
    assert uncast.saved_bytes == pytest.approx(2 * logits, rel=0.01)
    assert eager.saved_bytes == pytest.approx(4 * logits, rel=0.01)
    assert uncast.backward_peak + uncast.saved_bytes == pytest.approx(6 * logits, rel=0.01)


@pytest.mark.parametrize("implementation", ["torchtitan", "hf"])
def test_held_logits_are_saved_besides(implementation) -> None:
    held, eager = (of_loss(implementation=implementation, loss=loss) for loss in ("held", "hf"))
    assert held.saved_bytes - eager.saved_bytes == 4 * TOKENS * VOCABULARY
    held, uncast = (of_loss(implementation=implementation, loss=loss) for loss in ("uncast_held", "uncast"))
    assert held.saved_bytes - uncast.saved_bytes == 2 * TOKENS * VOCABULARY


def test_copied_logits() -> None:
    """Forward: float32 logits, the copy of all tokens but the last and its log-softmax; held ones stay for backward. Of
    a single sequence nothing is copied: all tokens but the last are contiguous. From 4.46 to 4.48 a function casts the
    logits, of which the model still holds those of 2 bytes."""

    def of(loss: str, batch: int, transformers: tuple[int, ...] | None = None) -> tuple[float, float]:
        """Peak of the forward and what is saved, in float32 logits."""
        tree = trace(read_config(LLAMA), Workload(batch, TOKENS, loss=loss, transformers=transformers))
        work = next(work for work in works(tree) if work.label == "cross_entropy")
        one = 4 * batch * TOKENS * VOCABULARY
        return (work.forward_peak + work.saved_bytes) / one, work.saved_bytes / one

    assert of("hf", 2) == pytest.approx((2.5, 1), rel=0.01)  # 2-byte logits, float32 ones, log-softmax
    assert of("copied", 2) == pytest.approx((3, 1), rel=0.01)
    assert of("copied_held", 2) == pytest.approx((3, 2), rel=0.01)
    assert of("copied", 1) == of("copied", 1, (4, 45)) == pytest.approx((2, 1), rel=0.01)
    assert of("copied", 1, (4, 46)) == pytest.approx((2.5, 1), rel=0.01)
    assert of("copied", 2, (4, 48)) == pytest.approx((3.5, 1), rel=0.01)
    with pytest.raises(NotModeled, match="copied logits in torchtitan's"):
        trace(read_config(LLAMA), Workload(1, TOKENS, loss="copied", implementation="torchtitan"))


def test_unsloth_writes_the_gradient_over_a_copy_of_the_logits() -> None:
    """float32 logits, all tokens but the last, saved; the gradient of the copy scattered into a second tensor."""
    tree = trace(read_config(LLAMA), Workload(2, TOKENS, kernels="unsloth"))
    logits = [work for work in works(tree) if work.category == "logits"]
    saved = sum(work.saved_bytes for work in logits) - 2 * 2 * TOKENS * 4096  # but what the head keeps
    assert saved == pytest.approx(4 * 2 * (TOKENS - 1) * VOCABULARY, rel=0.001)
    assert max(work.backward_peak for work in logits) <= 4.1 * 2 * TOKENS * VOCABULARY


def test_compiled_selective_checkpointing_keeps_what_the_partitioner_keeps() -> None:
    """Outputs of a block's forward graph under torch 2.13's min-cut partitioner and torchtitan's policy: the input, the
    products for queries, values and gate, attention's result and log-sum-exp. Eager mode keeps `w2`'s product, too."""
    width, kv, ffn = 4096, 1024, 14336
    kept = 2 * (3 * width + kv + ffn) + 4 * 32
    for compiled, more in ((True, 0), (False, 2 * width)):
        workload = Workload(1, TOKENS, implementation="torchtitan", checkpointing="selective", compile=compiled)
        blocks = [m for m in trace(read_config(LLAMA), workload).body if isinstance(m, Module) and m.role == "block"]
        saved = sum(work.saved_bytes for work in works(blocks[5]))
        assert saved == pytest.approx(TOKENS * (kept + more), abs=32)  # and states of random numbers


def test_litgpts_attention_keeps_the_whole_product() -> None:
    """Llama-2-13B, 8,192 tokens, compiled: 1.84 GB per layer on each of 8 GPUs, less 6 bytes for an eighth of its
    parameters (lightning-thunder issue 474, from 2 to 20 layers)."""
    config = {
        "model_type": "llama", "hidden_size": 5120, "num_hidden_layers": 2, "num_attention_heads": 40,
        "intermediate_size": 13824, "vocab_size": 32000,
    }  # fmt: skip
    arch = from_config(config, "x").arch
    model = ModelSpec("x", "llama", parameters(build(Net(arch, implementation="litgpt"))), arch)
    tree = trace(model, Workload(2, 4096, implementation="litgpt", compile=True))
    block = next(m for m in tree.body if isinstance(m, Module) and m.role == "block")
    parameters_of_block = 4 * 5120**2 + 3 * 5120 * 13824 + 2 * 5120
    assert sum(work.saved_bytes for work in works(block)) == pytest.approx(
        1.841e9 - 6 * parameters_of_block / 8, rel=0.01
    )


@pytest.mark.parametrize("field", [{"family": "qwen3"}, {"loss": "held"}])
def test_litgpt_is_llama_with_its_own_loss(field) -> None:
    arch = replace(read_config(LLAMA).arch, family=field.get("family", "llama"))
    with pytest.raises(NotModeled, match="litgpt"):
        build(Net(arch, implementation="litgpt", loss=field.get("loss", "hf")))


def test_a_compiled_loss_of_transformers_models() -> None:
    """torch.compile takes the loss with the model: as torchtitan's, whose models have no copy of the logits."""
    theirs, ours = (of_loss(implementation=each, loss="compiled") for each in ("torchtitan", "hf"))
    assert ours.saved_bytes == pytest.approx(theirs.saved_bytes, rel=0.01)
    tree = trace(read_config(LLAMA), Workload(2, TOKENS, loss="copied_compiled"))
    copied = next(work for work in works(tree) if work.label == "cross_entropy")
    assert copied.saved_bytes == pytest.approx(2 * 2 * TOKENS * VOCABULARY, rel=0.01)
    assert copied.forward_peak + copied.saved_bytes == pytest.approx(4 * 2 * TOKENS * VOCABULARY, rel=0.01)


@pytest.mark.parametrize(
    "workload",
    [
        {"loss": "compiled", "kernels": "liger"},
        {"loss": "copied_compiled", "implementation": "torchtitan"},
        {"loss": "compiled", "implementation": "litgpt"},
    ],
)
def test_losses_that_nobody_compiles(workload) -> None:
    with pytest.raises(NotModeled, match="compiled"):
        trace(read_config(LLAMA), Workload(1, 16, **workload))


def test_a_compiled_loss_of_a_family_that_caps_its_logits() -> None:
    small = {
        "model_type": "gemma2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 256,
    }  # fmt: skip
    with pytest.raises(NotModeled, match="compiled loss in hf's gemma2"):
        trace(from_config(small, "x"), Workload(1, 16, loss="compiled"))
