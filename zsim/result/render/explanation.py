"""What `zsim explain` prints: the critical path, every second of the step, and what would help."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from zsim.program.ops import Compute
from zsim.result.breakdown import cause
from zsim.result.compare import causes, label
from zsim.result.critical_path import Segment
from zsim.result.holders import holders
from zsim.result.render.page import Page
from zsim.result.render.style import CATEGORY_LABELS, cause_label
from zsim.result.render.terminal import duration, verdict, verdict_style
from zsim.result.sensitivity import Change
from zsim.result.spec import Result

GIB = 2**30
LONGEST, LARGEST = 8, 12


def render(result: Result, changes: Sequence[Change], page: Page) -> None:
    """Prints the explanation."""
    said = to_dict(result, changes)
    page.say(verdict(result), verdict_style(result))
    page.section("Every second of the step", map(_share, said["attribution"]))
    page.section("Critical path of the step, by what it runs through", map(_share, said["critical_path"]))
    page.section("Its longest stretches: when each begins, how long it takes", map(_stretch, said["longest_stretches"]))
    page.section("Who holds the memory at the peak", map(_holder, said["memory"][:LARGEST]))
    names = max((len(change.name) for change in changes), default=0)
    for kind, title in (("setting", "What would help: settings"), ("hardware", "What would help: hardware")):
        page.section(title, _changes((change for change in changes if change.kind == kind), names))
    for note in said["notes"]:
        page.line()
        page.say(note)


def to_dict(result: Result, changes: Sequence[Change]) -> dict[str, Any]:
    """The same as JSON types; seconds and shares of the step."""
    step = result.time.step_s
    path = result.slowest.critical_path()
    by_name: dict[str, float] = defaultdict(float)
    for segment in path:
        by_name[_name(segment)] += segment.seconds
    stretches = sorted(_stretches(path), key=lambda stretch: -stretch["seconds"])[:LONGEST]

    def line(name: str, seconds: float) -> dict[str, Any]:
        return {"name": name, "seconds": seconds, "share": seconds / step if step else 0.0}

    return {
        "attribution": [line(name, seconds) for name, seconds in causes(result).items() if seconds],
        "critical_path": [line(*item) for item in sorted(by_name.items(), key=lambda item: -item[1])],
        "longest_stretches": sorted(stretches, key=lambda stretch: stretch["start_s"]),
        "memory": [asdict(holder) for holder in holders(result)],
        "changes": [asdict(change) for change in sorted(changes, key=lambda change: -change.gain)],
        "notes": list(_notes(result, changes)),
    }


def _notes(result: Result, changes: Iterable[Change]) -> Iterator[str]:
    """Why faster links may gain more than the time for which the step waits for them."""
    time = result.time
    waiting = time.exposed_comm_s / time.step_s if time.step_s else 0.0
    for change in changes:
        saved = 1 - 1 / (1 + change.gain)
        if change.kind == "hardware" and " links " in change.name and saved > waiting:
            yield (
                f"{change.name}: saves {saved:.1%} of the step, more than the {waiting:.1%} for which it waits "
                f"for collectives. Those that run under compute take multiprocessors and memory bandwidth from it "
                f"(kernels beside them run {result.profile.collective_slowdown:.2f} times as long); the faster they "
                "end, the sooner the kernels have the GPU to themselves."
            )


def _name(segment: Segment) -> str:
    if segment.record is not None and isinstance(segment.record.op.work, Compute):
        return f"compute, {segment.record.op.phase}"
    return cause_label(cause(segment)[1])


def _stretches(path: Sequence[Segment]) -> Iterator[dict[str, Any]]:
    """Neighbours of the same name, joined."""
    start, current = 0, None
    for index, name in enumerate([*(_name(segment) for segment in path), None]):
        if name == current:
            continue
        if current is not None:
            first, last = path[start], path[index - 1]
            ops = [s.record.op for s in (first, last) if s.record is not None]
            between = " to ".join(dict.fromkeys(op.module or op.label for op in ops))
            origin = path[0].start_s
            yield {
                "name": current,
                "ops": between,
                "start_s": first.start_s - origin,
                "seconds": last.end_s - first.start_s,
            }
        start, current = index, name


def _share(line: dict[str, Any]) -> str:
    return f"{label(line['name']):<50} {duration(line['seconds']):>12} {line['share']:>7.1%}"


def _stretch(line: dict[str, Any]) -> str:
    return f"{line['start_s']:>9.4f} s  {duration(line['seconds']):>11}  {line['name']}" + (
        f" ({line['ops']})" if line["ops"] else ""
    )


def _holder(line: dict[str, Any]) -> str:
    times = f"{line['count']} x " if line["count"] > 1 else ""
    label = CATEGORY_LABELS.get(line["category"], line["category"])
    return f"{line['nbytes'] / GIB:>7.2f} GiB  {label:<18}  {times}{line['tensor']}"


def _changes(changes: Iterable[Change], names: int) -> Iterator[str]:
    """What fits first, the fastest first; `names` is the length of the longest name of any section."""
    yield "tokens/s"
    for change in sorted(changes, key=lambda change: (not change.fits, -change.gain)):
        memory = f"{abs(change.headroom_bytes) / GIB:.1f} GiB"
        lacking = f"lacks {memory}" if change.headroom_bytes < 0 else f"lacks {change.short_of}"
        memory = f"{memory} free" if change.fits else lacking
        yield f"{change.gain:>+z8.1%}  {change.name:<{names}}  {memory}"
