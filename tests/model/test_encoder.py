"""The model of DeepSpeedExamples training/bf16_master_weight/train.py against torch.nn's own modules, run now."""

from __future__ import annotations

from typing import Any

import pytest

from tests.model.ledger import Ledger, flops
from zsim.model import families
from zsim.model.architecture import Architecture, LayerKind
from zsim.model.layers import Net
from zsim.model.spec import ModelSpec, Workload
from zsim.model.trace import parameters, trace

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

WIDTH, HEADS, LAYERS, VOCAB, POSITIONS = 64, 4, 3, 199, 64
ARCH = Architecture(
    family="torch.nn", hidden=WIDTH, heads=HEADS, kv_heads=HEADS, head_dim=WIDTH // HEADS, intermediate=4 * WIDTH,
    vocab=VOCAB, positions=POSITIONS, kinds=(LayerKind(),) * LAYERS, tied=False, activation="gelu",
)  # fmt: skip


def spec() -> ModelSpec:
    return ModelSpec("small", ARCH.family, parameters(families.build(Net(ARCH, implementation="torch.nn"))), ARCH)


def real() -> Any:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
            self.norm1, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
            self.ff = torch.nn.Sequential(
                torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
            )

        def forward(self, x: Any) -> Any:
            attended, _ = self.attention(x, x, x)
            x = self.norm1(x + attended)
            fed = self.ff(x)
            return self.norm2(x + fed)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(VOCAB, WIDTH)
            self.pos_embedding = torch.nn.Embedding(POSITIONS, WIDTH)
            self.layers = torch.nn.ModuleList([Block() for _ in range(LAYERS)])
            self.output_proj = torch.nn.Linear(WIDTH, VOCAB)

        def forward(self, ids: Any, checkpointed: bool) -> Any:
            from torch.utils.checkpoint import checkpoint

            positions = torch.arange(ids.shape[1]).unsqueeze(0).expand(ids.shape[0], -1)
            x = self.embedding(ids) + self.pos_embedding(positions)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
            return self.output_proj(x)

    torch.set_default_dtype(torch.bfloat16)
    try:
        return Model()
    finally:
        torch.set_default_dtype(torch.float32)


def test_parameters_are_those_of_torch() -> None:
    ours = [(parameter.name, parameter.shape) for parameter in spec().parameters]
    assert ours == [(name, tuple(parameter.shape)) for name, parameter in real().named_parameters()]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_step_is_torchs(batch: int, checkpointing: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from validation.oracles.families import Follow

    with FakeTensorMode(allow_non_fake_inputs=True):
        model = real()
        ids = torch.zeros(batch, POSITIONS, dtype=torch.long)
        follow = Follow({t.untyped_storage()._cdata for t in (*model.parameters(), ids)})
        with follow:
            logits = model(ids, checkpointing == "full")
            loss = torch.nn.functional.cross_entropy(logits.view(-1, VOCAB), ids.view(-1))
            after = sum(follow.live.values())
            follow.phase = "backward"
            loss.backward()
    workload = Workload(
        batch, POSITIONS, implementation="torch.nn", attention="eager", checkpointing=checkpointing, device="cpu"
    )
    ledger = Ledger(spec(), trace(spec(), workload))
    assert flops(ledger.forward_kernels) == follow.flops["forward"]
    assert flops(ledger.backward_kernels) == follow.flops["backward"]
    assert ledger.after_forward == after
    assert ledger.peak_forward == follow.peak["forward"]
    # Of the gradients of query, key and value, each a tensor for all three, the tape may hold one less at the peak.
    packed = 2 * 3 * WIDTH * POSITIONS * batch
    assert 0 <= follow.peak["backward"] - ledger.peak_backward <= packed + 2048
