"""What the engine costs, as ratios to things of this machine: `python tests/benchmarks/bench_engine.py`.

The program is a sharded step in outline: per layer an all-gather ahead, a dozen kernels forward and three dozen
backward, a reduce-scatter behind; 64 layers, two step programs, as in a ZeRO-3 run of a 32B model. The yardstick is a
bare SimPy process that waits for one timeout per op: what a generator per lane would cost at the very least.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import simpy

from zsim.cost.transfer import Transfer
from zsim.engine.allocator import replay
from zsim.engine.simulator import run
from zsim.model.kernels import Memory
from zsim.program.builder import Builder
from zsim.program.ops import (
    ALL_GATHER,
    COMPUTE,
    REDUCE_SCATTER,
    Collective,
    Compute,
    Copy,
    CpuWork,
    HostWork,
    Op,
    Program,
)

LAYERS, FORWARD, BACKWARD, RANKS = 64, 12, 34, 8


class Prices:
    link_capacity = {"fabric": 100e9}

    def compute_seconds(self, rank: int, work: Compute) -> float:
        return work.kernels[0].bytes / 1e12

    def issue_seconds(self, op: Op) -> float:
        return 5e-6

    def host_seconds(self, work: HostWork) -> float:
        return 1e-5 * work.count

    def cpu_seconds(self, rank: int, work: CpuWork) -> float:
        return work.nbytes / 1e10

    def transfer(self, work: Collective | Copy, groups: tuple[tuple[int, ...], ...]) -> Transfer:
        return Transfer(work.payload_bytes, {"fabric": 1.0 * len(groups)}, 10e-6, 90e9)

    def compute_slowdown(self, active) -> float:
        return 1.0 + 0.05 * len(active)


def step(layers: int, collectives: bool = True) -> Builder:
    builder = Builder()
    kernel = Compute((Memory("norm", 1e8, 0.0),))
    gather = Collective("all_gather", "bfloat16", 10_000_000, 80_000_000)
    scatter = Collective("reduce_scatter", "bfloat16", 80_000_000, 10_000_000)
    for phase, count in (("forward", FORWARD), ("backward", BACKWARD)):
        unit_ends: list[int] = []
        gathered = builder.launch(ALL_GATHER, "gather", phase, gather) if collectives else None
        for layer in range(layers):
            ahead = None
            if collectives and layer + 1 < layers:
                if len(unit_ends) > 1:
                    builder.stream_wait(ALL_GATHER, unit_ends[-2])
                ahead = builder.launch(ALL_GATHER, "gather", phase, gather)
            if gathered is not None:
                builder.alloc(f"{phase}{layer}", "all_gather_buffers", 160_000_000)
                builder.stream_wait(COMPUTE, gathered)
            for index in range(count):
                key = f"{layer}.{index}"
                if phase == "forward":
                    builder.alloc(key, "activations", 1_000_000 * (index + 1))
                live = 2_000_000 * index
                builder.launch(COMPUTE, "kernel", phase, kernel, temp_peak=live + 5_000_000, temp_live=live)
                if phase == "backward" and index < FORWARD:
                    builder.free(key)
            unit_ends.append(builder.last(COMPUTE))
            if gathered is not None:
                builder.free(f"{phase}{layer}", after=unit_ends[-1])
                if phase == "backward":
                    builder.wait_stream(REDUCE_SCATTER, COMPUTE)
                    builder.launch(REDUCE_SCATTER, "scatter", phase, scatter)
            gathered = ahead
    if collectives:
        builder.wait_stream(COMPUTE, REDUCE_SCATTER)
    norm = builder.launch(COMPUTE, "norm", "optimizer", kernel)
    builder.host_wait(norm)
    builder.launch(COMPUTE, "adam", "optimizer", kernel)
    return builder


def program(layers: int = LAYERS, ranks: int = RANKS, collectives: bool = True) -> Program:
    first, later = (step(layers, collectives).instructions for _ in range(2))
    return Program(ranks, {"world": (tuple(range(ranks)),)}, [], (first, later))


def best(action: Callable[[], object], repeats: int = 7) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        action()
        seconds.append(time.process_time() - start)
    return min(seconds)


def bare_simpy(ops: int) -> None:
    env = simpy.Environment()

    def lane():
        for _ in range(ops):
            yield env.timeout(1.0)

    env.process(lane())
    env.run()


def main() -> None:
    prices, world = Prices(), tuple(range(RANKS))
    whole = program()
    timeline = run(whole, (world,), prices)
    ops, steps = len(timeline.ops), len(timeline.steps)
    seconds = best(lambda: run(whole, (world,), prices))
    yardstick = best(lambda: bare_simpy(ops))
    print(f"{steps} steps, {ops} ops, {len(timeline.memory)} memory events, {timeline.events} clock events")
    print(f"run: {seconds / yardstick:.2f} x bare SimPy with one timeout per op; {ops / seconds:,.0f} ops/s here")
    half = best(lambda: run(program(LAYERS // 2), (world,), prices)) - best(lambda: program(LAYERS // 2))
    print(f"twice the layers: {seconds / half:.2f} x the time (2 is linear)")
    alone = program(collectives=False)
    quiet = best(lambda: run(alone, (world,), prices)) / len(run(alone, (world,), prices).ops)
    print(f"an op without any collective: {quiet / (seconds / ops):.2f} x")
    many = program(8, 64)
    folded = best(lambda: run(many, (tuple(range(64)),), prices), 3)
    unfolded = best(lambda: run(many, (tuple(range(64)),), prices, fold=False), 1)
    print(f"64 ranks unfolded: {unfolded / folded:.1f} x folded")
    print(f"reserved bytes (allocator replay): {best(lambda: replay(timeline.memory), 3) / seconds:.2f} x the run")
    if "--profile" in sys.argv:
        import cProfile

        cProfile.runctx("run(whole, (world,), prices)", globals(), locals(), sort="tottime")


if __name__ == "__main__":
    main()
