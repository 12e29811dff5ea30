"""A run small enough to check by hand: two ranks, two layers, ZeRO-3 in miniature, with times written by hand.

One step, in seconds from its start (the second step is the same, 1.9 s later):

    host            0.00 issues the first op at 0.01; waits for RS0 until 1.71; issues the optimizer at 1.75; done 1.90
    all_gather      AG0 0.01-0.11   AG1 0.11-0.41
    compute         fwd0 0.11-0.31  fwd1 0.41-0.61  bwd1 0.61-1.01  bwd0 1.01-1.41  adam 1.75-1.85
    reduce_scatter  RS1 1.01-1.21   RS0 1.41-1.71
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from time import perf_counter

from zsim.cluster.load import load_topology
from zsim.cluster.spec import Cluster, Device, Link
from zsim.cost.profile import load_profile
from zsim.cost.transfer import Transfer
from zsim.engine.timeline import FlowRecord, MemoryEvent, OpRecord, StepSpan, Timeline
from zsim.model import spec
from zsim.model.kernels import Attention, Gemm, Memory
from zsim.plan.spec import DeepSpeedPlan
from zsim.program.builder import Builder
from zsim.program.ops import ALL_GATHER, COMPUTE, REDUCE_SCATTER, Alloc, Collective, Compute, HostWait, Launch, Program
from zsim.result.critical_path import RankView
from zsim.result.measure import measure
from zsim.result.spec import Result
from zsim.scenario import Setup

STEP_S = 1.9
TOPOLOGIES = Path(__file__).parents[2] / "topologies"
GEMM = Gemm(1024, 1024, 1024, "bfloat16")
ATTENTION = Attention(1, 8, 8, 1024, 1024, 128, True, "flash", "bfloat16")
ATTENTION_BACKWARD = Attention(1, 8, 8, 1024, 1024, 128, True, "flash", "bfloat16", backward=True)
DEVICE = Device("H100 SXM", "nvidia", {"bfloat16": 1e12}, 80 * 10**9, 79 * 2**30, 3e12, "hopper", True)
LINKS = (
    Link("n0/gpu0>n0/nvswitch", "n0/gpu0", "n0/nvswitch", "nvlink", 100e9, 1e-6, 450e9),
    Link("n0/nvswitch>n0/gpu0", "n0/nvswitch", "n0/gpu0", "nvlink", 400e9, 1e-6, 450e9),
)


def cluster(device: Device = DEVICE) -> Cluster:
    local = {link.id.replace("n0/", ""): link for link in LINKS}
    kinds = {"gpu0": "gpu", "gpu1": "gpu", "nvswitch": "nvswitch"}
    shipped = load_topology(TOPOLOGIES / "hgx_h100_8.yaml")
    node = replace(shipped.templates[0], devices=(device, device), kinds=kinds, links=local)
    return replace(shipped, name="one_pair", templates=(node,), assumptions=())


def program() -> Program:
    init = Builder()
    init.alloc("shards", "parameters", 1_000)
    init.alloc("states", "optimizer_states", 6_000)
    init.alloc("pinned", "buffers", 500, device="host")
    step = Builder()
    gather, reduce = Collective("all_gather", "bfloat16", 250, 500), Collective("reduce_scatter", "bfloat16", 500, 250)
    gathers = []
    for layer in (0, 1):
        step.alloc(f"full{layer}", "all_gather_buffers", 1_000)
        gathers.append(step.launch(ALL_GATHER, f"AG{layer}", "forward", gather, layer=layer))
    for layer in (0, 1):
        step.stream_wait(COMPUTE, gathers[layer])
        step.alloc(f"saved{layer}", "activations", 3_000)
        work = Compute((GEMM, ATTENTION))
        step.launch(COMPUTE, f"fwd{layer}", "forward", work, module=f"layers.{layer}", layer=layer)
    for layer in (1, 0):
        step.alloc(f"grad{layer}", "gradients", 1_000)
        work = Compute((GEMM, GEMM, ATTENTION_BACKWARD))
        step.launch(COMPUTE, f"bwd{layer}", "backward", work, module=f"layers.{layer}", layer=layer)
        step.free(f"saved{layer}")
        step.free(f"full{layer}")
        step.wait_stream(REDUCE_SCATTER, COMPUTE)
        last = step.launch(REDUCE_SCATTER, f"RS{layer}", "backward", reduce, layer=layer)
        step.free(f"grad{layer}")
    step.host_wait(last)
    step.launch(COMPUTE, "adam", "optimizer", Compute((Memory("optimizer", 1e6, 1e6),)))
    step.host_work("zero_grad", "optimizer")
    instructions = step.instructions
    return Program(
        2, {"world": ((0, 1),)}, init.instructions, (instructions, instructions), ("made by hand",), ("noise",)
    )


# label -> issued, start, end, blocker (a label: the op waited for)
CLOCK: dict[str, tuple[float, float, float, str]] = {
    "AG0": (0.01, 0.01, 0.11, "host"),
    "AG1": (0.02, 0.11, 0.41, "lane"),
    "fwd0": (0.03, 0.11, 0.31, "AG0"),
    "fwd1": (0.04, 0.41, 0.61, "AG1"),
    "bwd1": (0.05, 0.61, 1.01, "lane"),
    "RS1": (0.06, 1.01, 1.21, "bwd1"),
    "bwd0": (0.07, 1.01, 1.41, "lane"),
    "RS0": (0.08, 1.41, 1.71, "bwd0"),
    "adam": (1.75, 1.75, 1.85, "host"),
    "zero_grad": (1.90, 1.85, 1.90, "host"),
}


def timeline() -> Timeline:
    made = program()
    records, memory, flows, spans = [], [], [], []
    memory += _ledger(made.init, 0, 0.0)
    for step in (1, 2):
        base = (step - 1) * STEP_S
        ids = {i.op.label: i.op.id for i in made.steps[0] if isinstance(i, Launch)}
        for instruction in made.steps[step - 1]:
            if isinstance(instruction, Launch):
                op = instruction.op
                issued, start, end, blocker = CLOCK[op.label]
                records.append(
                    OpRecord(step, 0, op, base + issued, base + start, base + end, ids.get(blocker, blocker))
                )
                if isinstance(op.work, Collective):
                    usage = {link.id: 1.0 for link in LINKS}
                    transfer = Transfer(op.work.payload_bytes, usage, 0.0)
                    flows.append(FlowRecord(step, (0,), op.id, transfer, [base + start, base + end], [100e9]))
        memory += _ledger(made.steps[step - 1], step, base)
        spans.append(StepSpan(step, 0, base, base + STEP_S))
    capacity = {link.id: link.bandwidth for link in LINKS}
    return Timeline(records, memory, flows, spans, capacity, ((0, 1),), 1, 123, ["engine note"])


def _ledger(instructions: object, step: int, base: float) -> list[MemoryEvent]:
    events: list[MemoryEvent] = []
    held: dict[str, MemoryEvent] = {}
    now, last = base, None
    for instruction in instructions:  # type: ignore[attr-defined]
        if isinstance(instruction, Launch):
            now, last = base + CLOCK[instruction.op.label][0], instruction.op.id
        elif isinstance(instruction, Alloc):
            event = MemoryEvent(
                step, 0, now, instruction.device, instruction.category, instruction.nbytes, instruction.key, last
            )
            held[instruction.key] = event
            events.append(event)
        elif not isinstance(instruction, HostWait):
            of = held[instruction.key]
            events.append(MemoryEvent(step, 0, now, of.device, of.category, -of.nbytes, of.key, last))
    return events


def tree() -> spec.Module:
    block = spec.Compute("block", (GEMM, ATTENTION), (GEMM, GEMM, ATTENTION_BACKWARD), recompute=(GEMM, ATTENTION))
    return spec.Module("", role="root", body=(block, block))


def result(device: Device = DEVICE) -> Result:
    params = (spec.Parameter("w", (1000, 1000)), spec.Parameter("frozen", (10,), trainable=False))
    setup = Setup(
        name="miniature",
        model=spec.ModelSpec("mini", "llama", params, None),
        tree=tree(),
        workload=spec.Workload(1, 1024),
        plan=DeepSpeedPlan(world_size=2, stage=3),
        cluster=cluster(device),
        assumptions=("NVLink at 100 GB/s",),
    )
    whole, happened = program(), timeline()
    return measure(
        setup=setup,
        views=[RankView(whole, happened, ranks[0]) for ranks in happened.rank_classes],
        profile=load_profile(device.name),
        begun=perf_counter(),
    )
