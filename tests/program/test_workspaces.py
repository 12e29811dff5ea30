"""What matrix products hold in the allocator, whatever is trained."""

from __future__ import annotations

import pytest

from zsim.cluster.catalog import device
from zsim.model.huggingface import from_config
from zsim.model.spec import Workload
from zsim.model.trace import trace
from zsim.plan.spec import DdpPlan
from zsim.program.lower import lower
from zsim.program.ops import Alloc, HostWait

MIB = 1 << 20


@pytest.mark.parametrize(
    ("gpu", "each"),
    [("A100-SXM-80GB", 8_519_680), ("V100-SXM2-32GB", 8_519_680), ("H100-SXM", 32 * MIB), ("MI300X", 0)],
)
def test_two_threads_hold_a_workspace_each(gpu: str, each: int) -> None:
    config = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 128}
    model = from_config({"model_type": "llama", "vocab_size": 96, **config}, "llama")
    workload = Workload(1, 8, workspace_bytes=device(gpu).workspace_bytes)
    program = lower(model, trace(model, workload), DdpPlan(world_size=1), workload)
    held = [each for each in program.init if isinstance(each, Alloc) and each.category == "workspace"]
    assert [(alloc.nbytes, alloc.tensors) for alloc in held] == ([(2 * each, (each,))] if each else [])
    assert program.init[-1] == HostWait(None)
