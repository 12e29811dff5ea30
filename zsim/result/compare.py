"""Several Results side by side: what differs in the inputs, in the outcome, and why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zsim.document import flat
from zsim.errors import InputError, NotModeled
from zsim.model.spec import Workload
from zsim.plan.spec import DeepSpeedPlan
from zsim.program.ops import Collective, Copy, Launch
from zsim.result.names import setting
from zsim.result.render.style import CATEGORY_LABELS, cause_label
from zsim.result.spec import Result

GIB = 2**30
CACHED = "cached by the allocator"  # in a tight run as much as there is room for
_SAID_BEFORE = ("world_size", "gpus_per_node")


@dataclass(frozen=True, slots=True)
class Line:
    """One property of every setup. `unit`: s, bytes, 1/s, share, count or "" (as it is)."""

    name: str
    values: tuple[Any, ...]
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Impossible:
    """A setup that was asked for and cannot run, or that zsim does not simulate."""

    name: str
    why: str

    @classmethod
    def of(cls, name: str, error: InputError) -> Impossible:
        kind = "modeled" if isinstance(error, NotModeled) else "possible"
        return cls(name, ": ".join(part for part in (f"not {kind}", error.field, error.message) if part))


@dataclass(frozen=True, slots=True)
class Comparison:
    """`inputs` has what differs only; the others have everything that is not zero for all.

    `programs`: collectives and copies issued in a steady step, calls and bytes by kind and phase. `reasons`: sentences
    on what makes each setup differ from the first, in which `letters` stand for the setups. `impossible`: setups that
    are none of them.
    """

    letters: tuple[str, ...]
    names: tuple[str, ...]
    inputs: tuple[Line, ...]
    outcome: tuple[Line, ...]
    time: tuple[Line, ...]
    memory: tuple[Line, ...]
    programs: tuple[Line, ...]
    reasons: tuple[str, ...]
    impossible: tuple[Impossible, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(results: Sequence[Result], impossible: Sequence[Impossible] = ()) -> Comparison:
    """Compares `results`, the first being the one that others are held against; says what else is `impossible`."""
    letters = tuple(chr(ord("A") + index) if index < 26 else str(index + 1) for index in range(len(results)))
    time = tuple(_lines([causes(result) for result in results], "s"))
    memory = tuple(_lines([holders(result) for result in results], "bytes"))
    return Comparison(
        letters=letters,
        names=titles(results),
        inputs=tuple(_inputs(results)),
        outcome=tuple(_outcome(results)),
        time=time,
        memory=memory,
        programs=tuple(_programs(results)),
        reasons=tuple(_reasons(letters, results, time, memory)),
        impossible=tuple(impossible),
    )


def holders(result: Result) -> dict[str, int]:
    """What a GPU's memory is taken by, bytes; adds up to what nvidia-smi shows."""
    gpu = result.gpu
    cached = gpu.peak_reserved_bytes - gpu.peak_allocated_bytes
    return {**gpu.by_category, CACHED: cached}


def causes(result: Result) -> dict[str, float]:
    """The step by cause, seconds; adds up to the step."""
    time = result.time
    split = {f"compute, {phase}": seconds for phase, seconds in time.compute_by_phase.items()}
    split |= {f"exposed {name}": seconds for name, seconds in time.exposed_by.items()}
    split["waiting for the host"] = time.host_s
    return split | {f"waiting for {name}": seconds for name, seconds in time.idle_by.items()}


def _inputs(results: Sequence[Result]) -> Iterator[Line]:
    flat, usual = [_named(result, asdict(result.headline)) for result in results], [_usual(r) for r in results]
    frameworks = {result.headline.framework for result in results}
    for key in dict.fromkeys(key for each in flat for key in each):
        if key == "framework.version" and len(frameworks) > 1:
            continue
        values = tuple(each.get(key) for each in flat)
        owners = [index for index, each in enumerate(flat) if key in each]
        if len(owners) < len(flat) and all(values[index] == usual[index].get(key, ()) for index in owners):
            continue  # of one framework only, and left at its default
        if any(value != values[0] for value in values):
            yield Line(key, values)


def _usual(result: Result) -> dict[str, Any]:
    """The fields of the plan as its framework has them by default."""
    plan = result.setup.plan
    return _named(result, {"plan": asdict(type(plan)(world_size=plan.world_size))})


def _named(result: Result, headline: Mapping[str, Any]) -> dict[str, Any]:
    """Under the names that `--set` takes, and each once; what a machine or a framework is, under its own."""
    found = {}
    for key, value in flat(headline):
        owner, _, field = key.partition(".")
        if owner == "plan" and field not in _SAID_BEFORE:
            found[setting(type(result.setup.plan), field)] = value
        elif owner == "workload":
            found[setting(Workload, field)] = value
        elif owner not in ("plan", "stage"):
            found[key] = value
    return found


def _outcome(results: Sequence[Result]) -> Iterator[Line]:
    def line(name: str, unit: str, values: Iterable[Any]) -> Line:
        return Line(name, tuple(values), unit)

    yield line("fits", "", ("no" if not r.fits else "tight" if r.tight else "yes" for r in results))
    if any(r.short_of not in (None, "GPU memory") for r in results):
        yield line("short of", "", (r.short_of or "" for r in results))
    yield line("memory without cache", "bytes", (r.gpu.without_cache_bytes for r in results))
    yield line("memory with cache", "bytes", (r.gpu.nvidia_smi_bytes for r in results))
    yield line("headroom", "bytes", (r.gpu.headroom_bytes for r in results))
    if any(r.host.peak_bytes for r in results):
        yield line("host memory per node", "bytes", (r.host.peak_bytes for r in results))
    yield line("step", "s", (r.time.step_s for r in results))
    yield line("tokens/s per GPU", "1/s", (r.throughput.tokens_per_s_per_gpu for r in results))
    yield line("tokens/s", "1/s", (r.throughput.tokens_per_s for r in results))
    yield line("MFU", "share", (r.throughput.mfu for r in results))
    yield line("HFU", "share", (r.throughput.hfu for r in results))
    yield line("bottleneck", "", (r.bottleneck.name for r in results))


