"""Which DeepSpeed a plan runs: rules of older releases stand beside those of the recorded one (0.19.8)."""

from __future__ import annotations

from functools import lru_cache

from zsim.plan.spec import DeepSpeedPlan
from zsim.plan.version import parse_version


def steps_at_start(plan: DeepSpeedPlan) -> bool:
    """initialize_optimizer_states: until pull request 5104 an update with gradients of zero made the states."""
    return before(plan, 0, 13, 2)


# Their Python got slower twice (eight releases are in validation/measured/host_time.jsonl): with ZenFlow's checks (pull
# request 7516) and the backward that torch's own call starts (7665), and with the autograd functions' setup_context
# (7916), for which torch looks up a signature in every call.
_SLOWER = ((0, 18), (0, 19, 1))


@lru_cache(maxsize=256)
def hook(version: str, label: str) -> str:
    """The kind of host work that a hook of this release is. A step has a hook for every module and gradient."""
    older = (release for release in _SLOWER if parse_version(version) < release)
    return next((f"{label} before {'.'.join(map(str, release))}" for release in older), label)


def counts_in_every_hook(plan: DeepSpeedPlan) -> bool:
    """Whether the hook of each gradient asks of all parameters which of them the backward will reach, and not the first
    one alone (base_optimizer.py, from pull request 7780 to 7886)."""
    return before(plan, 0, 18, 7) and not before(plan, 0, 18, 5)


def before(plan: DeepSpeedPlan, *release: int) -> bool:
    """Whether the plan's DeepSpeed is older than `release`. Raises InputError where it is not a version."""
    return parse_version(plan.version) < release
