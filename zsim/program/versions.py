"""Which DeepSpeed a plan runs: rules of older releases stand beside those of the recorded one (0.19.8)."""

from __future__ import annotations

from zsim.plan.spec import DeepSpeedPlan
from zsim.plan.version import parse_version


def steps_at_start(plan: DeepSpeedPlan) -> bool:
    """initialize_optimizer_states: until pull request 5104 an update with gradients of zero made the states."""
    return before(plan, 0, 13, 2)


def before(plan: DeepSpeedPlan, *release: int) -> bool:
    """Whether the plan's DeepSpeed is older than `release`. Raises InputError where it is not a version."""
    return parse_version(plan.version) < release
