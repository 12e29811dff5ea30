"""zsim collectives: what nccl-tests would print on a machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zsim.cli.options import Json, new_app

app = new_app()


@app.command()
def collectives(
    topology: Annotated[Path, typer.Option(help="A topology file (any that zsim topo reads).", show_default=False)],
    op: Annotated[
        str, typer.Option(help="all_gather, reduce_scatter, all_reduce, broadcast, reduce, all_to_all, send_recv.")
    ] = "all_reduce",
    sizes: Annotated[str, typer.Option(help="1KiB..8GiB (powers of two), or a list: 1MiB,16MiB.")] = "1KiB..8GiB",
    ranks: Annotated[int | None, typer.Option(help="Only the first so many ranks.", show_default=False)] = None,
    nodes: Annotated[int | None, typer.Option(help="How many nodes.", show_default=False)] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="Instead of NCCL's choice: ring, tree/ll128, nvls ...", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Time, algorithm and bus bandwidth of a collective by size of the full buffer, as nccl-tests prints them."""
    from zsim.cluster.load import load_topology
    from zsim.cost.bench import bench, parse_sizes

    rows = bench(load_topology(topology, nodes), op, parse_sizes(sizes), ranks, algorithm)
    if json:
        from dataclasses import asdict
        from json import dumps

        print(dumps([asdict(row) for row in rows]))
        return
    print(f"# {topology}  {op}  {rows[0].ranks} ranks")
    print(f"{'size':>14}  {'time':>10}  {'algbw':>8}  {'busbw':>8}  algorithm")
    print(f"{'(B)':>14}  {'(us)':>10}  {'(GB/s)':>8}  {'(GB/s)':>8}")
    for row in rows:
        rates = f"{row.algbw / 1e9:>8.2f}  {row.busbw / 1e9:>8.2f}"
        print(f"{row.size_bytes:>14}  {row.time_s * 1e6:>10.2f}  {rates}  {row.algorithm}")
