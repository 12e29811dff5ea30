"""Published rows as the fit sees them: their kernels counted, their programs lowered once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from zsim.cluster.classes import rank_classes
from zsim.cost import profile as profiles
from zsim.cost.price import Price, kernel_seconds, slowest
from zsim.cost.profile import Document, Profile
from zsim.engine.simulator import run
from zsim.errors import InputError
from zsim.model.kernels import Kernel
from zsim.program.lower import lower
from zsim.program.ops import COMPUTE, Compute, Launch, Program
from zsim.result.measure import Lowered, timed
from zsim.result.spec import Result
from zsim.scenario import Setup
from zsim.validation.evidence import setup_of
from zsim.validation.rows import Row

Reader = Callable[[str], Document | None]


@dataclass(frozen=True)
class Case:
    """A row with its kernels counted. `runs`: the programs whose steps give the row's step (`micro_steps`)."""

    row: Row
    setup: Setup
    runs: Sequence[tuple[Setup, Program]]
    kernels: Mapping[Kernel, float]
    measured_s: float

    @property
    def device(self) -> str:
        return self.setup.cluster.devices[0].name

    def profile(self, read: Reader) -> Profile:
        return profiles.build(self.device, self.setup.profile, read)

    def compute_alone(self, profile: Profile) -> float:
        device = self.setup.cluster.devices[0]
        average = sum(count * kernel_seconds(kernel, device, profile) for kernel, count in self.kernels.items())
        return slowest(self.setup.cluster.world_size, profile.device_spread) * average

    def simulate(self, profile: Profile, price: type[Price] = Price) -> tuple[float, float]:
        """Seconds of the steady step, and those of them by which interference stretches kernels."""
        times, stretches = [], []
        for setup, program in self.runs:
            timeline = run(
                program, rank_classes(setup.cluster), price(setup.cluster, profile, setup.plan.omp_num_threads)
            )
            steady = timeline.steps[timeline.steady_step]
            times.append(steady.end_s - steady.start_s)
            kernels = (op for op in timeline.ops if op.op.lane == COMPUTE and op.step == steady.step)
            stretches.append(sum(op.stretch_s for op in kernels if op.rank == steady.rank))
        return extrapolate(self.setup, times), extrapolate(self.setup, stretches)

    def step_s(self, profile: Profile, price: type[Price]) -> float:
        """Of `simulate`, and what no lane shows: memory that expandable segments map anew."""
        if self.setup.plan.allocator.expandable_segments and price is Price:
            return timed(self.setup, profile).time.step_s
        return self.simulate(profile, price)[0]

    def report(self, profile: Profile) -> Result:
        """Of the row's own micro-steps, or of the most that are simulated."""
        setup, program = self.runs[-1]
        return timed(setup, profile, Lowered(program, 0))


def micro_steps(setup: Setup) -> list[Setup]:
    """The setups whose steps tell how long `setup`'s takes: itself, or the same with 2 and with 3 micro-steps.

    From the second on, micro-steps of a steady step repeat exactly (tests/cost/test_published.py), so the step with n
    of them takes n - 3 periods more than the one with 3.
    """
    if setup.plan.grad_accum <= 3:
        return [setup]
    return [replace(setup, plan=replace(setup.plan, grad_accum=count)) for count in (2, 3)]


def extrapolate(setup: Setup, seconds: Sequence[float]) -> float:
    """From the times of `micro_steps(setup)` to that of `setup`."""
    if len(seconds) == 1:
        return seconds[0]
    two, three = seconds
    return three + (setup.plan.grad_accum - 3) * (three - two)


def cases(rows: Iterable[Row]) -> list[Case]:
    """Of the rows that can be simulated and have a step time."""
    found = []
    for row in rows:
        try:
            setup, measured = setup_of(row), row.step_s
            runs = [(part, lower(part.model, part.tree, part.plan, part.workload)) for part in micro_steps(setup)]
        except InputError:
            continue
        if measured is not None:
            counts = [_kernels(program) for _, program in runs]
            kernels = {kernel: extrapolate(setup, [count[kernel] for count in counts]) for kernel in counts[-1]}
            found.append(Case(row, setup, runs, kernels, measured))
    return found


def _kernels(program: Program) -> Counter[Kernel]:
    """Kernels of a steady step on the compute lane."""
    kernels: Counter[Kernel] = Counter()
    ops = [instruction.op for instruction in program.steps[-1] if isinstance(instruction, Launch)]
    for op in ops:
        if op.lane == COMPUTE and isinstance(op.work, Compute):
            kernels.update(op.work.kernels)
    return kernels
