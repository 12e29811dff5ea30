"""The report in a terminal: verdict first, good at 80 columns, without colour, and in a log file."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from zsim.plan.spec import Allocator
from zsim.result.render.page import Page
from zsim.result.render.style import CATEGORY_LABELS, cause_label
from zsim.result.reported import CLOSE, Record, record
from zsim.result.spec import Headline, MomentMemory, Result
from zsim.result.textbook import ADAM, optimizer_bytes

if TYPE_CHECKING:
    from zsim.result.sensitivity import Change

GB, GIB = 1e9, 2**30
STATES = ("parameters", "gradients", "optimizer_states", "master_weights")
_EIGHTHS = " ▏▎▍▌▋▊▉"


def render(result: Result, page: Page) -> None:
    """Prints the whole report."""
    inner, blocks = page.width - 2, page.blocks
    page.say(verdict(result), verdict_style(result))
    page.say(headline(result.headline))
    for title, lines in (
        ("Memory per GPU", _memory(result, inner, blocks)),
        (_time_title(result), _time(result, inner, blocks)),
        ("Bottleneck", _bottleneck(result)),
        ("Against the textbook", _textbook(result)),
        ("Expected error", accuracy(result)),
        ("Assumed", _bullets(result.assumptions)),
        ("Not modeled", _bullets(result.not_modeled)),
    ):
        if said := list(lines):
            page.section(title, said)


def render_changes(result: Result, changes: Sequence[Change] | None, page: Page, overrides: Sequence[str] = ()) -> None:
    """Prints what would help, or make a run fit; each line was simulated. None: says how to have them simulated.

    `overrides`: with which the scenario was run, so that the command which is named explains this run.
    """
    title = "What would help" if result.fits else "What would make it fit"
    page.section(title, _changes(result, changes, overrides))


def _changes(result: Result, changes: Sequence[Change] | None, overrides: Sequence[str]) -> Iterator[str]:
    if changes is None:
        yield "--changes 3 simulates it, as on a terminal; zsim explain every setting and part"
        return
    for change in changes:
        gain = f"{change.gain:+.1%} tokens/s" if result.fits else f"{change.tokens_per_s_per_gpu:,.0f} tokens/s per GPU"
        yield f"{gain}: {change.name}" + _beside(result, change)
    if not changes and result.fits:
        from zsim.result.suggestions import GAINS

        yield f"nothing that was tried gains {GAINS:.1%}"
    elif not changes:
        yield "none of the settings tried, nor two of them together: zsim plan searches further"
    if result.fits and result.setup.sources:
        command = shlex.join(
            ["zsim", "explain", str(result.setup.sources[0]), *(f"--set={set_}" for set_ in overrides)]
        )
        yield f"Each was simulated. All settings and parts: {command}"


def _beside(result: Result, change: Change) -> str:
    """What else a change does: to the batch of a step, to the memory that is left."""
    if change.kind == "hardware":
        return ""
    more = change.tokens_per_step / result.headline.tokens_per_step
    batch = "" if more == 1 else f", {more:g} times the tokens per step"
    return f" ({change.headroom_bytes / GIB:.1f} GiB free{batch})"


def verdict_style(result: Result) -> str:
    return {"over": "bold red", "tight": "bold yellow", "fits": "bold green"}[state(result)]


def state(result: Result) -> str:
    """What decides the colour of a verdict."""
    return "over" if not result.fits else "tight" if result.tight or record(result) is CLOSE else "fits"


def _odds(known: Record | None) -> str:
    return f", but {known.ran_out} of {known.runs} such reported runs ran out of memory" if known else ""


def verdict(result: Result) -> str:
    """One line: does it fit, with what headroom, how fast."""
    gpu, host = result.gpu, result.host
    speed = f"{result.time.step_s:.3g} s/step, {result.throughput.tokens_per_s_per_gpu:,.0f} tokens/s per GPU"
    if result.fits:
        if gpu.allocator_retries:
            cached = (gpu.peak_reserved_bytes - gpu.peak_allocated_bytes) / GIB
            taken = f"takes all {_most(result)} per GPU, {cached:.1f} of them to cache and fragments"
            return f"FITS, tight{_odds(record(result))}: {result.name}: {taken}; {speed}"
        free = f"{gpu.headroom_bytes / GIB:.1f} of {_most(result)} free per GPU"
        if moment := next((each for each in result.moments if each.gpu_tight or each.host_tight), None):
            return f"FITS, tight: {result.name}: {_moment(result, moment)}; {speed}"
        if result.tight:
            taken = f"{host.peak_bytes / GIB:.0f} of {host.capacity_bytes / GIB:.0f} GiB of host RAM per node"
            return f"FITS, tight: {result.name}: {taken}, without the system's own; {free}; {speed}"
        if gpu.evicted_bytes:
            free = f"{gpu.evicted_bytes / GIB:.1f} GiB of optimizer states per GPU wait in host memory"
            return f"FITS thanks to paging: {result.name}: {free}; {speed}"
        known = record(result)
        return f"FITS{_odds(known) if known is CLOSE else ''}: {result.name}: {free}; {speed}"
    missing = []
    if not gpu.fits:
        missing.append(f"at least {-gpu.headroom_bytes / GIB:.1f} GiB missing per GPU of {_most(result)}")
    if host.peak_bytes > host.capacity_bytes > 0:
        when = "at step 0" if host.peak_at == "initialization" else f"in {host.peak_at.split(',')[0]}"
        of = f"{host.peak_bytes / GIB:.0f} of {host.capacity_bytes / GIB:.0f} GiB per node"
        missing.append(f"host RAM {of}: killed by the OOM killer {when}")
    if host.nvme_peak_bytes > host.nvme_capacity_bytes:
        missing.append(f"NVMe {host.nvme_peak_bytes / GIB:.0f} of {host.nvme_capacity_bytes / GIB:.0f} GiB per node")
    if not missing:
        return f"DOES NOT FIT: {result.name}: trains, but runs out while {_short_of_moments(result)}; {speed}"
    return f"DOES NOT FIT: {result.name}: {', '.join(missing)} (if it fitted: {speed})"


def _short_of_moments(result: Result) -> str:
    """At which moment memory runs out first, and what takes it."""
    first = next(each for each in result.moments if not each.fits)
    taken, of = first.host_bytes / GIB, f"{result.host.capacity_bytes / GIB:.0f} GiB of host RAM per node"
    if not first.gpu_fits:
        taken, of = first.gpu_bytes / GIB, f"{_most(result)} per GPU"
    return f"{first.moment}, for which at least {taken:.0f} of {of} are needed: {first.cause}"


def _most(result: Result) -> str:
    """The memory that a GPU has, or that torch may reserve of it where that is what runs short."""
    gpu = result.gpu
    if gpu.allowed_bytes is None or not gpu.short_of_allowed:
        return f"{gpu.capacity_bytes / GIB:.1f} GiB"
    fraction = result.setup.plan.allocator.per_process_memory_fraction
    return (
        f"the {gpu.allowed_bytes / GIB:.1f} GiB that torch may reserve (per_process_memory_fraction {fraction:g} of "
        f"{gpu.capacity_bytes / GIB:.1f} GiB)"
    )


def headline(of: Headline) -> str:
    """What was simulated, in a sentence."""
    stage = "" if of.stage is None else f" stage {of.stage}"
    work = of.workload
    accumulation = of.plan["grad_accum"]
    return (
        f"{of.model} on {of.world_size}x {', '.join(of.devices)} ({of.cluster}); {of.framework}{stage}; "
        f"micro-batch {_batch(work['micro_batch'], work['preference'])} x {work['seq_len']:,} tokens"
        + (f" over {shared} GPUs (Ulysses)" if (shared := work["sequence_parallel_size"]) > 1 else "")
        + (f" x {accumulation} accumulation steps" if accumulation > 1 else "")
        + f"; checkpointing {work['checkpointing']}"
        + (f" in {len(work['checkpointed'])} blocks" if work["checkpointed"] else "")
        + _allocator(of.plan["allocator"])
    )


def _batch(count: int, preference: Mapping[str, Any] | None) -> str:
    if preference is None:
        return f"{count}"
    against = {"model": "against a second model", "adapters": "against itself without adapters"}
    by = " ".join(filter(None, (preference["kind"].upper(), against.get(preference["reference"]))))
    return f"{count} pair{'s' * (count != 1)} ({by}), 2 sequences"


def _allocator(settings: Mapping[str, Any]) -> str:
    """What PYTORCH_ALLOC_CONF sets."""
    defaults = asdict(Allocator())
    changed = ", ".join(f"{name}={value}" for name, value in settings.items() if value != defaults[name])
    return f"; allocator {changed}" if changed else ""


def _memory(result: Result, width: int, blocks: bool) -> Iterator[str]:
    gpu = result.gpu
    scale = max(gpu.capacity_bytes, gpu.nvidia_smi_bytes)

    def row(label: str, nbytes: float, mark: str = "") -> str:
        room = width - 38
        drawn = bar(nbytes / scale, room, blocks, gpu.capacity_bytes / scale)
        return f"{label:<23}{nbytes / GIB:>8.2f} GiB  {drawn}{mark}".rstrip()

    for category, nbytes in sorted(gpu.by_category.items(), key=lambda item: -item[1]):
        if category != "framework":
            yield row(CATEGORY_LABELS.get(category, category), nbytes)
    yield row("= allocated", gpu.peak_allocated_bytes)
    yield row("  reserved" + ("" if gpu.fits else ", at least"), gpu.peak_reserved_bytes)
    if gpu.allowed_bytes is not None:
        yield row("  torch may reserve", gpu.allowed_bytes)
    if gpu.framework_bytes:
        yield row("+ " + CATEGORY_LABELS["framework"], gpu.framework_bytes)
        yield row("= shown by nvidia-smi", gpu.nvidia_smi_bytes)
    yield row("  capacity", gpu.capacity_bytes)
    decides = "what nvidia-smi shows" if gpu.framework_bytes and not gpu.short_of_allowed else "the latter"
    yield (
        f"Allocated and reserved are torch's max_memory_allocated (at {gpu.peak_at}) and max_memory_reserved; "
        f"{decides} decides about out-of-memory."
    )
    if gpu.paged_bytes:
        resident = (gpu.paged_bytes - gpu.evicted_bytes) / GIB
        where = f"{gpu.paged_bytes / GIB:.2f} GiB of optimizer states are paged: {resident:.2f} on the GPU"
        if gpu.evicted_bytes:
            where += (
                f", {gpu.evicted_bytes / GIB:.2f} on the host; as they do not fit beside the rest, all of them come up "
                "and go down once per step"
            )
        yield f"{where}."
    yield from strain(result)
    host = result.host
    if host.peak_bytes:
        parts = ", ".join(f"{name.replace('_', ' ')} {n / GIB:.1f}" for name, n in host.by_category.items())
        of = f" of {host.capacity_bytes / GIB:.0f}" if host.capacity_bytes else ""
        yield f"Host RAM per node: {host.peak_bytes / GIB:.1f}{of} GiB ({parts})."
    yield from beside(result)
    if host.nvme_peak_bytes:
        yield f"NVMe per node: {host.nvme_peak_bytes / GIB:.1f} of {host.nvme_capacity_bytes / GIB:.0f} GiB."


def beside(result: Result) -> Iterator[str]:
    """Moments that need more than the steps."""
    if result.moments:
        yield f"Beyond training: {'; '.join(_moment(result, moment) for moment in result.moments)}."


def strain(result: Result) -> Iterator[str]:
    """Where the GPU's memory runs out, or what the allocator does to get through."""
    gpu = result.gpu
    if gpu.out_of_memory_at:
        yield f"Runs out at {gpu.out_of_memory_at}."
    if gpu.allocator_retries and gpu.fits:
        every_step = gpu.allocator_retries_per_step
        timed = f" {gpu.remapping_s:.2g} s of it" if gpu.remapping_s else " whose time leaves them out"
        untimed = f" {every_step} are in every step,{timed}." if every_step else ""
        yield (
            f"To get through, the allocator gives cached memory back {gpu.allocator_retries} times, which is slow."
            f"{untimed}"
        )


