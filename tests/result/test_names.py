"""What comparisons call a setting is what --set takes."""

from __future__ import annotations

import dataclasses

import pytest

from zsim.model.spec import Workload
from zsim.plan.spec import Allocator, DdpPlan, DeepSpeedPlan, Fsdp1Plan, Fsdp2Plan, Optimizer
from zsim.result.names import setting
from zsim.scenario.messages import names_at

# No scenario says these: they follow from others, or are recorded runs' own.
WITHOUT = {
    "fsdp.last_backward_only_last",
    "device",
    "workspace_bytes",  # the GPU
    "flat_units",  # framework and sharding strategy
    "forward_only",  # evaluation
    "wide_cache",  # of releases of transformers that only published runs are of
    "torchtitan",  # likewise
    "cudnn_masks",  # the release of torch
    "zero.auto",  # those of the others that are auto
}  # fmt: skip
NESTED = {"optimizer": Optimizer, "allocator": Allocator}


@pytest.mark.parametrize("owner", [Workload, DdpPlan, DeepSpeedPlan, Fsdp1Plan, Fsdp2Plan])
def test_every_name_is_a_field_of_a_scenario(owner: type) -> None:
    fields = [field.name for field in dataclasses.fields(owner)]
    for name, nested in NESTED.items():
        if name in fields:
            fields.remove(name)
            fields += [f"{name}.{field.name}" for field in dataclasses.fields(nested)]
    unknown = set()
    for field in fields:
        path = tuple(setting(owner, field).split("."))
        if path[-1] not in names_at(path[:-1]):
            unknown.add(".".join(path))
    assert unknown <= WITHOUT
