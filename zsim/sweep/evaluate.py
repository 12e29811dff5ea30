"""One scenario to one row: read -> lower -> (memory decides, or run -> measure). What worker processes execute."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zsim.document import Document, Path_, Place
from zsim.errors import InputError

if TYPE_CHECKING:
    from zsim.scenario import Setup

# Columns of an outcome, in the order of tables. Times in seconds, sizes in bytes; null where there is no such number.
COLUMNS = {
    "status": "TEXT",  # ok | refused (bad input, or not modeled) | failed (a bug, or a lost worker)
    "error": "TEXT",
    "fits": "INTEGER",
    "decided_by": "TEXT",  # clock | memory: the allocations alone exceed what there is, so no clock ran
    "short_of": "TEXT",  # GPU memory | host memory | NVMe space, where it does not fit
    "gpus": "INTEGER",
    "tokens_per_step": "INTEGER",
    "step_s": "REAL",
    "tokens_per_s": "REAL",
    "tokens_per_s_per_gpu": "REAL",
    "mfu": "REAL",
    "hfu": "REAL",
    "compute_s": "REAL",
    "exposed_comm_s": "REAL",
    "host_s": "REAL",
    "idle_s": "REAL",
    "bottleneck": "TEXT",
    "peak_allocated_bytes": "INTEGER",
    "needed_bytes": "INTEGER",  # as nvidia-smi shows, with cache; where memory decided, at least this
    "headroom_bytes": "INTEGER",
    "host_peak_bytes": "INTEGER",  # of one node
    "params": "INTEGER",
}
Outcome = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Task:
    """A scenario as plain data that travels to a worker. `places` are the lines of its fields, for errors."""

    file: str
    folder: str
    data: Mapping[str, Any]
    places: Mapping[Path_, Place]
    memory_only: bool = False


def setup_of(task: Task) -> Setup:
    """Raises InputError, NotModeled."""
    from zsim.scenario.load import check

    document = Document(task.file, deepcopy(dict(task.data)), dict(task.places))
    return check(document, Path(task.folder)).resolve()


def evaluate(task: Task) -> Outcome:
    """The outcome of a task: values of `COLUMNS`, and `wall_s`. Never raises but for a dying interpreter."""
    return answered(task, _simulate)


def each(question: Callable[[Task], Outcome], tasks: Sequence[Task]) -> list[Outcome]:
    """Several tasks in one call of an executor."""
    return [question(task) for task in tasks]


def answered(task: Task, question: Callable[[Task], Outcome]) -> Outcome:
    """What `question` says of a task, with its status and error; `COLUMNS` that it leaves out are None."""
    begun = time.perf_counter()
    outcome: Outcome = dict.fromkeys(COLUMNS)
    try:
        outcome |= {"status": "ok"} | question(task)
    except InputError as error:
        outcome |= {"status": "refused", "error": str(error)}
    except Exception:
        # One bug must not cost the other scenarios of a long sweep; the row keeps the traceback.
        outcome |= {"status": "failed", "error": traceback.format_exc(limit=-4)}
    outcome["wall_s"] = round(time.perf_counter() - begun, 6)
    return outcome


def _simulate(task: Task) -> Outcome:
    from zsim.result.measure import lowered, own_profile, timed
    from zsim.result.need import need

    setup = setup_of(task)
    plan, workload = setup.plan, setup.workload
    known = lowered(setup)
    outcome: Outcome = {
        "gpus": plan.world_size,
        "tokens_per_step": workload.tokens * plan.grad_accum * plan.world_size,
        "params": setup.model.numel,
    }
    least = need(known.program, setup.cluster)
    if least.excluded or task.memory_only:
        return outcome | {
            "fits": False if least.excluded else None,
            "decided_by": "memory" if least.excluded else None,
            "short_of": least.excluded,
            "peak_allocated_bytes": least.peak_allocated,
            "needed_bytes": least.peak_allocated + least.framework,
            "headroom_bytes": -least.missing,
            "host_peak_bytes": least.host,
        }

    result = timed(setup, own_profile(setup), known)
    gpu, host, step, throughput = result.gpu, result.host, result.time, result.throughput
    return outcome | {
        "fits": result.fits,
        "decided_by": "clock",
        "short_of": result.short_of,
        "step_s": step.step_s,
        "tokens_per_s": throughput.tokens_per_s,
        "tokens_per_s_per_gpu": throughput.tokens_per_s_per_gpu,
        "mfu": throughput.mfu,
        "hfu": throughput.hfu,
        "compute_s": step.compute_s,
        "exposed_comm_s": step.exposed_comm_s,
        "host_s": step.host_s,
        "idle_s": step.idle_s,
        "bottleneck": result.bottleneck.name,
        "peak_allocated_bytes": gpu.peak_allocated_bytes,
        "needed_bytes": gpu.nvidia_smi_bytes,
        "headroom_bytes": gpu.headroom_bytes,
        "host_peak_bytes": host.peak_bytes,
    }