def _moment(result: Result, moment: MomentMemory) -> str:
    taken = [f"{moment.gpu_bytes / GIB:.1f} of {_most(result)} per GPU"] if moment.gpu_bytes else []
    if moment.host_bytes > result.host.peak_bytes:
        taken.append(f"{moment.host_bytes / GIB:.1f} GiB of host RAM per node")
    return f"{moment.moment} takes {' and '.join(taken)} ({moment.cause})"


def _time_title(result: Result) -> str:
    return f"Step: {duration(result.time.step_s)}" + ("" if result.trains else ", as if it fitted")


def _time(result: Result, width: int, blocks: bool) -> Iterator[str]:
    time = result.time

    def row(label: str, seconds: float) -> str:
        share = seconds / time.step_s if time.step_s else 0.0
        return f"{label:<37}{duration(seconds):>9}{share:>7.1%}  {bar(share, width - 55, blocks)}".rstrip()

    def parts(seconds: Mapping[str, float]) -> Iterator[str]:
        for name, value in seconds.items():
            if value >= 0.001 * time.step_s:
                yield row("  " + cause_label(name), value)

    yield row("compute", time.compute_s)
    yield from parts(time.compute_by_phase)
    yield row("exposed communication", time.exposed_comm_s)
    yield from parts(time.exposed_by)
    yield row("waiting for the host", time.host_s)
    yield row("other idle", time.idle_s)
    yield from parts(time.idle_by)
    if time.comm_s:
        hidden = time.overlapped_comm_s / time.comm_s
        yield f"Collectives run for {duration(time.comm_s)}, {hidden:.0%} of it under compute."
    if abs(time.first_step_s - time.step_s) > 0.05 * time.step_s:
        yield f"The first step takes {duration(time.first_step_s)}."
    speed = result.throughput
    text = f"{speed.tokens_per_s_per_gpu:,.0f} tokens/s per GPU, {speed.tokens_per_s:,.0f} in all"
    if speed.mfu is not None and speed.hfu is not None:
        text += f"; MFU {speed.mfu:.1%}, with recomputation (HFU) {speed.hfu:.1%}"
    yield text + "."


