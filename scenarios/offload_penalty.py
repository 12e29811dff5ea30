"""What optimizer offload costs the same model on four machines, as a Markdown table (docs/offload.md)."""

from collections.abc import Iterator
from pathlib import Path

import zsim

HERE = Path(__file__).parent
MACHINES = ("a100_1_pcie4", "h100_1_pcie5", "gh200", "gb300_4", "mac_studio_m3_ultra")
THREADS = {"gb300_4": 36}  # OMP_NUM_THREADS where GPUs share cores; a process alone takes all by itself


def rows() -> Iterator[str]:
    yield (
        "| machine | step, states on the GPU | optimizer offloaded | penalty | of it CPU Adam | copies "
        "| penalty at 16 micro-steps |"
    )
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for machine in MACHINES:
        plain, moved = _step(machine, "none", 1), _step(machine, "cpu", 1)
        plain_16, moved_16 = (_step(machine, place, 16).time.step_s for place in ("none", "cpu"))
        idle = moved.time.idle_by
        adam = sum(seconds for name, seconds in idle.items() if name.startswith("cpu"))
        copies = sum(seconds for name, seconds in idle.items() if name.startswith(("h2d", "d2h")))
        before, after = plain.time.step_s, moved.time.step_s
        cells = (
            moved.headline.cluster,
            f"{before:.3f} s",
            f"{after:.3f} s",
            f"{after - before:.3f} s, {after / before - 1:z.0%}",
            f"{adam:.3f} s",
            f"{copies:.3f} s",
            f"{moved_16 / plain_16 - 1:z.1%}",
        )
        yield f"| {' | '.join(cells)} |"


def _step(machine: str, place: str, micro_steps: int) -> zsim.Result:
    settings = {
        "cluster": f"../topologies/{machine}.yaml",
        "zero.offload_optimizer": place,
        "grad_accum": micro_steps,
        "omp_num_threads": THREADS.get(machine, "null"),
    }
    overrides = [f"{field}={value}" for field, value in settings.items()]
    return zsim.simulate(HERE / "optimizer_offload.yaml", overrides)


if __name__ == "__main__":
    print(*rows(), sep="\n")
