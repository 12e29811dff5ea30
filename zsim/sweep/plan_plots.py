"""A plan's time against its cost, as a picture and as one HTML file that needs nothing else."""

from __future__ import annotations

from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from zsim.result.render.style import CATEGORY_COLORS
from zsim.sweep.choices import By, Choice, Plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIB = 2**30
TOKENS = 1e9  # what times and costs are given for
_COLORS = [CATEGORY_COLORS[name] for name in ("parameters", "logits", "optimizer_states", "gradients", "activations")]
_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 72em; padding: 0 1em; color: #222 }
svg { max-width: 100%; height: auto } table { border-collapse: collapse; width: 100% }
th, td { text-align: right; padding: .25em .7em; border-bottom: 1px solid #ddd } td:last-child, th:last-child,
td:first-child, th:first-child { text-align: left } .best { font-weight: 600 } .tight { color: #888 }
"""


def write(plan: Plan, by: By, folder: Path) -> list[Path]:
    """Write plan.png and plan.html; returns their paths."""
    picture, page = folder / "plan.png", folder / "plan.html"
    drawn = figure(plan, by)
    drawn.savefig(picture, dpi=130)
    svg = StringIO()
    drawn.savefig(svg, format="svg", metadata={"Date": None})
    page.write_text(_page(plan, by, svg.getvalue()[svg.getvalue().index("<svg") :]), encoding="utf-8")
    return [picture, page]


def figure(plan: Plan, by: By) -> Figure:
    """Everything simulated that fits; the line joins what nothing else beats in both."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(drawn)
    axes = drawn.add_subplot()
    machines = list(dict.fromkeys(choice.candidate.machine for choice in plan.choices))
    for number, machine in enumerate(machines):
        color = _COLORS[number % len(_COLORS)]
        for tight in (False, True):
            points = [one for one in plan.choices if one.candidate.machine == machine and one.tight is tight]
            if points:
                label = f"{machine}, leaves too little memory" if tight else str(machine)
                fill = "none" if tight else color
                x, y = [hours(one) for one in points], [cost(one) for one in points]
                axes.scatter(x, y, s=36, facecolors=fill, edgecolors=color, label=label, zorder=3)
    front = plan.pareto
    axes.plot([hours(one) for one in front], [cost(one) for one in front], color="0.5", linewidth=1, zorder=2)
    for one in front:
        _name(axes, one)
    winner = plan.winner(by)
    if winner is not None:
        axes.scatter([hours(winner)], [cost(winner)], marker="*", s=230, color="black", label="best", zorder=4)
    axes.set(xlabel="hours per 1e9 tokens", ylabel=f"{unit(plan)} per 1e9 tokens", title="Time against cost")
    axes.set_xlim(0, 1.1 * max(map(hours, plan.choices), default=1.0))
    axes.set_ylim(0, 1.1 * max(map(cost, plan.choices), default=1.0))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="lower left")  # nothing is both cheap and fast
    return drawn


def _name(axes: object, choice: Choice) -> None:
    text = f"{choice.candidate.machine}\n{choice.candidate.strategy.name}"
    place = (hours(choice), cost(choice))
    axes.annotate(text, place, textcoords="offset points", xytext=(8, -20), fontsize="x-small")  # type: ignore[attr-defined]


def hours(choice: Choice) -> float:
    """Per 1e9 tokens."""
    return choice.step_s / choice.outcome["tokens_per_step"] * TOKENS / 3600


def cost(choice: Choice) -> float:
    """Dollars, or GPU-hours without prices, per 1e9 tokens."""
    return choice.cost / choice.outcome["tokens_per_step"] * TOKENS


def unit(plan: Plan) -> str:
    return "GPU-hours" if any(one.candidate.machine.price is None for one in plan.choices) else "$"


def _page(plan: Plan, by: By, svg: str) -> str:
    winner, front = plan.winner(by), plan.pareto
    rows = []
    for one in sorted(plan.choices, key=by):
        kind = "best" if one == winner else "tight" if one.tight else ""
        cells = (
            str(one.candidate.machine),
            f"{one.step_s:.3f} s",
            f"{hours(one):.2f}",
            f"{cost(one):,.2f}",
            f"{one.outcome['headroom_bytes'] / GIB:.1f} GiB",
            "best" if one == winner else "tight" if one.tight else "nothing beats it in both" if one in front else "",
            one.candidate.title,
        )
        rows.append(f'<tr class="{kind}">' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    names = ("machine", "step", "hours / 1e9 tokens", f"{unit(plan)} / 1e9 tokens", "free per GPU", "", "setup")
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    counts = "".join(f"<li>{count:,} {escape(reason)}</li>" for reason, count in plan.searched.most_common())
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>zsim plan</title><style>{_STYLE}</style>'
        f"<h1>Plan</h1>{svg}<table><tr>{head}</tr>{''.join(rows)}</table>"
        f"<h2>Searched {plan.candidates:,} setups</h2><ul>{counts}</ul></html>\n"
    )