def _bottleneck(result: Result) -> Iterator[str]:
    worst = result.bottleneck
    whole = f" ({worst.group} in all: {worst.group_share:.0%})" if worst.group_share > worst.share + 0.005 else ""
    yield f"{worst.name}: {worst.share:.0%} of the critical path{whole}."
    yield from _beside_the_path(result)


def _beside_the_path(result: Result) -> Iterator[str]:
    """Why the bottleneck is another than the largest part of the step, or of another size: the step above counts when
    kernels run, the path what had to end before the next could begin."""
    time, path, group = result.time, dict(result.bottleneck.path), result.bottleneck.group
    rows = {"compute": time.compute_s, "communication": time.exposed_comm_s, "host": time.host_s, "idle": time.idle_s}
    own = group if group in rows else "idle"
    most = max(rows, key=lambda name: rows[name])
    on_path = {name: path.pop(name, 0.0) for name in rows} | {"idle": sum(path.values())}
    label, share = _ROWS[most], rows[most] / time.step_s if time.step_s else 0.0
    if rows[most] > rows[own]:
        yield (
            f"That path is what had to end before the next could begin. {label.capitalize()}, {share:.0%} of the step, "
            f"is {on_path[most]:.0%} of it: the rest runs beside {_BESIDE.get(group, group)}, and holds nothing up."
        )
    elif own != "compute" and on_path[own] > share + 0.05:
        yield (
            "That path is what had to end before the next could begin, also beside kernels; "
            f"{label}, {share:.0%} of the step, is when none runs."
        )


