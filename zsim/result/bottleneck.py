"""Names what most of a step's critical path runs through, with its link or its kernel family.

The critical path, not the compute lane: kernels that only fill the time until a collective ends hold nothing up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from zsim.cluster.spec import Cluster, Device
from zsim.cost.profile import Profile
from zsim.engine.timeline import FlowRecord, Timeline
from zsim.program.ops import Compute
from zsim.result.breakdown import REMAPPING, cause, clip, shares_by_family
from zsim.result.critical_path import RankView, Segment
from zsim.result.spec import Bottleneck

# A link this full is what a transfer waits for; below it the protocol or latency is.
SATURATED = 0.95
TIE = 1e-9  # relative
LONGEST = 8  # transfers that are looked at: the longest ones tell


def find(
    view: RankView, cluster: Cluster, device: Device, profile: Profile, remapping_s: float | None = None
) -> Bottleneck:
    """The largest group of causes on the critical path, and the largest cause inside it.

    `remapping_s`: what a step waits for memory that is mapped anew, which is on no lane.
    """
    path = view.critical_path()
    groups = _groups(path, device, profile)
    if view.repeated is not None:
        times, during = view.repeated
        for group, causes in _groups(list(clip(path, *during.steady[2:])), device, profile).items():
            for name, seconds in causes.items():
                groups[group][name] += times * seconds
    if remapping_s:
        groups["allocator"][REMAPPING] = remapping_s
    length = sum(seconds for causes in groups.values() for seconds in causes.values()) or 1.0
    shares = {name: sum(causes.values()) / length for name, causes in groups.items()}
    group = _largest(shares)
    causes = groups[group]
    name = _largest(causes)
    link = None
    if group == "compute":
        said = f"{name} on {device.name}"
    elif group == "host":
        said = "host: kernels are issued too late (Python, launch overhead)"
    else:
        link = _full_link([segment for segment in path if cause(segment)[1] == name], view, cluster)
        said = _words(name) + (f", waiting on {link}" if link else "")
    return Bottleneck(said, causes[name] / length, group, shares[group], shares, link)


def _largest(seconds: Mapping[str, float]) -> str:
    """Of several that differ by rounding alone, as a gather and a reduction may, the first by name."""
    most = max(seconds.values())
    return min(name for name, each in seconds.items() if each >= (1 - TIE) * most)


def _groups(path: Sequence[Segment], device: Device, profile: Profile) -> dict[str, dict[str, float]]:
    """Seconds of the path by group of causes and by cause; kernels, whatever their stream, by family."""
    groups: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    groups["host"]["host"] = 0.0
    computes: dict[int, tuple[Compute, float]] = {}  # equal blocks share their kernels
    for segment in path:
        if segment.record is not None and isinstance(segment.record.op.work, Compute):
            work = segment.record.op.work
            _, before = computes.get(id(work.kernels), (work, 0.0))
            computes[id(work.kernels)] = work, before + segment.seconds
        else:
            group, name = cause(segment)
            groups[group][name] += segment.seconds
    for work, seconds in computes.values():
        for name, share in shares_by_family(work.kernels, device, profile).items():
            groups["compute"][name] += seconds * share
    return groups


def _words(name: str) -> str:
    """ "reduce_scatter/backward" -> "reduce-scatter of backward"."""
    kind, _, phase = name.partition("/")
    if kind == "cpu_optimizer":
        return "optimizer step on the CPU"
    kind = {"h2d": "copies from host to GPU", "d2h": "copies from GPU to host"}.get(kind, kind.replace("_", "-"))
    return f"{kind} of {phase}" if phase else kind


def _full_link(transfers: Iterable[Segment], view: RankView, cluster: Cluster) -> str | None:
    """The link that was full for most of these transfers' time; None: none was full."""
    flows = {(flow.step, flow.op): flow for flow in view.timeline.flows if view.rank in flow.ranks}
    full: dict[str, float] = defaultdict(float)
    for segment in sorted(transfers, key=lambda segment: -segment.seconds)[:LONGEST]:
        assert segment.record is not None
        flow = flows.get((segment.record.step, segment.record.op.id))
        if flow is not None:
            for link, seconds in _full_links(flow, segment, view.timeline).items():
                full[link] += seconds
    if not full:
        return None
    most = max(full.values())
    link_id = min(link for link, seconds in full.items() if seconds >= 0.999 * most)
    known = cluster.links.get(link_id)
    return f"{known.kind} {link_id}" if known else link_id


def _full_links(flow: FlowRecord, segment: Segment, timeline: Timeline) -> dict[str, float]:
    """Seconds inside `segment` for which each of the flow's links was full, with whatever else crossed it."""
    others = [
        f for f in timeline.flows if f is not flow and f.times[0] < segment.end_s and f.times[-1] > segment.start_s
    ]
    full: dict[str, float] = defaultdict(float)
    for start, end, rate in _pieces(flow):
        seconds = min(end, segment.end_s) - max(start, segment.start_s)
        if seconds <= 0:
            continue
        middle = (start + end) / 2
        beside = [(f, r) for f in others for s, e, r in _pieces(f) if s <= middle < e]
        for link, usage in flow.transfer.usage.items():
            load = rate * usage + sum(r * f.transfer.usage.get(link, 0.0) for f, r in beside)
            if load >= SATURATED * timeline.link_capacity[link]:
                full[link] += seconds
    return full


def _pieces(flow: FlowRecord) -> Iterator[tuple[float, float, float]]:
    return zip(flow.times, flow.times[1:], flow.rates, strict=False)
