"""What the command costs, in units of importing its dependencies: `python tests/benchmarks/bench_command.py`.

User CPU seconds of whole processes, so that a busy machine disturbs little; medians of runs that take turns. Byte code
is kept in a folder of its own, as an installed package has it. Exits with 1 where a ratio is above its limit.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUNS = 7
BARE = ["-c", "import simpy, numpy, networkx, pydantic, yaml"]
FLAGSHIP = ["-m", "zsim", "scenarios/qwen32b_8xh100.yaml"]
MANY = ["-m", "zsim", "scenarios/llama31_8b_512xh100_fsdp2.yaml"]
FEW = [*MANY, "--set", "cluster=../topologies/hgx_h100_8.yaml"]
ACCUMULATED = {count: [*FLAGSHIP, "--set", f"grad_accum={count}"] for count in (4, 256)}
LIMITS = {
    "flagship": ("bare imports", 3.0),
    "512 GPUs": ("8 GPUs", 1.5),
    "256 micro-steps": ("4 micro-steps", 2.0),
}


def user_seconds(arguments: list[str], environment: dict[str, str]) -> float:
    """Exit code 3, which says that the run does not fit in memory, is as good as 0."""
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stderr
    complaint = process.stderr.read().decode()
    process.stderr.close()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 3):
        sys.exit(f"{' '.join(arguments)}: exit code {process.returncode}\n{complaint}")
    return usage.ru_utime


def main() -> int:
    commands = {"bare imports": BARE, "flagship": FLAGSHIP, "8 GPUs": FEW, "512 GPUs": MANY}
    commands |= {f"{count} micro-steps": arguments for count, arguments in ACCUMULATED.items()}
    commands["flagship, what would help"] = [*FLAGSHIP, "--changes", "3"]
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as byte_code:
        environment = os.environ | {"PYTHONPYCACHEPREFIX": byte_code}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for turn in range(RUNS + 1):  # the first one compiles
            for name, arguments in commands.items():
                took = user_seconds(arguments, environment)
                if turn:
                    seconds[name].append(took)
    medians = {name: statistics.median(runs) for name, runs in seconds.items()}
    for name, median in medians.items():
        print(f"{name:27}{median:7.3f} s of user CPU")
    failed = 0
    for name, (unit, limit) in LIMITS.items():
        ratio = medians[name] / medians[unit]
        failed += ratio > limit
        print(f"{name} / {unit}: {ratio:.2f} (limit {limit})")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
