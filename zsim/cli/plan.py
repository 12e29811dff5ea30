"""zsim plan: the fastest or cheapest setup that fits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from zsim.cli.options import Json, Set, new_app
from zsim.cli.progress import working
from zsim.errors import InputError

if TYPE_CHECKING:
    from zsim.document import Document
    from zsim.sweep.space import Machine

app = new_app()


@app.command()
def plan(
    scenario: Annotated[
        Path | None, typer.Argument(help="A scenario: its model, lengths and machine are kept.", show_default=False)
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Instead: a config.json.", show_default=False)] = None,
    seq_len: Annotated[
        str | None, typer.Option(metavar="TOKENS", help="Per sequence; 4k is 4096.", show_default=False)
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences per optimizer step, over all GPUs.", show_default=False)
    ] = None,
    cluster: Annotated[
        list[str], typer.Option(metavar="FILE[=PRICE]", help="A topology, and the price of one GPU for an hour.")
    ] = [],  # noqa: B006 (typer wants the list itself)
    nodes: Annotated[str | None, typer.Option(metavar="1,2,4", help="Numbers of nodes to try; 1..8*2 doubles.")] = None,
    set_: Set = [],  # noqa: B006
    by: Annotated[Literal["time", "cost"], typer.Option(help="What the best is best in.")] = "time",
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; one per core unless given.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the best as scenario.yaml, its framework's file, and plots."),
    ] = None,
    json: Json = False,
) -> int:
    """Which sharding, micro-batch, checkpointing, offload and number of GPUs? Exit code 3 if nothing fits."""
    from zsim.sweep import advice, executors, planner
    from zsim.sweep.choices import by_cost, by_time

    base = _base(scenario, model, seq_len, cluster, set_)
    machines = _machines(base, cluster, nodes)
    batch = global_batch or _global_batch(base, machines)
    usable = [machine for machine in machines if machine.per_group(batch)]
    if not usable:
        sizes = ", ".join(str(machine.ranks) for machine in machines)
        groups = f" in groups of {machines[0].sharing}" if machines[0].sharing > 1 else ""
        raise InputError(f"{batch} sequences do not divide over {sizes} GPUs{groups}", field="--global-batch")
    count = workers or executors.usable_cores()
    with executors.forked(count) as crew, working("searching setups"):
        found = planner.plan(base, usable, batch, crew.executor, count)
    if max(found.refusals.values(), default=0) == found.candidates:  # of what all setups have in common
        raise InputError(f"all {found.candidates} setups are refused: {next(iter(found.refusals))}")
    key = by_time if by == "time" else by_cost
    winner = found.winner(key)
    if json:
        from json import dumps

        print(dumps(advice.to_dict(found, key) | {"global_batch": batch}))
    else:
        from rich.console import Console

        console = Console(highlight=False, soft_wrap=True)
        advice.render(found, key, console)
        for machine in machines:
            if machine not in usable:
                console.print(f"not searched: {machine}, over which {batch} sequences do not divide")
        if "saving" in base.data:
            console.print(
                "not looked at: memory while saving and evaluating, which `zsim` on the scenario it writes shows"
            )
    if winner and out is not None:
        from zsim.sweep import launch, plan_plots

        for path in [*launch.write(winner, base, out), *plan_plots.write(found, key, out)]:
            print(f"wrote {path}")
    return 0 if winner else 3


def _base(
    scenario: Path | None, model: Path | None, seq_len: str | None, clusters: list[str], overrides: list[str]
) -> Document:
    """What the planner leaves alone, as a document whose paths are relative to its file."""
    from zsim.document import Document, read_yaml
    from zsim.scenario.load import apply
    from zsim.sweep.space import keep_what_is_saved

    if scenario is not None:
        document = read_yaml(scenario, "scenario")
    elif model is None or seq_len is None or not clusters:
        raise InputError("needs a scenario, or all of --model, --seq-len, --cluster and --global-batch")
    else:
        document = Document("plan", {})
    tokens = int(seq_len) if seq_len and seq_len.isdecimal() else seq_len
    given: dict[str, Any] = {"model": model and str(model.resolve()), "seq_len": tokens}
    for name, value in given.items():
        if value is not None:
            document.set((name,), value, (f"--{name.replace('_', '-')}", None))
    for override in overrides:
        apply(document, override)
    keep_what_is_saved(document)
    return document


def _machines(base: Document, clusters: list[str], nodes: str | None) -> list[Machine]:
    """Every cluster with every number of nodes."""
    from zsim.scenario.resolve import cluster_of
    from zsim.sweep.expression import field
    from zsim.sweep.grid import values_of
    from zsim.sweep.space import Machine

    stated: list[tuple[Path, float | None]] = []
    for text in clusters:
        name, _, asked = text.partition("=")
        stated.append((Path(name).resolve(), _price(asked) if asked else None))
    if len({price is None for _, price in stated}) > 1:
        raise InputError("one has a price and another has none", field="--cluster", accepted="a price for all")
    counts: list[int | None] = [None]
    if nodes is not None:
        counts = values_of(nodes, ("cluster", "nodes"))
    elif not stated:
        counts = [field(base.data, ("cluster", "nodes"))]
    if not stated:
        topology = field(base.data, ("cluster", "topology"))
        if not isinstance(topology, str):
            raise InputError("is missing", field="--cluster", accepted="a topology file")
        stated = [((Path(base.file).parent / topology).resolve(), None)]
    machines, sharing = [], field(base.data, ("sequence_parallel_size",)) or 1
    for path, price in stated:
        if not path.exists():
            raise InputError("no such topology", path)
        for count in counts:
            read = cluster_of(path, count)
            per_node = min(read.gpus_per_node, read.world_size)
            machines.append(Machine(path, count, read.world_size, per_node, price, read.cores_per_gpu, sharing))
    return machines


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = 0.0
    if not 0 < price < float("inf"):
        raise InputError(f"{text!r} is no price", field="--cluster", accepted="topology.yaml=2.50")
    return price


def _global_batch(base: Document, machines: list[Machine]) -> int:
    """What the scenario says, on its own machine."""
    from zsim.sweep.expression import field

    total = field(base.data, ("train_batch_size",))
    if isinstance(total, int):
        return total
    micro, accumulation = field(base.data, ("micro_batch",)), field(base.data, ("grad_accum",))
    if len(machines) != 1 or not isinstance(micro, int):
        raise InputError("is missing", field="--global-batch", accepted="sequences per optimizer step, over all GPUs")
    return micro * (accumulation or 1) * machines[0].ranks // machines[0].sharing
