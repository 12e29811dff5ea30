"""Rings of a set of GPUs in one node, found as NCCL's search does in effect.

Largest speed first, depth-first search adds one ring (a Hamiltonian cycle) after another while the links have room;
the best product of rings and speed wins (NCCL graph/search.cc; the rules in our words).
"""

from __future__ import annotations

from typing import NamedTuple

from zsim.cluster.routes import TYPES, Route, gpu_to_gpu
from zsim.cluster.spec import Node

MAX_CHANNELS = 32
SEARCH_BUDGET = 20_000  # routes tried per speed, so that odd topologies end with a good ring instead of never


class Rings(NamedTuple):
    """`orders`: one Hamiltonian cycle per channel, local GPU indices, each carrying an equal share.

    `usage`: local link -> bytes over it per byte that each ring edge carries (all channels together).
    `bandwidth`: the bus bandwidth, bytes/s. `type`: worst path type. `staged`: some edge goes through host memory.
    """

    orders: tuple[tuple[int, ...], ...]
    usage: dict[str, float]
    bandwidth: float
    type: str
    staged: bool


def rings(node: Node, gpus: tuple[int, ...]) -> Rings:
    """The rings over `gpus` (sorted local indices, at least two)."""
    key = ("rings", gpus)
    if key not in node._cache:
        node._cache[key] = _search(node, gpus)
    return node._cache[key]


def _search(node: Node, gpus: tuple[int, ...]) -> Rings:
    switches = {node.switch_of.get(gpu) for gpu in gpus}
    if len(switches) == 1 and None not in switches:
        routes = {edge: gpu_to_gpu(node, *edge) for edge in zip(gpus, gpus[1:] + gpus[:1], strict=True)}
        return _of(node, routes, [gpus])  # all pairs are equal behind an NVSwitch: any order, at full rate
    routes = {(a, b): gpu_to_gpu(node, a, b) for a in gpus for b in gpus if a != b}
    for worst in range(len(TYPES)):  # the nearest path types that allow a ring at all, as NCCL relaxes them
        near = {pair: route for pair, route in routes.items() if TYPES.index(route.type) <= worst}
        found = _fastest(node, gpus, near)
        if found:
            return found
    return _of(node, routes, [gpus])


def _fastest(node: Node, gpus: tuple[int, ...], routes: dict[tuple[int, int], Route]) -> Rings | None:
    """The best product of ring speed and count over `routes`."""
    best: Rings | None = None
    rates = {route.bandwidth for route in routes.values()}
    for speed in sorted({rate / share for rate in rates for share in (1, 1.5, 2, 3, 4, 6)}, reverse=True):
        if best and speed * MAX_CHANNELS <= best.bandwidth:
            continue
        orders = _fill(node, gpus, routes, speed)
        if orders:
            found = _of(node, routes, orders)
            if best is None or found.bandwidth > best.bandwidth * 1.001:
                best = found
            if best.type != "NVL":
                break  # over PCIe one ring fills the links; slower ones only divide them
    return best


def _fill(
    node: Node, gpus: tuple[int, ...], routes: dict[tuple[int, int], Route], speed: float
) -> list[tuple[int, ...]]:
    """As many rings of `speed` as fit together."""
    room = {link: node.links[link].bandwidth * 1.0001 for route in routes.values() for link in route.usage}
    orders: list[tuple[int, ...]] = []
    while len(orders) < MAX_CHANNELS:
        order = _one(gpus, routes, room, speed)
        if order is None:
            return orders
        orders.append(order)
        for edge in zip(order, order[1:] + order[:1], strict=True):
            _take(room, routes[edge], speed)
    return orders


def _one(
    gpus: tuple[int, ...], routes: dict[tuple[int, int], Route], room: dict[str, float], speed: float
) -> tuple[int, ...] | None:
    budget = SEARCH_BUDGET

    def extend(path: list[int]) -> tuple[int, ...] | None:
        nonlocal budget
        here = path[-1]
        if len(path) == len(gpus):
            return tuple(path) if _fits(room, routes.get((here, path[0])), speed) else None
        nexts = [gpu for gpu in gpus if gpu not in path and _fits(room, routes.get((here, gpu)), speed)]
        nexts.sort(
            key=lambda gpu: (
                TYPES.index(routes[here, gpu].type),
                -_least(room, routes[here, gpu]),
                (gpu - here) % len(gpus),
            )
        )
        for gpu in nexts:
            budget -= 1
            if budget < 0:
                return None
            _take(room, routes[here, gpu], speed)
            found = extend([*path, gpu])
            _take(room, routes[here, gpu], -speed)
            if found:
                return found
        return None

    return extend([gpus[0]])


def _fits(room: dict[str, float], route: Route | None, speed: float) -> bool:
    return route is not None and all(room[link] >= times * speed for link, times in route.usage.items())


def _least(room: dict[str, float], route: Route) -> float:
    return min(room[link] / times for link, times in route.usage.items())


def _take(room: dict[str, float], route: Route, speed: float) -> None:
    for link, times in route.usage.items():
        room[link] -= times * speed


def _of(node: Node, routes: dict[tuple[int, int], Route], orders: list[tuple[int, ...]]) -> Rings:
    usage: dict[str, float] = {}
    kind, staged = "LOC", False
    for order in orders:
        for edge in zip(order, order[1:] + order[:1], strict=True):
            route = routes[edge]
            for link, times in route.usage.items():
                usage[link] = usage.get(link, 0.0) + times / len(orders)
            kind = max(kind, route.type, key=TYPES.index)
            staged = staged or route.staged
    bandwidth = min(node.links[link].bandwidth / times for link, times in usage.items())
    return Rings(tuple(orders), usage, bandwidth, kind, staged)
