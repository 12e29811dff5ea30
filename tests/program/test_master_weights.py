"""bf16_master_weights_and_grads and torch_autocast: who may have them. Their bytes and calls: validation/oracles."""

from __future__ import annotations

from typing import Any

import pytest

from zsim.errors import InputError, NotModeled
from zsim.plan.deepspeed import read_document
from zsim.plan.document import Document
from zsim.plan.spec import DeepSpeedPlan
from zsim.program.deepspeed import check, master_dtype

BOTH = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


@pytest.mark.parametrize(
    ("fields", "kind", "says"),
    [
        ({"stage": 2, "bf16_master_weights_and_grads": True}, InputError, "requires offloading with DeepSpeedCPUAdam"),
        ({"stage": 2, "bf16_optimizer_states": True}, InputError, "requires bf16_master_weights_and_grads"),
        ({"stage": 0, **BOTH}, InputError, "needs bf16 and stage 1, 2 or 3"),
        ({"stage": 3, "dtype": "float16", **BOTH}, InputError, "needs bf16"),
        ({"stage": 3, "offload_optimizer": "cpu", **BOTH}, NotModeled, "in host memory"),
        ({"stage": 2, "grad_accum_dtype": "float32", **BOTH}, NotModeled, "accumulation in float32"),
    ],
)
def test_refused(fields: dict[str, Any], kind: type[InputError], says: str) -> None:
    with pytest.raises(kind, match=says):
        check(DeepSpeedPlan(world_size=2, **fields))


def test_the_type_of_master_weights() -> None:
    assert master_dtype(DeepSpeedPlan(world_size=2, stage=3, **BOTH)) == "bfloat16"  # type: ignore[arg-type]
    assert master_dtype(DeepSpeedPlan(world_size=2, stage=3)) == "float32"


def read(**sections: Any) -> Any:
    return read_document(Document("ds.json", {"train_micro_batch_size_per_gpu": 1, **sections}))


def test_autocast_over_its_own_type_is_said_and_over_another_refused() -> None:
    autocast = {"enabled": True, "dtype": "torch.bfloat16"}
    said = read(bf16={"enabled": True}, torch_autocast=autocast).not_modeled
    assert said == ["torch_autocast.enabled, in its dtype bf16: operators that torch.autocast runs in float32"]
    for precision in ({}, {"fp16": {"enabled": True}}):
        with pytest.raises(NotModeled, match="parameters travel in two types"):
            read(torch_autocast=autocast, **precision)


def test_immediate_updates_belong_to_one_optimizer() -> None:
    section = {"bf16": {"enabled": True, "immediate_grad_update": True}}
    assert any("immediate_grad_update" in text for text in read(**section).without_effect)
    with pytest.raises(NotModeled, match="added to float32 ones by hooks"):
        read(**section, zero_optimization={"stage": 1}, data_types={"grad_accum_dtype": "fp32"})
