"""Names what the step spends most of its time on, with its link or its kernel family."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from zsim.cluster.spec import Cluster, Device
from zsim.engine.timeline import FlowRecord, Timeline
from zsim.result.breakdown import cause, waiting_segments
from zsim.result.critical_path import RankView, Segment
from zsim.result.spec import Bottleneck, Time

# A link this full is what a transfer waits for; below it the protocol or latency is.
SATURATED = 0.95
LONGEST = 8  # waits that are looked at: the longest ones tell


def find(view: RankView, time: Time, cluster: Cluster, device: Device) -> Bottleneck:
    """The largest group of causes, and the largest cause inside it."""
    step = time.step_s or 1.0
    groups: dict[str, dict[str, float]] = {
        "compute": dict(time.compute_by_family),
        "communication": dict(time.exposed_by),
        "host": {"host": time.host_s},
        "other": dict(time.idle_by),
    }
    group = max(groups, key=lambda name: sum(groups[name].values()))
    causes = groups[group] or {group: 0.0}
    name = max(causes, key=lambda key: causes[key])
    share, group_share = causes[name] / step, sum(causes.values()) / step
    if group == "compute":
        return Bottleneck(f"{name} on {device.name}", share, group, group_share)
    if group == "host":
        return Bottleneck("host: kernels are issued too late (Python, launch overhead)", share, group, group_share)
    link = _waited_link(view, name, cluster)
    return Bottleneck(_words(name) + (f", waiting on {link}" if link else ""), share, group, group_share, link)


def _words(name: str) -> str:
    """ "reduce_scatter/backward" -> "reduce-scatter of backward"."""
    kind, _, phase = name.partition("/")
    if kind == "cpu_optimizer":
        return "optimizer step on the CPU"
    kind = {"h2d": "copies from host to GPU", "d2h": "copies from GPU to host"}.get(kind, kind.replace("_", "-"))
    return f"{kind} of {phase}" if phase else kind


def _waited_link(view: RankView, name: str, cluster: Cluster) -> str | None:
    """The link that was full for most of the time that the compute lane waited for `name`; None: none was full."""
    waits = [s for s in waiting_segments(view) if s.record is not None and cause(s)[1] == name]
    waits.sort(key=lambda s: -s.seconds)
    flows = {(flow.step, flow.op): flow for flow in view.timeline.flows if view.rank in flow.ranks}
    full: dict[str, float] = defaultdict(float)
    for segment in waits[:LONGEST]:
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
