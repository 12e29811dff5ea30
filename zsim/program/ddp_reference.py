"""A second model under torch.autocast: float32 on every GPU, its products on casts of its weights."""

from __future__ import annotations

from zsim.model.spec import ModelSpec, Module
from zsim.plan.spec import DdpPlan
from zsim.program.builder import Builder
from zsim.program.ddp import Ddp
from zsim.program.preference import Replica, Second


class AutocastReplica(Ddp, Second):
    """`cached`: as loaded, its weights require gradients, which autocast's cache of casts asks for, and so stay cast
    until the forward is over; those that trl copied from the model until 0.28, and LLaMA-Factory's, do not."""

    def __init__(self, builder: Builder, model: ModelSpec, tree: Module, plan: DdpPlan, cached: bool) -> None:
        super().__init__(model, tree, plan)
        self.builder, self.cached = builder, cached

    def allocate(self) -> None:
        Replica(self.builder, self.model, self.plan, self.plan.dtype).allocate()

    def post_forward(self, module: Module, phase: str) -> None:
        if not self.cached:
            super().post_forward(module, phase)

    def end(self) -> None:
        self._end_autocast()
