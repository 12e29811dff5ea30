"""What the planner found, on a terminal: the choice, the runner-up, the Pareto set, and what was searched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from zsim.sweep.choices import MARGIN, By, Choice, Plan, by_time

if TYPE_CHECKING:
    from rich.console import Console

GIB = 2**30


def render(plan: Plan, by: By, console: Console) -> None:
    winner = plan.winner(by)
    if winner is None:
        console.print("NOTHING FITS: none of the setups that were searched.")
        if plan.nearest:
            missing, candidate = plan.nearest
            console.print(
                f"nearest miss: {candidate.title} on {candidate.machine}, which lacks at least "
                f"{missing / GIB:.1f} GiB per GPU"
            )
    else:
        console.print(f"BEST: {winner.candidate.title}")
        console.print(f"  {_words(winner)}")
        if winner.tight:
            console.print(f"  tight: nothing that fits leaves {MARGIN:.0%} of the memory free")
        runner_up = plan.runner_up(winner, by)
        _beside("runner-up", runner_up, winner, console, plan.why_not(runner_up, winner, by) if runner_up else None)
        _beside(
            "faster, but tight" if by is by_time else "cheaper, but tight",
            plan.better_but_tight(winner, by),
            winner,
            console,
        )
        if len({choice.candidate.machine for choice in plan.choices}) > 1:
            _front(plan, console)
    console.print(f"searched {plan.candidates:,} setups:")
    for reason, count in plan.searched.most_common():
        console.print(f"  {count:>6,} {reason}")
    for refusal, count in plan.refusals.most_common(3):
        console.print(f"         {count:,}x: {refusal}", markup=False)


def _beside(what: str, choice: Choice | None, winner: Choice, console: Console, why_not: str | None = None) -> None:
    if choice is not None:
        console.print(f"{what} ({choice.step_s / winner.step_s - 1:+.1%} step time): {choice.candidate.title}")
        console.print(f"  {_words(choice)}")
        if why_not:
            console.print(f"  {why_not}")


def _words(choice: Choice) -> str:
    outcome = choice.outcome
    mfu = "" if outcome["mfu"] is None else f", MFU {outcome['mfu']:.1%}"
    cost = "" if choice.candidate.machine.price is None else f", {_dollars(choice):.2f} $ per 1e9 tokens"
    return (
        f"{choice.candidate.machine}: {choice.step_s:.3f} s/step, {outcome['tokens_per_s']:,.0f} tokens/s{mfu}, "
        f"{outcome['headroom_bytes'] / GIB:.1f} GiB free per GPU{cost}"
    )


def _dollars(choice: Choice) -> float:
    """Per 1e9 tokens."""
    return choice.cost / choice.outcome["tokens_per_step"] * 1e9


def _front(plan: Plan, console: Console) -> None:
    """Time against cost."""
    priced = all(choice.candidate.machine.price is not None for choice in plan.choices)
    table = Table(box=None, pad_edge=False)
    for name in ("machine", "step", "$/1e9 tokens" if priced else "GPU-hours/1e9 tokens", "setup"):
        table.add_column(name, justify="left" if name in ("machine", "setup") else "right")
    for choice in plan.pareto:
        cost = _dollars(choice) if priced else choice.gpu_hours / choice.outcome["tokens_per_step"] * 1e9
        table.add_row(str(choice.candidate.machine), f"{choice.step_s:.3f} s", f"{cost:,.2f}", choice.candidate.title)
    console.print("no other setup is both faster and cheaper than these:")
    console.print(table)


def to_dict(plan: Plan, by: By) -> dict[str, Any]:
    """The same as plain JSON types."""
    winner = plan.winner(by)
    runner_up = winner and plan.runner_up(winner, by)
    tight = winner and plan.better_but_tight(winner, by)
    return {
        "fits": winner is not None,
        "winner": winner and _as_dict(winner),
        "runner_up": runner_up and _as_dict(runner_up),
        "runner_up_lost": runner_up and winner and plan.why_not(runner_up, winner, by),
        "better_but_tight": tight and _as_dict(tight),
        "pareto": [_as_dict(choice) for choice in plan.pareto],
        "candidates": plan.candidates,
        "searched": dict(plan.searched),
        "refusals": dict(plan.refusals),
        "nearest_miss": plan.nearest
        and {"missing_bytes": plan.nearest[0], "setup": plan.nearest[1].title, "machine": str(plan.nearest[1].machine)},
    }


def _as_dict(choice: Choice) -> dict[str, Any]:
    candidate = choice.candidate
    return {
        "setup": candidate.title,
        "machine": str(candidate.machine),
        "gpus": candidate.machine.ranks,
        "settings": {".".join(map(str, path)): value for path, value in candidate.settings},
        "tight": choice.tight,
        "gpu_hours_per_step": choice.gpu_hours,
        "dollars_per_1e9_tokens": None if candidate.machine.price is None else _dollars(choice),
        **{name: choice.outcome[name] for name in ("step_s", "tokens_per_s", "mfu", "headroom_bytes", "needed_bytes")},
    }
