"""Evaluation between steps as a scenario asks for it, and what of it is not looked at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zsim.model.spec import Evaluation, ModelSpec, Workload
from zsim.scenario.releases import stated_release

if TYPE_CHECKING:
    from zsim.scenario.load import Scenario

# transformers 5 training_args.py `use_cache`, and trainer.py prediction_step `skip_logits`
WITHOUT_CACHE = (5, 0)


def evaluation_of(scenario: Scenario, model: ModelSpec, workload: Workload) -> tuple[Evaluation | None, list[str]]:
    """The setting, and what of it is not modeled. Raises InputError."""
    given = scenario.fields.evaluation
    if given is None:
        return None, []
    for what, found in (
        ("pairs", workload.preference is not None),
        ("sequences that ranks share", workload.sequence_parallel_size > 1),
        ("experts that ranks share (AutoEP)", model.conversion is not None),
    ):
        if found:
            return None, [f"evaluation: of {what}"]
    release = stated_release(scenario)
    old = release is not None and release < WITHOUT_CACHE
    loss = given.loss or ("hf" if old and workload.loss == "fused" else None)
    missing = ["evaluation: keys and values of all layers, which models of transformers before 5 keep unless the "
               "configuration says use_cache: false"] if old else []  # fmt: skip
    return Evaluation(given.micro_batch, loss), missing
