"""What a planner found, and what is best of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from zsim.result.reported import MARGIN
from zsim.sweep.evaluate import Outcome
from zsim.sweep.space import Candidate

INDISTINGUISHABLE = 0.01  # of time or cost: no prediction tells setups apart that are closer


@dataclass(frozen=True, slots=True)
class Choice:
    """A simulated candidate. `dollars`: per step, None without prices; `gpu_hours` per step is always there."""

    candidate: Candidate
    outcome: Outcome

    @property
    def step_s(self) -> float:
        return float(self.outcome["step_s"])

    @property
    def gpu_hours(self) -> float:
        return self.step_s * self.candidate.machine.ranks / 3600

    @property
    def cost(self) -> float:
        """Dollars per step, or GPU-hours where no machine has a price."""
        return self.gpu_hours * (self.candidate.machine.price or 1.0)

    @property
    def tight(self) -> bool:
        free, needed = self.outcome["headroom_bytes"], self.outcome["needed_bytes"]
        return bool(free < MARGIN * (free + needed))


By = Callable[[Choice], tuple[float, float]]


def by_time(choice: Choice) -> tuple[float, float]:
    return choice.step_s, choice.cost


def by_cost(choice: Choice) -> tuple[float, float]:
    return choice.cost, choice.step_s


@dataclass(slots=True)
class Plan:
    """The answer. `searched` counts every candidate once: simulated, or why not."""

    candidates: int = 0
    searched: Counter[str] = field(default_factory=Counter)
    choices: list[Choice] = field(default_factory=list)  # simulated and fitting
    nearest: tuple[int, Candidate] | None = None  # bytes missing, of what lacks least
    refusals: Counter[str] = field(default_factory=Counter)
    framework: str | None = None  # what the scenario uses now

    @property
    def offered(self) -> list[Choice]:
        """Those that leave a margin of memory, or all if none does."""
        return [choice for choice in self.choices if not choice.tight] or self.choices

    def best(self, by: By) -> Choice | None:
        return min(self.offered, key=by, default=None)

    def winner(self, by: By) -> Choice | None:
        """The plainest of those that cannot be told from the best.

        In this order: nothing offloaded, the framework at hand, the simpler strategy, its usual buckets, more memory
        left.
        """
        best = self.best(by)
        if best is None:
            return None
        limits = [value * (1 + INDISTINGUISHABLE) for value in by(best)]
        alike = [one for one in self.offered if all(a <= b for a, b in zip(by(one), limits, strict=True))]
        return min(alike, key=lambda choice: (*self._exotic(choice.candidate), -choice.outcome["headroom_bytes"]))

    def _exotic(self, candidate: Candidate) -> tuple[bool, bool, int, bool]:
        strategy = candidate.strategy
        other = self.framework is not None and strategy.framework != self.framework
        return strategy.offloads, other, strategy.rank, candidate.tuning != strategy.usual

    def runner_up(self, winner: Choice, by: By) -> Choice | None:
        """The best that differs from the winner in more than bucket sizes."""
        own = untuned(winner.candidate)
        return min((choice for choice in self.offered if untuned(choice.candidate) != own), key=by, default=None)

    def why_not(self, choice: Choice, winner: Choice, by: By) -> str | None:
        """Why a choice that is better than the winner, by less than can be told, is not it; None if it is no better."""
        if by(choice) >= by(winner):
            return None
        reasons = (
            "offloads what the best keeps on the GPU",
            f"needs another framework than the scenario's {self.framework}",
            "a less simple strategy",
            "other buckets than usual",
        )
        pairs = zip(reasons, self._exotic(choice.candidate), self._exotic(winner.candidate), strict=True)
        reason = next((reason for reason, own, best in pairs if own > best), "leaves less memory free")
        return f"within {INDISTINGUISHABLE:.0%}, which cannot be told apart; {reason}"

    def better_but_tight(self, winner: Choice, by: By) -> Choice | None:
        """What would be better than the winner if its memory were trusted to the last GiB."""
        best = min(self.choices, key=by)
        return best if best.tight and by(best)[0] * (1 + INDISTINGUISHABLE) < by(winner)[0] else None

    @property
    def pareto(self) -> list[Choice]:
        """Those that no other one beats in both time and cost, the fastest first."""
        front: list[Choice] = []
        for choice in sorted(self.offered, key=by_time):
            if not front or choice.cost < front[-1].cost:
                front.append(choice)
        return front


def untuned(candidate: Candidate) -> Candidate:
    return replace(candidate, tuning=0)