def _lines(splits: Sequence[Mapping[str, float]], unit: str) -> Iterator[Line]:
    for name in dict.fromkeys(name for split in splits for name in split):
        values = tuple(split.get(name, 0) for split in splits)
        if any(values):
            yield Line(name, values, unit)


def _programs(results: Sequence[Result]) -> Iterator[Line]:
    calls: list[Counter[str]] = []
    sizes: list[Counter[str]] = []
    for result in results:
        count, nbytes = Counter[str](), Counter[str]()
        for instruction in result.program.steps[-1]:
            if isinstance(instruction, Launch) and isinstance(work := instruction.op.work, Collective | Copy):
                op, kind = instruction.op, work.kind if isinstance(work, Collective) else work.direction
                name, times = f"{kind}/{op.phase}", result.timeline.times_issued(op)
                count[name] += times
                nbytes[name] += times * round(work.payload_bytes if isinstance(work, Collective) else work.nbytes)
        calls.append(count)
        sizes.append(nbytes)
    for name in sorted({name for count in calls for name in count}):
        yield Line(f"{name} calls", tuple(count[name] for count in calls), "count")
        yield Line(f"{name} bytes", tuple(nbytes[name] for nbytes in sizes), "bytes")


def _reasons(
    names: Sequence[str], results: Sequence[Result], time: Sequence[Line], memory: Sequence[Line]
) -> Iterator[str]:
    first = results[0]
    yield from _twins(names, results)
    for index, (name, result) in enumerate(zip(names, results, strict=True)):
        if index == 0:
            continue
        more_tokens = result.headline.tokens_per_step / first.headline.tokens_per_step
        if more_tokens != 1:
            speeds = (each.throughput.tokens_per_s_per_gpu for each in (result, first))
            own, other = (f"{speed:,.0f}" for speed in speeds)
            many = f"{more_tokens:.3g} times the tokens of {names[0]} in a step"
            yield f"{name} has {many}: {own} against {other} tokens/s per GPU"
        slower = result.time.step_s - first.time.step_s
        word = "slower" if slower > 0 else "faster"
        if abs(slower) > 1e-3 * first.time.step_s:
            yield f"{name} is {abs(slower):.3g} s per step {word} than {names[0]}: {_largest(time, index, _seconds)}"
        more = result.gpu.without_cache_bytes - first.gpu.without_cache_bytes
        if abs(more) > 1e-3 * first.gpu.without_cache_bytes:
            word = "more" if more > 0 else "less"
            text = _largest([line for line in memory if line.name != CACHED], index, _gib)
            many = f"{abs(more) / GIB:.2f} GiB {word}"
            yield f"{name} needs {many} per GPU than {names[0]}, cache aside: at the peak, {text}"


def _twins(names: Sequence[str], results: Sequence[Result]) -> Iterator[str]:
    """Setups that take the same time because they issue the same."""
    issued = [tuple(_issued(result)) for result in results]
    for index, (name, result) in enumerate(zip(names, results, strict=True)):
        for other in range(index):
            if issued[other] != issued[index] or result.time.step_s != results[other].time.step_s:
                continue
            plans = result.setup.plan, results[other].setup.plan
            stages = {plan.stage for plan in plans if isinstance(plan, DeepSpeedPlan)}
            why = ""
            if stages == {1, 2}:
                why = (
                    ": with overlap_comm DeepSpeed all-reduces gradient buckets during backward in stage 1 as in stage "
                    "2, in stage 2 in every micro-step, of which there is one. Their memory may differ"
                )
            yield f"{name} takes as long as {names[other]}, as it issues the same kernels and collectives{why}"
            break


def _issued(result: Result) -> Iterator[tuple[object, ...]]:
    """What the host launches in a steady step, without the memory around it."""
    for instruction in result.program.steps[-1]:
        if isinstance(instruction, Launch):
            yield instruction.op.lane, instruction.op.phase, instruction.op.label, instruction.op.work


def _largest(lines: Sequence[Line], index: int, show: Any) -> str:
    """The three largest differences from the first setup, in words."""
    changes = sorted(((line.values[index] - line.values[0], line.name) for line in lines), key=lambda c: -abs(c[0]))
    named = ((CATEGORY_LABELS.get(name) or label(name), change) for change, name in changes[:3])
    return ", ".join(f"{name} {show(change)}" for name, change in named if change)


def label(name: str, between: str = " of ") -> str:
    """A cause or category as people say it: "exposed all_gather/forward" -> "exposed all-gather of forward"."""
    return re.sub(r"\w+/\w+", lambda cause: cause_label(cause[0], between), name).replace("_", " ")


def _seconds(value: float) -> str:
    return f"{value:+.3g} s"


def _gib(value: float) -> str:
    return f"{value / GIB:+.2f} GiB"


def titles(results: Sequence[Result]) -> tuple[str, ...]:
    """The names of the setups, numbered where two share one."""
    seen = Counter(result.name for result in results)
    return tuple(r.name if seen[r.name] == 1 else f"{index + 1}: {r.name}" for index, r in enumerate(results))
