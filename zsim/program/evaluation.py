"""Evaluation between two steps: batches of a size of their own, without gradients, through the trained model's hooks.

transformers 5.24 trainer.py, `prediction_step`: what the model returns is gone before the next batch.
"""

from __future__ import annotations

from typing import Any, Protocol

from zsim.model.spec import ModelSpec, Workload
from zsim.model.trace import trace_evaluation
from zsim.program.builder import Builder
from zsim.program.execute import Execution

BATCHES = 2  # the second begins with what the first has left


class Rank(Protocol):
    """A strategy."""

    builder: Builder
    model: ModelSpec
    micro: int
    without_grad: bool

    def begin_evaluation(self) -> None: ...

    def end_evaluation(self) -> None: ...


def evaluating(rank: Any, workload: Workload) -> Evaluating | None:
    return None if workload.evaluation is None else Evaluating(rank, workload)


class Evaluating:
    def __init__(self, rank: Rank, workload: Workload) -> None:
        self.rank, self.tree = rank, trace_evaluation(rank.model, workload)

    def run(self) -> None:
        rank, builder = self.rank, self.rank.builder
        builder.phases, rank.without_grad = {"forward": "evaluation"}, True
        for _ in range(BATCHES):
            rank.micro = 0
            rank.begin_evaluation()
            Execution(builder, rank, rank.micro).forward(self.tree)  # type: ignore[arg-type]
            rank.end_evaluation()
        builder.phases, rank.without_grad = {}, False
        builder.host_wait()  # for the losses
