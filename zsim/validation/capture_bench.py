"""Micro-benchmarks of a capture: what each kind of work costs alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from zsim.model.kernels import Attention, Gemm
from zsim.model.spec import Compute, Module, Workload
from zsim.model.trace import trace
from zsim.validation.capture import BENCH_COLUMNS, Machine
from zsim.validation.capture_steps import MICRO_BATCH, SEQ_LEN, CapturedModel

Row = list[Any]
COLD_BYTES = 1 << 26  # more than caches hold


def run(machine: Machine, models: list[CapturedModel]) -> None:
    """Measure each group that is missing, and write it before the next one begins."""
    groups: dict[str, Callable[[], list[Row]]] = {
        "launch": lambda: launches(machine),
        "gemm": lambda: products(machine, models),
        "attention": lambda: attentions(machine, models),
        "memory": lambda: memory_bound(machine),
        "optimizer": lambda: optimizer_steps(machine),
        "copy": lambda: copies(machine),
        "collective": lambda: collectives(machine),
        "overlap": lambda: overlapped(machine),
    }
    for number, (name, measure) in enumerate(groups.items(), start=1):
        if name not in machine.done:
            machine.say(f"[{number}/{len(groups)}] {name}")
            machine.append("microbench.csv", BENCH_COLUMNS, measure())


def seconds(machine: Machine, work: Callable[[], object], together: bool = False, on_host: bool = False) -> list[float]:
    """Durations of repeated calls, until the budget is spent. `together`: all ranks start each call at once.

    On CUDA those of the stream, unless the work is done `on_host`: the host's clock would add launch and
    synchronization to each call.
    """
    at_least, at_most = (5, 60) if machine.quick else (9, 300)
    for _ in range(2):
        work()
    machine.synchronize()
    if together:
        dist.barrier()
    begun = time.perf_counter()
    work()
    machine.synchronize()
    count = max(at_least, min(at_most, int(machine.budget_s / max(1e-7, time.perf_counter() - begun))))
    if together:  # one count for all
        agreed = torch.tensor([count], device=machine.device)
        dist.broadcast(agreed, 0)
        count = int(agreed)
    if machine.kind == "cuda" and not on_host:
        return _on_stream(machine, work, count, together)
    durations = []
    for _ in range(count):
        if together:
            dist.barrier()
            machine.synchronize()
        begun = machine.clock()
        work()
        machine.synchronize()
        durations.append(machine.clock() - begun)
    return durations


def _on_stream(machine: Machine, work: Callable[[], object], count: int, together: bool) -> list[float]:
    """Between events around each call. Without a barrier the host runs ahead, so that the GPU does not wait for it."""
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(count)]
    for begun, ended in events:
        if together:
            dist.barrier()
            machine.synchronize()
        begun.record()
        work()
        ended.record()
    machine.synchronize()
    return [begun.elapsed_time(ended) * 1e-3 for begun, ended in events]


def row(
    kind: str, name: str, durations: list[float], machine: Machine, *, dtype: str = "", shape: str = "",
    nbytes: float = 0, flops: float = 0,
) -> Row:  # fmt: skip
    ordered = sorted(durations)
    last = len(ordered) - 1
    spread = [ordered[int(0.1 * last)], ordered[round(0.9 * last)]]
    return [kind, name, dtype, shape, machine.world, int(nbytes), int(flops), len(ordered), median(ordered), *spread]


def launches(machine: Machine) -> list[Row]:
    """The smallest kernel, issued in a row without waiting: what one costs the host (on a CPU: what any costs)."""
    small = torch.ones(8, device=machine.device)

    def hundred() -> None:
        for _ in range(100):
            small.add_(1.0)

    begun = []
    for _ in range(5 if machine.quick else 20):
        machine.synchronize()
        start = machine.clock()
        hundred()
        begun.append((machine.clock() - start) / 100)
    return [row("launch", "add", begun, machine, nbytes=64)]


def products(machine: Machine, models: list[CapturedModel]) -> list[Row]:
    """The shapes that the models use, and squares."""
    name = str(machine.dtype).removeprefix("torch.")
    shapes = {(side, side, side) for side in (256, 512, 1024)}
    for kernel in _kernels(models, Gemm):
        if kernel.batch == 1:
            shapes.add((kernel.m, kernel.n, kernel.k))
    rows = []
    for m, n, k in sorted(shapes, key=lambda shape: shape[0] * shape[1] * shape[2])[-40:]:
        a = torch.randn(m, k, device=machine.device, dtype=machine.dtype)
        b = torch.randn(n, k, device=machine.device, dtype=machine.dtype)
        durations = seconds(machine, lambda a=a, b=b: F.linear(a, b))  # type: ignore[misc]
        nbytes = (m * k + n * k + m * n) * a.element_size()
        rows.append(
            row(
                "gemm",
                "linear",
                durations,
                machine,
                dtype=name,
                shape=f"{m}x{n}x{k}",
                nbytes=nbytes,
                flops=2 * m * n * k,
            )
        )
    return rows


def attentions(machine: Machine, models: list[CapturedModel]) -> list[Row]:
    """Fused attention of each model, forward alone and with its backward."""
    rows = []
    for kernel in _kernels(models, Attention):
        if kernel.backward:
            continue
        shape = (kernel.batch, kernel.heads, kernel.q_len, kernel.head_dim)
        q, k, v = (torch.randn(shape, device=machine.device, dtype=machine.dtype, requires_grad=True) for _ in range(3))

        def forward(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v, causal: bool = kernel.causal) -> Any:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

        def both(forward: Callable[[], Any] = forward) -> None:
            forward().sum().backward()

        ahead, whole = seconds(machine, forward), seconds(machine, both)
        back = [max(0.0, duration - median(ahead)) for duration in whole]
        about = {
            "dtype": kernel.dtype,
            "shape": "x".join(map(str, (*shape, int(kernel.causal)))),
            "flops": kernel.flops,
        }
        rows.append(row("attention", "forward", ahead, machine, **about))
        rows.append(row("attention", "backward", back, machine, **(about | {"flops": 2.5 * kernel.flops})))
    return rows


def _kernels(models: list[CapturedModel], kind: type) -> list[Any]:
    """The different kernels of a kind that the models run, backward included."""
    found: dict[Any, None] = {}
    for model in models:
        workload = Workload(MICRO_BATCH, SEQ_LEN, model.workload_dtype, attention="sdpa")
        for work in _works(trace(model.spec, workload)):
            for kernel in (*work.forward, *work.backward):
                if isinstance(kernel, kind):
                    found[kernel] = None
    return list(found)


def _works(module: Module) -> Iterator[Compute]:
    for part in module.body:
        if isinstance(part, Module):
            yield from _works(part)
        else:
            yield part


def memory_bound(machine: Machine) -> list[Row]:
    rows = []
    size = 1 << 12
    while size <= machine.largest:
        a, b = (torch.ones(size // 4, device=machine.device) for _ in range(2))
        durations = seconds(machine, lambda a=a, b=b: a + b)  # type: ignore[misc]
        rows.append(row("memory", "add", durations, machine, dtype="float32", nbytes=3 * size))
        durations = seconds(machine, lambda a=a, b=b: a.copy_(b))  # type: ignore[misc]
        rows.append(row("memory", "copy", durations, machine, dtype="float32", nbytes=2 * size))
        size *= 4
    return rows


def optimizer_steps(machine: Machine) -> list[Row]:
    """AdamW over one tensor: reads parameter, gradient and two moments, writes three of them."""
    rows = []
    variants: dict[str, dict[str, Any]] = {"loop": {"foreach": False}, "fused": {"fused": True}}
    if machine.kind != "cpu":
        variants["foreach"] = {"foreach": True}
    for numel in (1 << 17, 1 << 20) if machine.kind == "cpu" else (1 << 20, 1 << 24):
        parameter = torch.nn.Parameter(torch.randn(numel, device=machine.device))
        parameter.grad = torch.randn_like(parameter)
        for name, options in variants.items():
            step = torch.optim.AdamW([parameter], **options).step
            rows.append(row("optimizer", name, seconds(machine, step), machine, dtype="float32", nbytes=28 * numel))
    return rows + cpu_optimizer(machine)


def cpu_optimizer(machine: Machine) -> list[Row]:
    """Fused AdamW on the host, all ranks at once, more than caches hold: with one thread, and a share of the cores.

    The column "shape" tells the threads.
    """
    rows = []
    before, share = torch.get_num_threads(), (os.cpu_count() or 1) // machine.world
    parameter = torch.nn.Parameter(torch.randn(1 << 23))
    parameter.grad = torch.randn_like(parameter)
    step = torch.optim.AdamW([parameter], fused=True).step
    # CPU ranks are pinned to a core; core seconds of several threads would be their sum.
    for threads in (1,) if machine.kind == "cpu" or share < 2 else (1, share):
        torch.set_num_threads(threads)
        durations = seconds(machine, step, together=machine.world > 1, on_host=True)
        about: dict[str, Any] = {"dtype": "float32", "shape": str(threads), "nbytes": 28 * parameter.numel()}
        rows.append(row("optimizer", "cpu", durations, machine, **about))
    torch.set_num_threads(before)
    return rows


def copies(machine: Machine) -> list[Row]:
    """Between host and device: pinned and pageable, one rank alone and all at once."""
    if machine.kind != "cuda":
        return []
    rows = []
    most = min(machine.largest, 1 << 28)
    for nbytes in (most >> 8, most >> 4, most):
        there = torch.empty(nbytes, dtype=torch.uint8, device=machine.device)
        for kind in ("pinned", "pageable"):
            here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=kind == "pinned")
            for name, target, source in (("h2d", there, here), ("d2h", here, there)):

                def copy(target: torch.Tensor = target, source: torch.Tensor = source) -> object:
                    return target.copy_(source, non_blocking=True)

                together = seconds(machine, copy, together=True)
                rows.append(row("copy", f"{name} {kind} together", together, machine, nbytes=nbytes))
                dist.barrier()
                if machine.rank == 0:
                    rows.append(row("copy", f"{name} {kind} alone", seconds(machine, copy), machine, nbytes=nbytes))
                dist.barrier()
    return rows


def collectives(machine: Machine) -> list[Row]:
    """By bytes of the full buffer, each call begun by all ranks together."""
    if machine.world == 1:
        return []
    rows = []
    size = 1 << 10
    while size <= machine.largest:
        for name, call in _calls(machine, size).items():
            durations = seconds(machine, call, together=True)
            rows.append(row("collective", name, durations, machine, dtype="float32", nbytes=size))
        size *= 4
    return rows


def _calls(machine: Machine, size: int) -> dict[str, Callable[[], object]]:
    """One of each kind over `size` bytes, each time on other buffers: a training step never finds them in a cache."""
    turns = range(min(64, max(1, COLD_BYTES // size)))
    share = size // 4 // machine.world
    full = cycle([torch.ones(size // 4, device=machine.device) for _ in turns])
    part = cycle([torch.ones(share, device=machine.device) for _ in turns])
    even = share * machine.world
    return {
        "all_gather": lambda: dist.all_gather_into_tensor(next(full)[:even], next(part)),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(next(part), next(full)[:even]),
        "all_reduce": lambda: dist.all_reduce(next(full)),
        "broadcast": lambda: dist.broadcast(next(full), 0),
        "send_recv": lambda: _exchange(machine, next(full)),
    }


def _exchange(machine: Machine, buffer: torch.Tensor) -> None:
    """From each even rank to the odd one after it."""
    partner = machine.rank ^ 1
    if partner < machine.world:
        (dist.send if machine.rank % 2 == 0 else dist.recv)(buffer, partner)


def overlapped(machine: Machine) -> list[Row]:
    """Products alone, an all-reduce alone, and both at once, for several sizes of the all-reduce.

    There are products enough to cover the all-reduce, so "both" is longer than the products by what it takes from them.
    """
    if machine.world == 1:
        return []
    side = 256 if machine.kind == "cpu" else 4096
    a = torch.randn(side, side, device=machine.device, dtype=machine.dtype)
    one = median(seconds(machine, lambda: a @ a))
    name, shape = str(machine.dtype).removeprefix("torch."), f"{side}x{side}x{side}"
    rows = []
    for size in (machine.largest // 16, machine.largest // 4, machine.largest):
        buffer = torch.ones(size // 4, device=machine.device)
        reduce = seconds(machine, lambda buffer=buffer: dist.all_reduce(buffer), together=True)  # type: ignore[misc]
        count = torch.tensor([1.5 * median(reduce) / one + 1], device=machine.device)
        dist.broadcast(count, 0)  # ranks that did different numbers would wait for each other
        products = int(count)

        def compute(products: int = products) -> None:
            for _ in range(products):
                a @ a

        def both(buffer: torch.Tensor = buffer, compute: Callable[[], None] = compute) -> None:
            work = dist.all_reduce(buffer, async_op=True)
            compute()
            work.wait()

        about: dict[str, Any] = {"nbytes": size, "dtype": name, "shape": shape, "flops": products * 2 * side**3}
        for label, durations in (
            ("products", seconds(machine, compute, together=True)),
            ("all_reduce", reduce),
            ("both", seconds(machine, both, together=True)),
        ):
            rows.append(row("overlap", label, durations, machine, **about))
    return rows
