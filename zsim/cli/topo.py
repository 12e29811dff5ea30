"""zsim topo: show, check and convert a machine's topology."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from zsim.cli.options import Json, new_app
from zsim.errors import InputError

app = new_app()

_ASCII = str.maketrans("├└│─", "|`|-")


@app.command()
def topo(
    file: Annotated[
        Path,
        typer.Argument(
            help="A topology YAML, `nvidia-smi topo -m`, `rocm-smi --showtopo` or NCCL XML.", show_default=False
        ),
    ],
    gpu: Annotated[str | None, typer.Option(help="GPU model, where the file does not say.", show_default=False)] = None,
    pcie_gen: Annotated[int | None, typer.Option(help="PCIe generation of the slots.", show_default=False)] = None,
    p2p: Annotated[
        str | None, typer.Option(help="Peer-to-peer over PCIe: auto, none or all.", show_default=False)
    ] = None,
    nic_gbps: Annotated[float | None, typer.Option(help="Rate of each NIC, Gb/s.", show_default=False)] = None,
    host_gib: Annotated[float | None, typer.Option(help="Host memory of a node, GiB.", show_default=False)] = None,
    cpu: Annotated[str | None, typer.Option(help="CPU model, as lscpu names it.", show_default=False)] = None,
    query: Annotated[
        Path | None, typer.Option(help="`nvidia-smi -q` or `lspci -vv`: GPU names and slots.", show_default=False)
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="How many such nodes.", show_default=False)] = None,
    out: Annotated[Path | None, typer.Option(help="Draw the graph to this picture.", show_default=False)] = None,
    yaml: Annotated[Path | None, typer.Option(help="Write it as a topology YAML.", show_default=False)] = None,
    json: Json = False,
) -> None:
    """Show and check a machine: its tree, link capacities, paths between GPUs and the rings found."""
    from zsim.cluster.describe import describe, draw
    from zsim.cluster.files import read_machine, read_query, write_yaml
    from zsim.cluster.matrix import Hints
    from zsim.result.render.page import Page

    names, slots = read_query(query) if query else ((), ())
    hints = Hints(gpu, pcie_gen, p2p, nic_gbps, host_gib, cpu, names, slots)
    if file.suffix in (".yaml", ".yml") and hints != Hints():
        raise InputError("a topology file says that itself", file, accepted="it without --gpu, --pcie-gen, --p2p ...")
    cluster, reading = read_machine(file, hints, nodes)
    seen = describe(cluster)
    if out:
        draw(cluster, str(out))
    if yaml:
        write_yaml(reading, yaml)
    if json:
        from json import dumps

        print(dumps(_to_dict(cluster, reading, seen)))
        return
    print(f"{cluster.name}: {cluster.nodes} x {len(cluster.templates[0].devices)} GPUs, read as {reading.source}")
    print(*(line if Page().blocks else line.translate(_ASCII) for line in seen.tree), sep="\n")
    print("\nlinks of a node           each way   on the sheet")
    for row in seen.links:
        rates = f"{_gb(row['bandwidth']):>12} {_gb(row['raw']):>14}"
        print(f"  {row['kind']:<9}{row['links']:>4} x {rates}   {row['example']}")
    if seen.rings:
        _print_rings(seen, "xGMI" if (cluster.devices[0].nvlink_kind or "").startswith("xgmi") else "NVLink")
    if cluster.nodes > 1:
        _print_network(cluster)
    for line in reading.assumptions:
        print(f"assumed: {line}")
    for line in seen.problems:
        print(f"check: {line}")
    if not seen.problems:
        print("check: every GPU reaches every other, links are symmetric")


def _print_network(cluster: Any) -> None:
    """A ring through all nodes."""
    from zsim.cost.layouts import lay_out

    layout = lay_out(cluster, (tuple(range(cluster.world_size)),), "ring", "send_recv")
    bound = min(layout.usage, key=lambda link: cluster.links[link].bandwidth / layout.usage[link])
    print(f"through all {cluster.nodes} nodes {_gb(layout.rate)}, bound by {bound}")


def _print_rings(seen: Any, fast: str) -> None:
    found = seen.rings
    print("\npaths between GPUs: " + ", ".join(f"{kind} {count}" for kind, count in seen.paths.items()))
    way = fast if found.type == "NVL" else f"PCIe ({found.type}{', through host memory' if found.staged else ''})"
    print(f"ring bus bandwidth {_gb(found.bandwidth)} over {way}, bound by {seen.limit}")
    for order in dict.fromkeys(found.orders):
        print("  " + " - ".join(f"gpu{gpu}" for gpu in order) + f" - gpu{order[0]}")


def _to_dict(cluster: Any, reading: Any, seen: Any) -> dict[str, Any]:
    rings = seen.rings
    return {
        "name": cluster.name,
        "read_as": reading.source,
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.gpus_per_node,
        "gpus": [device.name for device in cluster.templates[0].devices],
        "nics": len(cluster.templates[0].nics),
        "links": seen.links,
        "paths": seen.paths,
        "rings": rings
        and {
            "bus_bandwidth": rings.bandwidth,
            "type": rings.type,
            "through_host": rings.staged,
            "bound_by": seen.limit,
            "orders": [list(order) for order in dict.fromkeys(rings.orders)],
        },
        "assumptions": reading.assumptions,
        "problems": seen.problems,
    }


def _gb(rate: object) -> str:
    assert isinstance(rate, float)
    return f"{rate / 1e9:.4g} GB/s"