_ROWS = {
    "compute": "compute", "communication": "exposed communication", "host": "waiting for the host",
    "idle": "other idle",
}  # fmt: skip
_BESIDE = {"host": "Python that issues too late", "communication": "collectives", "cpu optimizer": "the optimizer"}


def _textbook(result: Result) -> Iterator[str]:
    """The textbook's figure, and what lies between it and reality."""
    book, gpu = result.textbook, result.gpu
    held = dict(gpu.by_category)
    states = sum(held.pop(name, 0) for name in STATES)
    outside = held.pop("framework")
    parts = [f"{CATEGORY_LABELS.get(name, name)} {n / GIB:.1f}" for name, n in held.items() if n >= 0.05 * GIB]
    cached = gpu.peak_reserved_bytes - gpu.peak_allocated_bytes
    frozen = ""
    power = 9 if result.trainable_params >= 1e8 else 6
    trained = f"{result.trainable_params / 10**power:.2f}e{power}"
    if book.frozen_bytes:
        frozen = f", F = {book.frozen_bytes / GB:.1f} GB frozen"
    parts += [f"cached or not reusable yet {cached / GIB:.1f}"] + [f"CUDA and NCCL {outside / GIB:.1f}"] * bool(outside)
    optimizer = result.setup.plan.optimizer
    kept = optimizer_bytes(optimizer)
    named = "" if kept == ADAM else f", {kept} bytes of them {optimizer.name}'s and its master weights"
    yield (
        f"{book.formula} = {book.per_gpu_bytes / GB:.1f} GB = {book.per_gpu_bytes / GIB:.1f} GiB of states "
        f"(P = {trained}, N = {book.gpus}{frozen}{named})."
    )
    paged = f" beside {gpu.paged_bytes / GIB:.1f} of paged states" if gpu.paged_bytes else ""
    yield f"Here: states {states / GIB:.1f}, {', '.join(parts)}: {gpu.nvidia_smi_bytes / GIB:.1f} GiB{paged}."


