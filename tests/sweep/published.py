"""Ten published runs, planned anew: `python -m tests.sweep.published` prints the table of docs/sweeps.md.

Model, lengths, machine and global batch are the run's; the planner chooses the rest. The run as published and the
planner's choice are simulated alike, without what a scenario cannot say of a row, such as its optimizer's kernel.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zsim.document import Document, read_yaml
from zsim.sweep import executors, planner
from zsim.sweep.choices import INDISTINGUISHABLE, Choice, Plan, by_time
from zsim.sweep.evaluate import Outcome, Task
from zsim.sweep.glance import glance
from zsim.sweep.grid import merged
from zsim.sweep.space import Machine
from zsim.validation.rows import Row, gpu_name, read_folder

PUBLISHED = Path(__file__).parents[2] / "validation" / "published"
RUNS = (
    "gist-a800-1",
    "gist-a800-7",
    "gist-a800-10",
    "xt-l3-8b-n8-s8192",
    "fa-liger-meta-llama-3-8b-foak-fast-kernels-n4-b4",
    "llmq-lf-4x4090-7b",
    "ao-mi300x-bf16",
    "tt-h100-202412-8b-n8-fsdp",
    "tt-a100-l2-70b-b2-full",
    "fms-2024-02-7b-a100",
)
GIB = 2**30


@dataclass(frozen=True)
class Comparison:
    """A run as published, and what the planner makes of it."""

    row: Row
    published: Outcome
    plan: Plan
    seconds: float

    @property
    def winner(self) -> Choice:
        winner = self.plan.winner(by_time)
        assert winner is not None, self.row.id
        return winner

    @property
    def no_worse(self) -> bool:
        """Up to what is not told apart. A run without a margin of memory is held against all that fits, as it is."""
        winner = self.winner.step_s
        if not self.published["fits"]:
            return True
        if Choice(self.winner.candidate, self.published).tight:
            winner = min(winner, *(choice.step_s for choice in self.plan.choices))
        return winner <= self.published["step_s"] * (1 + 2 * INDISTINGUISHABLE)


def compare(row: Row, folder: Path, executor: Executor, workers: int) -> Comparison:
    base, machine = _base(row, folder), _machine(row, folder)
    accumulated = row.count("grad_accum", 1)
    settings = [
        *machine.settings,
        *((path, value) for path, value in _sharding(row, machine)),
        (("micro_batch",), row.count("micro_batch")),
        (("grad_accum",), accumulated),
        (("checkpointing",), row["activation_checkpoint"]),
    ]
    published = glance(Task(str(base.file), str(folder), merged(base.data, settings), {}))
    assert published["status"] == "ok", published["error"]
    begun = time.perf_counter()
    batch = row.count("micro_batch") * accumulated * machine.ranks
    plan = planner.plan(base, [machine], batch, executor, workers)
    return Comparison(row, published, plan, time.perf_counter() - begun)


def _base(row: Row, folder: Path) -> Document:
    name = row["model"].lower()
    config = {
        "model_type": next((known for known in ("qwen2", "mistral") if name.startswith(known)), "llama"),
        "hidden_size": row.count("d_model"),
        "num_hidden_layers": row.count("n_layers"),
        "num_attention_heads": row.count("n_heads"),
        "num_key_value_heads": row.count("n_kv_heads"),
        "intermediate_size": row.count("d_ff"),
        "vocab_size": row.count("vocab"),
        "max_position_embeddings": row.count("seq_len"),
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    liger = "liger" in row.get("attention_impl")
    scenario = {
        "model": "config.json",
        "seq_len": row.count("seq_len"),
        "implementation": "torchtitan" if "torchtitan" in row["framework"] else "hf",
        "compile": row.get("compile") == "yes",
        "loss": "fused" if liger else "hf",
        "kernels": "liger" if liger else "torch",
    }
    path = folder / "base.yaml"
    path.write_text(json.dumps(scenario))
    return read_yaml(path)


def _machine(row: Row, folder: Path) -> Machine:
    ranks, gpu = row.count("n_gpus"), gpu_name(row)
    per_node = min(row.count("gpus_per_node", 8), ranks)
    topology: dict[str, Any] = {
        "name": f"{per_node}x {gpu}",
        "gpu": gpu,
        "gpus": per_node,
        "nvlink": "none" if "RTX" in gpu else "switch",
        "pcie": {"switches": per_node},
        "cpu": {"vendor": "amd", "sockets": 2, "cores": 96, "dram_gbps": 500.0},
    }
    if ranks > per_node:
        topology |= {"nics": {"gbps": 200, "count": 8}, "fabric": {"kind": "rail", "transport": "rdma"}}
    path = folder / f"{gpu}.yaml"
    path.write_text(json.dumps(topology))
    return Machine(path, ranks // per_node, ranks, per_node, threads=96 // per_node)


def _sharding(row: Row, machine: Machine) -> list[tuple[tuple[str, ...], Any]]:
    strategy, offload = row["strategy"], row.get("offload")
    if strategy.startswith("zero"):
        fields: list[tuple[tuple[str, ...], Any]] = [(("zero", "stage"), int(strategy[-1]))]
        for part, name in (("optimizer-cpu", "offload_optimizer"), ("param-cpu", "offload_param")):
            if part in offload:
                fields.append((("zero", name), "cpu"))
        return [(("framework",), "deepspeed"), *fields]
    if "FSDP2" in row["framework"]:
        return [(("framework",), "fsdp2")]
    if strategy == "hsdp":
        mesh = [machine.ranks // machine.gpus_per_node, machine.gpus_per_node]
        hybrid = (("fsdp", "sharding_strategy"), "HYBRID_SHARD")
        return [(("framework",), "fsdp1"), hybrid, (("fsdp", "mesh"), mesh)]
    return [(("framework",), "fsdp1"), (("fsdp", "sharding_strategy"), "FULL_SHARD")]


HEAD = """| run | as published | step | free | planned | step | free |
| --- | --- | ---: | ---: | --- | ---: | ---: |"""


def line(one: Comparison) -> str:
    row, published, winner = one.row, one.published, one.winner
    batch = f"{row['micro_batch']} x {row.get('grad_accum', '1')}"
    stated = f"{row['strategy']}, {batch}, {row['activation_checkpoint']}"
    if row.get("offload", "none") != "none":
        stated += f", {row['offload']}"
    step = f"{published['step_s']:.2f} s" if published["fits"] else "does not fit"
    return (
        f"| {row['model']}, {row['seq_len']} tokens, {row['n_gpus']}x {gpu_name(row)} | {stated} | {step} | "
        f"{published['headroom_bytes'] / GIB:.1f} GiB | {winner.candidate.title} | {winner.step_s:.2f} s | "
        f"{winner.outcome['headroom_bytes'] / GIB:.1f} GiB |"
    )


def main(names: list[str]) -> int:
    rows = {row.id: row for row in read_folder(PUBLISHED)}
    worse = 0
    print(HEAD)
    with executors.local(2) as crew, tempfile.TemporaryDirectory() as scratch:
        for name in names or RUNS:
            folder = Path(scratch) / name
            folder.mkdir()
            one = compare(rows[name], folder, crew.executor, 2)
            print(line(one), flush=True)
            if not one.no_worse:
                worse += 1
                print(f"{name}: the published setting is better", file=sys.stderr)
    return int(worse > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
