"""Measures a machine and records short training runs on it, for `zsim calibrate` and `zsim validate trace`.

    torchrun --nproc-per-node N -m zsim.validation.capture --out DIR [--model small] [--strategies ddp,fsdp2] [--quick]

Runs on CUDA (NCCL), ROCm (RCCL), Apple MPS (one process) and CPUs (gloo). A second call with the same DIR measures only
what is missing. DIR then holds

    machine.json       device, software, threads; no names of hosts or users
    topology.yaml|txt  the machine as a scenario names it
    microbench.csv     collectives by size, products, attention, memory-bound kernels, optimizer, copies, launches
    steps.csv          a line per run and round: step time and its parts, spread, peak memory
    models/*.json      the models that were trained (Hugging Face config.json)
    run_*.yaml         a scenario per run, as it was trained
    trace_*.json.gz    Kineto traces of every rank

On CPUs each rank is pinned to one core and uses one thread: ranks that share cores, or more threads than cores, make
times of products vary by a factor of two. Micro-benchmarks there are in core seconds, the CPU time of the process with
gloo's threads, and steps in both: what other programs do to a shared machine (under a load of 12, steps took three
times as long and a call of gloo 0.2 or 4 ms, a time slice of somebody else) changes core seconds by a tenth.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STRATEGIES = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
BENCH_COLUMNS = "kind,name,dtype,shape,world,bytes,flops,samples,median_s,p10_s,p90_s"
STEP_COLUMNS = (
    "round,strategy,model,micro_batch,seq_len,dtype,world,parameters,steps,step_s,step_p10_s,step_p90_s,"
    "forward_s,backward_s,optimizer_s,step_core_s,forward_core_s,backward_core_s,optimizer_core_s,peak_bytes"
)


@dataclass
class Machine:
    """This process's place, and how to wait for its device."""

    rank: int
    world: int
    kind: str  # cuda | mps | cpu
    device: Any
    quick: bool
    out: Path
    largest: int = 1 << 22  # bytes of the largest buffer, one value for all ranks
    done: set[str] = field(default_factory=set)

    @property
    def dtype(self) -> Any:
        import torch

        return torch.float32 if self.kind == "cpu" else torch.bfloat16

    @property
    def budget_s(self) -> float:
        """For the repetitions of one measurement."""
        return 0.08 if self.quick else 0.4

    def size_buffers(self) -> None:
        """Four of the largest fit in a quarter of what is free on the fullest GPU: ranks that measured different sizes
        would wait for each other."""
        import torch
        import torch.distributed as dist

        self.largest = (1 << 22) if self.quick else (1 << 26)
        if self.kind == "cuda":
            free = torch.tensor([torch.cuda.mem_get_info()[0] // 16], device=self.device)
            dist.all_reduce(free, dist.ReduceOp.MIN)
            self.largest = min(1 << 26 if self.quick else 1 << 30, int(free)) // 1024 * 1024

    def clock(self) -> float:
        """Seconds; on a CPU those that this process has computed."""
        return time.process_time() if self.kind == "cpu" else time.perf_counter()

    def synchronize(self) -> None:
        import torch

        if self.kind != "cpu":
            getattr(torch, self.kind).synchronize()

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, file=sys.stderr, flush=True)

    def append(self, name: str, columns: str, rows: list[list[Any]]) -> None:
        """Add lines to a CSV of the capture: rank 0 speaks for all."""
        if self.rank:
            return
        path = self.out / name
        new = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if new:
                writer.writerow(columns.split(","))
            writer.writerows([f"{value:.9g}" if isinstance(value, float) else value for value in row] for row in rows)

    def share_done(self) -> None:
        """What an earlier call measured, as rank 0 finds it, known to every rank."""
        import torch.distributed as dist

        found = [already_measured(self.out)]
        if self.world > 1:
            dist.broadcast_object_list(found, src=0)
        self.done = found[0]


def already_measured(out: Path) -> set[str]:
    """Groups of micro-benchmarks and runs that a capture's CSV files hold."""
    done: set[str] = set()
    for name, key in (("microbench.csv", "{kind}"), ("steps.csv", "{strategy} {model} {round}")):
        if (out / name).exists():
            with (out / name).open(newline="", encoding="utf-8") as file:
                done |= {key.format(**row) for row in csv.DictReader(file)}
    return done


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="zsim.validation.capture", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write, or to complete")
    parser.add_argument("--model", default="tiny,small", help="tiny, small, large or a config.json; several by commas")
    parser.add_argument("--strategies", default="ddp,fsdp2", help=f"of {', '.join(STRATEGIES)}")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repetitions: about a minute")
    options = parser.parse_args(arguments)
    strategies = [name for name in options.strategies.split(",") if name]
    if unknown := [name for name in strategies if name not in STRATEGIES]:
        parser.error(f"unknown strategy {unknown[0]!r}; accepted: {', '.join(STRATEGIES)}")

    machine = _start(options)
    import torch.distributed as dist

    from zsim.validation import capture_bench, capture_steps

    try:
        models = [capture_steps.model_of(name) for name in options.model.split(",")]
        if machine.rank == 0:
            _describe(machine)
        machine.share_done()
        machine.size_buffers()
        capture_bench.run(machine, models)
        capture_steps.run(machine, models, strategies)
        dist.barrier()  # gloo aborts a rank whose peer leaves while it is still connected
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    machine.say(f"written to {options.out.name}; next: zsim calibrate {options.out.name}")


def _start(options: argparse.Namespace) -> Machine:
    """Join the process group; on a CPU, keep this rank to a core of its own before torch starts its threads."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_RANK", 0))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import torch.distributed as dist

    kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if kind == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
        torch.set_num_threads(1)
        if hasattr(os, "sched_setaffinity"):
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[local % len(cores)]})
    if kind == "cuda":
        torch.cuda.set_device(local)
    device = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    elif world == 1:  # plain python
        store = dist.HashStore()
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", store=store, rank=0, world_size=1)
    options.out.mkdir(parents=True, exist_ok=True)
    return Machine(rank, world, kind, device, options.quick, options.out)


def _describe(machine: Machine) -> None:
    """machine.json, and the topology that the scenarios name."""
    import torch

    described: dict[str, Any] = {
        "device": device_name(machine),
        "backend": {"cuda": "nccl"}.get(machine.kind, "gloo"),
        "world": machine.world,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "threads_per_rank": torch.get_num_threads(),
        "quick": machine.quick,
    }
    if machine.kind == "cuda":
        properties = torch.cuda.get_device_properties(0)
        described |= {
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0],
        }
    (machine.out / "machine.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    matrix = _output("nvidia-smi", "topo", "-m") if machine.kind == "cuda" else ""
    if matrix:
        (machine.out / "topology.txt").write_text(matrix, encoding="utf-8")
        return
    lines = [f"name: {machine.world} ranks as captured", f"gpu: {described['device']}", f"gpus: {machine.world}"]
    if machine.kind == "cpu":
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        cores = os.cpu_count() or 1
        lines += ["backend: gloo", f"cpu: {{sockets: 1, cores: {cores}, dram_gib: {pages // 2**30}, dram_gbps: 50}}"]
    (machine.out / "topology.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def device_name(machine: Machine) -> str:
    """As the catalog knows it: a rank on CPUs is one core."""
    import torch

    if machine.kind == "cuda":
        return torch.cuda.get_device_name(0)
    return "CPU core" if machine.kind == "cpu" else _output("sysctl", "-n", "machdep.cpu.brand_string")


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


if __name__ == "__main__":
    main()
