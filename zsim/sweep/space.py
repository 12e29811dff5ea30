"""What the planner chooses from: strategies of DeepSpeed and FSDP2, micro-batches, checkpointing, machines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from zsim.document import Document, Path_
from zsim.plan.detect import parse
from zsim.sweep.evaluate import Task
from zsim.sweep.grid import Setting, merged

# What the planner decides; a base scenario's own choices of these are left out.
DECIDED = (
    "name", "framework", "zero", "fsdp", "ddp", "deepspeed_config", "micro_batch", "grad_accum", "train_batch_size",
    "checkpointing", "cluster", "omp_num_threads",
)  # fmt: skip
GATHERED = "stage3_gather_16bit_weights_on_model_save"
THREADS: Path_ = ("omp_num_threads",)
CHECKPOINTING = ("none", "selective", "full")  # the less is recomputed, the more is kept


@dataclass(frozen=True, slots=True)
class Machine:
    """A topology file (absolute), how many nodes of it (None: as the file says), and what an hour of a GPU costs.

    `threads`: OMP_NUM_THREADS of setups that offload, which share the cores; None: what the launcher leaves.
    `sharing`: GPUs that share each sequence, as the scenario has it.
    """

    topology: Path
    nodes: int | None
    ranks: int
    gpus_per_node: int
    price: float | None = None
    threads: int | None = None
    sharing: int = 1

    def per_group(self, global_batch: int) -> int | None:
        """Sequences of each group of GPUs that share them; None where they do not divide."""
        whole = global_batch * self.sharing
        return None if self.ranks % self.sharing or whole % self.ranks else whole // self.ranks

    @property
    def settings(self) -> tuple[Setting, ...]:
        at_all = ((("cluster", "topology"), str(self.topology)),)
        return at_all if self.nodes is None else (*at_all, (("cluster", "nodes"), self.nodes))

    def __str__(self) -> str:
        return f"{self.ranks}x {self.topology.stem}"


@dataclass(frozen=True, slots=True)
class Strategy:
    """How training is sharded.

    `tunings` are settings that shift little memory, the least demanding first; number `usual` is the frameworks' own or
    what people mostly set. `rank`: the simpler, the lower.
    """

    name: str
    settings: tuple[Setting, ...]
    tunings: tuple[tuple[Setting, ...], ...] = ((),)
    usual: int = 0
    rank: int = 0

    @property
    def framework(self) -> str:
        return str(dict(self.settings)[("framework",)])

    @property
    def offloads(self) -> bool:
        return any("offload" in str(path[-1]) for path, _ in self.settings)


@dataclass(frozen=True, slots=True)
class Candidate:
    machine: Machine
    strategy: Strategy
    micro_batch: int
    grad_accum: int
    checkpointing: str
    tuning: int = 0

    @property
    def settings(self) -> tuple[Setting, ...]:
        return (
            *self.machine.settings,
            *self.strategy.settings,
            *self.strategy.tunings[self.tuning],
            (("micro_batch",), self.micro_batch),
            (("grad_accum",), self.grad_accum),
            (("checkpointing",), self.checkpointing),
        )

    @property
    def title(self) -> str:
        tuned = ", ".join(f"{path[-1]} {_shown(value)}" for path, value in self.strategy.tunings[self.tuning])
        batch = f"micro-batch {self.micro_batch} x {self.grad_accum}"
        threads = dict(self.strategy.settings).get(THREADS)
        shared = f"OMP_NUM_THREADS={threads}" if threads else ""
        parts = (self.strategy.name, shared, batch, f"checkpointing {self.checkpointing}", tuned)
        return ", ".join(filter(None, parts))

    def data(self, base: Document) -> dict[str, Any]:
        """The candidate as the plain data of a scenario file. How checkpointed inputs are kept is the scenario's, and
        whether checkpoints hold whole weights."""
        kept = {name: value for name, value in base.data.items() if name not in DECIDED}
        data = merged(kept, self.settings)
        zero = base.data.get("zero")
        if data.get("zero", {}).get("stage") == 3 and isinstance(zero, dict) and zero.get(GATHERED) is True:
            data = merged(data, ((("zero", GATHERED), True),))
        given = base.data.get("checkpointing")
        if self.checkpointing == "full" and isinstance(given, dict) and given.get("offload"):
            data["checkpointing"] = {"policy": "full", "offload": given["offload"]}
        return data

    def task(self, base: Document) -> Task:
        return Task(str(base.file), str(Path(base.file).parent), self.data(base), {})


def keep_what_is_saved(base: Document) -> None:
    """Of the DeepSpeed configuration that a scenario names, into its own `zero`: whether ZeRO-3 gathers weights to save
    them. The rest of it the planner decides."""
    config = base.data.get("deepspeed_config")
    if isinstance(config, str) and not base.data.get("zero"):
        zero = parse(Path(base.file).parent / config).data.get("zero_optimization")
        if isinstance(zero, dict) and GATHERED in zero:
            base.data["zero"] = {GATHERED: zero[GATHERED]}


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:.0e}".replace("e+0", "e") if isinstance(value, int) and value >= 10_000 else str(value)


def candidates(machine: Machine, global_batch: int) -> Iterator[Candidate]:
    """Every combination whose micro-batch x accumulation x data-parallel ranks is the global batch."""
    whole = machine.per_group(global_batch) or 0
    batches = [size for size in range(1, whole + 1) if whole % size == 0]
    for strategy, size, checkpointing in product(strategies(machine), batches, CHECKPOINTING):
        for tuning in range(len(strategy.tunings)):
            yield Candidate(machine, strategy, size, whole // size, checkpointing, tuning)


def strategies(machine: Machine) -> Iterator[Strategy]:
    for rank, strategy in enumerate((*_deepspeed(machine), *_fsdp2(machine))):
        threads = ((THREADS, machine.threads),) if strategy.offloads and machine.threads else ()
        yield replace(strategy, settings=(*strategy.settings, *threads), rank=rank)


def _deepspeed(machine: Machine) -> Iterator[Strategy]:
    yield Strategy("DeepSpeed without ZeRO", _zero(stage=0))
    buckets = _tunings(reduce_bucket_size=(50_000_000, 500_000_000), overlap_comm=(False, True))
    for stage in (1, 2):
        yield Strategy(f"ZeRO-{stage}", _zero(stage=stage), buckets, 3)
        yield Strategy(f"ZeRO-{stage}, optimizer on the CPU", _zero(stage=stage, offload_optimizer="cpu"), buckets, 3)
    sizes = _tunings(
        reduce_bucket_size=(50_000_000, 500_000_000),
        stage3_prefetch_bucket_size=(50_000_000, 500_000_000),
        stage3_param_persistence_threshold=(100_000, 1_000_000),
    )
    offloads: list[tuple[str, dict[str, Any]]] = [
        ("", {}),
        (", optimizer on the CPU", {"offload_optimizer": "cpu"}),
        (", optimizer and parameters on the CPU", {"offload_optimizer": "cpu", "offload_param": "cpu"}),
    ]
    for where, offload in offloads:
        yield Strategy(f"ZeRO-3{where}", _zero(stage=3, **offload), sizes, 4)
    if machine.ranks > machine.gpus_per_node > 1:
        hpz = _zero(stage=3, zero_hpz_partition_size=machine.gpus_per_node)
        yield Strategy("ZeRO-3, secondary shards per node (hpZ)", hpz, sizes, 4)


def _fsdp2(machine: Machine) -> Iterator[Strategy]:
    prefetch = _tunings("fsdp", prefetch=(0, 1))
    for reshard, words in ((True, "FSDP2"), (False, "FSDP2, kept gathered after forward")):
        yield Strategy(words, _fsdp(reshard_after_forward=reshard), prefetch)
        offloaded = _fsdp(reshard_after_forward=reshard, cpu_offload=True)
        yield Strategy(f"{words}, offloaded to the CPU", offloaded, prefetch)
        if machine.ranks > machine.gpus_per_node > 1:
            mesh = (machine.ranks // machine.gpus_per_node, machine.gpus_per_node)
            hybrid = _fsdp(reshard_after_forward=reshard, mesh=mesh)
            yield Strategy(f"{words}, sharded per node (HSDP)", hybrid, prefetch)


def _zero(**fields: Any) -> tuple[Setting, ...]:
    return _framework("deepspeed", "zero", fields)


def _fsdp(**fields: Any) -> tuple[Setting, ...]:
    return _framework("fsdp2", "fsdp", fields)


def _framework(name: str, section: str, fields: Mapping[str, Any]) -> tuple[Setting, ...]:
    framework: Setting = (("framework",), name)
    return (framework, *(((section, field), value) for field, value in fields.items()))


def _tunings(section: str = "zero", **fields: tuple[Any, ...]) -> tuple[tuple[Setting, ...], ...]:
    paths: list[Path_] = [(section, field) for field in fields]
    return tuple(tuple(zip(paths, values, strict=True)) for values in product(*fields.values()))
