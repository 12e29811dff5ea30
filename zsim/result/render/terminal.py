"""The report in a terminal: verdict first, good at 80 columns, without colour, and in a log file."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from zsim.result.render.style import CATEGORY_LABELS
from zsim.result.spec import Result

if TYPE_CHECKING:
    from rich.console import Console

GB, GIB = 1e9, 2**30
BAR = 24


def render(result: Result, console: Console, *, quiet: bool = False) -> None:
    """Prints the whole report to a rich console; `quiet`: the verdict alone."""
    width = min(console.width, 100)
    console.print(verdict(result), style="bold green" if result.fits else "bold red", highlight=False)
    if quiet:
        return
    console.print()
    for title, lines in (
        (_memory_title(result), _memory(result)),
        (_time_title(result), _time(result)),
        ("Throughput", _throughput(result)),
        ("Bottleneck", _bottleneck(result)),
        ("Textbook", _textbook(result)),
        ("Assumed", _bullets(result.assumptions)),
        ("Not modeled", _bullets(result.not_modeled)),
        ("Expected error", _expected_error(result)),
    ):
        if not (lines := list(lines)):
            continue
        console.print(title, style="bold", highlight=False)
        for line in lines:
            for part in _wrap(line, width - 2):
                console.print("  " + part, highlight=False, markup=False, soft_wrap=True)
        console.print()


def verdict(result: Result) -> str:
    """One line: does it fit, with what headroom; all that `--quiet` prints."""
    gpu, host = result.gpu, result.host
    speed = f"{result.time.step_s:.3g} s/step, {result.throughput.tokens_per_s_per_gpu:,.0f} tokens/s/GPU"
    if result.fits:
        spare = f"{gpu.headroom_bytes / GIB:.1f} GiB free of {gpu.capacity_bytes / GIB:.1f} GiB per GPU"
        return f"FITS: {result.name}: {spare}; {speed}"
    missing = []
    if not gpu.fits:
        missing.append(f"{-gpu.headroom_bytes / GIB:.1f} GiB missing on each GPU of {gpu.capacity_bytes / GIB:.1f} GiB")
    if not host.fits:
        missing.append(f"host needs {host.peak_bytes / GIB:.0f} GiB of {host.capacity_bytes / GIB:.0f} GiB per node")
    return f"DOES NOT FIT: {result.name}: {' and '.join(missing)} (if it fitted: {speed})"


def _memory_title(result: Result) -> str:
    return f"Memory per GPU, at the peak ({result.gpu.peak_at})"


def _memory(result: Result) -> Iterable[str]:
    gpu = result.gpu
    scale = max(gpu.capacity_bytes, gpu.needed_bytes)
    for category, nbytes in sorted(gpu.by_category.items(), key=lambda item: -item[1]):
        if category != "framework":
            yield _row(CATEGORY_LABELS.get(category, category), nbytes, scale)
    yield _row("= allocated", gpu.peak_allocated_bytes, scale, "torch max_memory_allocated")
    yield _row("reserved", gpu.peak_reserved_bytes, scale, "torch max_memory_reserved")
    yield _row("+ " + CATEGORY_LABELS["framework"], gpu.framework_bytes, scale, "outside the allocator")
    yield _row("= nvidia-smi shows", gpu.needed_bytes, scale, "decides about out-of-memory")
    yield _row("capacity", gpu.capacity_bytes, scale)
    if gpu.fits_without_cache and not gpu.fits:
        yield "The tensors alone would fit: the allocator would have to give cached blocks back."
    if result.host.peak_bytes:
        host = result.host
        yield f"host, per node: {host.peak_bytes / GIB:.1f} GiB pinned of {host.capacity_bytes / GIB:.0f} GiB"


def _row(label: str, nbytes: float, scale: float, note: str = "") -> str:
    filled = round(BAR * nbytes / scale)
    return f"{label:<20} {nbytes / GIB:>8.2f} GiB  {'█' * filled:<{BAR}} {note}".rstrip()


def _time_title(result: Result) -> str:
    return f"Step: {result.time.step_s:.4g} s" + ("" if result.fits else " (as if it fitted)")


def _time(result: Result) -> Iterable[str]:
    time = result.time
    yield _share("compute", time.compute_s, time.step_s)
    for phase, seconds in time.compute_by_phase.items():
        yield _share("  " + phase, seconds, time.step_s)
    yield _share("exposed communication", time.exposed_comm_s, time.step_s)
    for name, seconds in _significant(time.exposed_by, time.step_s):
        yield _share("  " + name, seconds, time.step_s)
    yield _share("waiting for host", time.host_s, time.step_s)
    yield _share("other idle", time.idle_s, time.step_s)
    for name, seconds in _significant(time.idle_by, time.step_s):
        yield _share("  " + name, seconds, time.step_s)


def _significant(seconds: Mapping[str, float], step_s: float) -> Iterable[tuple[str, float]]:
    return ((name, value) for name, value in seconds.items() if value >= 0.001 * step_s)


def _share(label: str, seconds: float, step_s: float) -> str:
    share = seconds / step_s if step_s else 0.0
    return f"{label:<28} {seconds:>9.4g} s {share:>6.1%}  {'█' * round(BAR * share)}".rstrip()


def _throughput(result: Result) -> Iterable[str]:
    speed = result.throughput
    yield f"{speed.tokens_per_s_per_gpu:,.0f} tokens/s per GPU, {speed.tokens_per_s:,.0f} in all"
    if speed.mfu is not None and speed.hfu is not None:
        yield f"MFU {speed.mfu:.1%}, with recomputation (HFU) {speed.hfu:.1%}"


def _bottleneck(result: Result) -> Iterable[str]:
    worst = result.bottleneck
    yield f"{worst.name}: {worst.share:.0%} of the step ({worst.group} in all {worst.group_share:.0%})"


def _textbook(result: Result) -> Iterable[str]:
    book, gpu = result.textbook, result.gpu
    gpus = result.headline.world_size
    yield (
        f"{book.formula} = {book.per_gpu_bytes / GB:.1f} GB ({book.per_gpu_bytes / GIB:.1f} GiB) of states per GPU; "
        f"P = {result.params / 1e9:.2f}e9, N = {gpus}; here {gpu.needed_bytes / GB:.1f} GB"
    )


def _expected_error(result: Result) -> Iterable[str]:
    accuracy = result.accuracy
    if accuracy.step_time_error is None:
        yield f"unknown: {accuracy.evidence}"
    else:
        yield f"step time {accuracy.step_time_error:.0%} on average: {accuracy.evidence}"


def _bullets(texts: Iterable[str]) -> Iterable[str]:
    return (f"- {text}" for text in texts)


def _wrap(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    return textwrap.wrap(line, width, subsequent_indent="  ")