def accuracy(result: Result) -> Iterator[str]:
    """How far off the report may be, and whose runs say so."""
    expected = result.accuracy
    if expected.step_time_error is None:
        yield f"unknown: {expected.evidence}"
    else:
        yield f"step time {expected.step_time_error:.0%} on average: {expected.evidence}"
    if known := record(result):
        yield (
            f'GPU memory: of {known.runs} runs that users reported and zsim calls "{known.says}", {known.ran_out} ran '
            f"out of it ({known.ran_out / known.runs:.0%})"
        )


def bar(share: float, room: int, blocks: bool, mark: float | None = None) -> str:
    """A bar of `share` of `room` columns, to the eighth of a column; `mark` draws a line at that share."""
    eighths = round(8 * room * share)
    text = "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip() if blocks else "#" * round(room * share)
    if mark is not None:
        at = min(round(room * mark), room)
        line = "│" if blocks else "|"
        text = text.ljust(at) + line if len(text) <= at else text[:at] + line + text[at:]
    return text


def duration(value: float) -> str:
    """Seconds as people read them."""
    if not value:
        return "0 s"
    if value >= 1:
        return f"{value:.3f} s"
    return f"{1e3 * value:.2f} ms" if value >= 1e-3 else f"{1e6 * value:.1f} us"


def _bullets(texts: Iterable[str]) -> Iterator[str]:
    return (f"- {text}" for text in texts)
