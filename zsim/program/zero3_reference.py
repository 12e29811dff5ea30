"""A second model under ZeRO-3: an engine of its own, without an optimizer, which shards it over all ranks.

trl's prepare_deepspeed, which LLaMA-Factory and others call, too; DeepSpeed 0.19.8 runtime/zero/parameter_offload.py,
DeepSpeedZeRoOffload. Its trace is that of forwards alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zsim.plan.spec import DeepSpeedPlan
from zsim.program.deepspeed import broadcast_model
from zsim.program.preference import Second
from zsim.program.zero3_forward import Gathering


def plan_of_reference(plan: DeepSpeedPlan) -> DeepSpeedPlan:
    """prepare_deepspeed: the Trainer's configuration before it has replaced "auto", which DeepSpeed takes for absent
    (runtime/config_utils.py). The sizes that trl sets there have keys that DeepSpeed does not know."""
    defaults: dict[str, Any] = {name: DeepSpeedPlan.__dataclass_fields__[name].default for name in plan.auto}
    return replace(plan, offload_optimizer=None, **defaults)


class Zero3Reference(Gathering, Second):
    def allocate(self) -> None:
        builder, parameters = self.builder, self.model.parameters
        whole = () if self.plan.zero_init else parameters
        for parameter in whole:
            builder.alloc(f"whole:{parameter.name}", "parameters", parameter.numel * self.parameters.size)
        broadcast_model(builder, whole, self.plan)
        broadcast_model(builder, parameters, self.plan)
        for parameter in whole:
            builder.free(f"whole:{parameter.name}")
        self.parameters.allocate()
        self.recording = True

    def begin(self, micro: int) -> None:
        self.micro = self.parameters.micro = micro
        if micro == 0:
            self.parameters.events.clear()  # the host has waited for the gradient norm of the step before

    def end(self) -> None:
        if self.recording:
            self.recording = False
            self.coordinator.register(self.external)
        self.charge_hooks("forward")
