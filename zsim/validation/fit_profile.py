"""A cost profile from measured points: which constants they determine, how well, and which stay at the base."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zsim.cluster.catalog import device as catalog_device
from zsim.cluster.spec import Device, Host
from zsim.cost import attention
from zsim.cost import profile as profiles
from zsim.cost.profile import Profile, load_profile
from zsim.errors import InputError
from zsim.model.kernels import Attention
from zsim.program.optimizer import RULES
from zsim.validation import fit
from zsim.validation.fit import Estimate
from zsim.validation.fit_points import Points, gather

# What a profile holds and a capture can determine, in the order of reports.
CONSTANTS = (
    "gemm.efficiency", "gemm.depth", "attention.flash.forward", "attention.flash.backward", "memory_efficiency.default",
    "memory_efficiency.optimizer", "launch_gap", "collective_slowdown", "host.pace", "copies",
    "cpu.dram_efficiency", "cpu.thread_bandwidth",
)  # fmt: skip
# Seconds of one operator after the other without autograd on the host whose times profiles/stacks.yaml has: 1.1e-6 on
# its CPU, and the driver.
BARE_OPERATOR = 3.3e-6
_SCATTER = 0.25  # rms error beyond which products follow no common law: mixed libraries, sparsity, other precisions
_ALL = 0.95  # and above: all, as gloo's threads take of the one core of their rank
_MOST = 1.5  # times the catalog's peak: a clock above nominal is possible, more is a wrong device or dtype


@dataclass
class Calibration:
    device: Device
    base: str
    sources: list[str]
    profile: Profile  # the base's
    determined: dict[str, Estimate] = field(default_factory=dict)
    plain: dict[str, int] = field(default_factory=dict)  # constants without an interval
    collectives: dict[str, tuple[int, list[tuple[float, fit.Line]]]] = field(default_factory=dict)
    # "h2d pinned" -> ranks, a rank alone, each of all ranks
    copies: dict[str, tuple[int, fit.Line, fit.Line]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def left(self) -> list[str]:
        known = [*self.determined, *(["copies"] if self.copies else [])]
        return [name for name in CONSTANTS if not any(other.startswith(name) for other in known)]

    def document(self) -> dict[str, Any]:
        """What is written as YAML, and read as `profile:` of a scenario."""
        values: dict[str, Any] = {}
        host: dict[str, Any] = {}
        found: dict[str, float] = {name: estimate.value for name, estimate in self.determined.items()} | self.plain
        for name, value in found.items():
            *path, last = name.split(".")
            target = host if path[:1] == ["host"] else values
            for part in path[1:] if target is host else path:
                target = target.setdefault(part, {})
            target[last] = value if isinstance(value, int) else float(f"{value:.5g}")
        return {
            "device": self.device.name,
            "base": self.base,
            "provenance": f"calibrated from {', '.join(self.sources)}",
            "values": values,
            "host": host,
            "collectives": {
                kind: {
                    "ranks": ranks,
                    "regimes": [
                        {"up_to": float(up_to), "latency": line.latency.value, "bandwidth": line.slope.inverse().value}
                        for up_to, line in lines
                    ],
                }
                for kind, (ranks, lines) in self.collectives.items()
            },
            "copies": {
                kind: {
                    "ranks": ranks,
                    "latency": alone.latency.value,
                    "alone": alone.slope.inverse().value,
                    "together": together.slope.inverse().value,
                }
                for kind, (ranks, alone, together) in self.copies.items()
            },
            "determined": {
                name: {"value": e.value, "low": e.low, "high": e.high, "points": e.points}
                for name, e in self.determined.items()
            },
            "left_at_base": self.left,
            "notes": self.notes,
        }

    def text(self) -> str:
        lines = [f"{'constant':<40}{'value':>12}   95 % interval, points"]
        for name, e in self.determined.items():
            lines.append(f"{name:<40}{e.value:>12.4g}   {e.low:.4g} to {e.high:.4g}, {e.points}")
        for kind, (ranks, pieces) in self.collectives.items():
            for up_to, line in pieces:
                latency, rate = line.latency, line.slope.inverse()
                title = f"{kind}, {ranks} ranks, up to {up_to:.3g} B"
                lines.append(
                    f"{title:<40}{latency.value * 1e6:>9.1f} us   {latency.low * 1e6:.1f} to {latency.high * 1e6:.1f}; "
                    f"{rate.value / 1e9:.3g} GB/s ({rate.low / 1e9:.3g} to {rate.high / 1e9:.3g}); rms {line.error:.0%}"
                )
        for kind, (ranks, *both) in self.copies.items():
            for who, line in zip(("alone", f"each of {ranks}"), both, strict=True):
                rate = line.slope.inverse()
                said = f"{rate.value / 1e9:.3g} GB/s ({rate.low / 1e9:.3g} to {rate.high / 1e9:.3g})"
                lines.append(f"{f'copy {kind}, {who}':<40}{line.latency.value * 1e6:>9.1f} us   {said}")
        lines += [f"left at the base: {', '.join(self.left) or 'nothing'}", *self.notes]
        return "\n".join(lines)


def calibrate(
    paths: Sequence[Path],
    base: str = "default",
    device: str | None = None,
    op: str | None = None,
    ranks: int | None = None,
) -> Calibration:
    """Fit a profile to captures, traces and logs of collectives.

    `base`: a software stack, or a device (then under the default stack). `device`: the catalog's name where the files
    do not tell it; `op`, `ranks`: as in `gather`. Raises InputError where nothing can be determined.
    """
    points = gather(paths, op, ranks)
    stacks = profiles.read("stacks") or {}
    if base not in stacks:
        named = _device_of_base(base, stacks)
        if points.device and catalog_device(points.device) != named:
            raise InputError(f"measured on {points.device}", field="--base", accepted="that device, or a stack")
        device, base = device or base, "default"
    name = device or points.device
    if not name:
        say = "does not say on which device it" if len(points.sources) == 1 else "do not say on which device they"
        raise InputError(
            f"{', '.join(points.sources)} {say} ran",
            field="--device",
            accepted="a name of the catalog, such as H100-SXM",
        )
    known = catalog_device(name)
    profile = load_profile(known.name, base)
    found = Calibration(known, base, points.sources, profile, notes=points.notes)
    _products(points, found)
    _attention(points, found, profile)
    _memory(points, found)
    _optimizer(points, found)
    _collectives(points, found)
    _slowdown(points, found)
    _copies(points, found)
    _cpu(points, found, profile)
    if not (found.determined or found.collectives or found.copies):
        raise InputError(
            f"{', '.join(points.sources)}: nothing in it determines a constant",
            accepted="a capture, or traces with sizes of collectives or shapes of products",
            notes=tuple(found.notes),
        )
    return found


def _device_of_base(base: str, stacks: Iterable[str]) -> Device:
    try:
        return catalog_device(base)
    except InputError as unknown:
        accepted = f"{', '.join(sorted(stacks))}; or a device: {unknown.accepted}"
        raise InputError(
            f"{base!r} is neither a software stack nor a device", field="--base", accepted=accepted
        ) from None


def _products(points: Points, found: Calibration) -> None:
    """The dtype with most points; its shares of the peak stand for the others as well."""
    if not points.gemms:
        return
    dtype, measured = max(points.gemms.items(), key=lambda item: len(item[1]))
    peak = found.device.peak_flops.get(dtype)
    if peak is None or len(measured) < 4:
        found.notes.append(f"products: {len(measured)} shapes of {dtype} are too few, or the device has no peak for it")
        return
    tile, line = fit.gemm([shape for shape, _ in measured], [seconds for _, seconds in measured], peak)
    share = line.slope.inverse()
    if line.error > _SCATTER or share.high > _MOST:
        found.notes.append(f"products: {len(measured)} shapes of {dtype} determine nothing, rms error {line.error:.0%}")
        return
    found.determined["gemm.efficiency"] = share
    found.determined["gemm.depth"] = line.latency.scaled(1 / line.slope.value)
    found.plain["gemm.tile"] = tile
    found.notes.append(f"products: {len(measured)} shapes of {dtype}, tile {tile}, rms error {line.error:.1%}")


def _attention(points: Points, found: Calibration, profile: Profile) -> None:
    cost = profile.attention["flash"]
    for direction, measured in points.attention.items():
        shares = []
        for about, seconds in measured:
            kernel = Attention(
                batch=int(about["batch"]), heads=int(about["heads"]), kv_heads=int(about["heads"]),
                q_len=int(about["length"]), kv_len=int(about["length"]), head_dim=int(about["head_dim"]),
                causal=bool(about["causal"]), impl="flash", dtype=next(iter(points.gemms), "float32"),
                backward=direction == "backward",
            )  # fmt: skip
            peak = found.device.peak_flops.get(kernel.dtype)
            if peak:  # the time that full efficiency would take, over the measured one
                unit = getattr(cost, direction)
                shares.append(unit * attention.seconds(kernel, cost, peak) / seconds)
        if shares:
            found.determined[f"attention.flash.{direction}"] = fit.mean(shares)


def _memory(points: Points, found: Calibration) -> None:
    """Share of the nominal bandwidth, and what a launch adds on the device: on a CPU the call itself."""
    if len(points.memory) >= 3:
        line = fit.line(*zip(*points.memory, strict=True))
        found.determined["memory_efficiency.default"] = line.slope.inverse(1 / found.device.memory_bandwidth)
        found.notes.append(f"memory-bound kernels: rms error {line.error:.0%}")
    if points.launch:
        if found.device.vendor == "CPU":
            found.determined["launch_gap"] = fit.mean(points.launch)
            found.plain["host.driver"] = 0
        else:
            found.determined["host.pace"] = fit.mean([seconds / BARE_OPERATOR for seconds in points.launch])


def _optimizer(points: Points, found: Calibration) -> None:
    rule = RULES["adamw"]
    name = "loop" if found.device.vendor == "CPU" else "foreach"
    if measured := points.optimizer.get(name):
        per_element = 4 * sum(p.reads + p.writes for p in rule.passes)
        rates = [per_element * numel / seconds / found.device.memory_bandwidth for numel, seconds in measured]
        found.determined["memory_efficiency.optimizer"] = fit.mean(rates)


def _collectives(points: Points, found: Calibration) -> None:
    """Of each kind the largest group that has sizes enough."""
    for (kind, ranks), measured in sorted(points.collectives.items(), key=lambda item: item[0][1]):
        sizes = [size for size, _ in measured]
        if len(set(sizes)) < 3 or max(sizes) < 8 * min(sizes):
            found.notes.append(f"{kind} of {ranks} ranks: {len(set(sizes))} sizes, too few or too close for a line")
            continue
        lines = fit.regimes(sizes, [seconds for _, seconds in measured])
        if not lines[-1][1].slope.value:
            found.notes.append(f"{kind} of {ranks} ranks: sizes too small to tell a bandwidth")
            continue
        found.collectives[kind] = (ranks, lines)
    others = [kind for kind in ("all_gather", "reduce_scatter", "all_reduce") if kind not in found.collectives]
    if found.collectives and others:
        found.notes.append(f"{' and '.join(others)}: not measured, and predicted as without these data")


def _slowdown(points: Points, found: Calibration) -> None:
    """What an all-reduce takes from the kernels beside it: a share of its own time, of which they get the rest."""
    shares = [
        (seconds["both"] - seconds["products"]) / seconds["all_reduce"]
        for seconds in points.overlap.values()
        if seconds.keys() >= {"both", "products", "all_reduce"}
    ]
    if shares:
        found.determined["collective_slowdown"] = fit.mean([1 / (1 - min(max(x, 0.0), _ALL)) for x in shares])


def _copies(points: Points, found: Calibration) -> None:
    for kind in sorted({name.rsplit(" ", 1)[0] for name in points.copies}):
        measured = [points.copies.get(f"{kind} {who}", []) for who in ("alone", "together")]
        if any(len(rows) < 2 for rows in measured):
            found.notes.append(f"copies {kind}: one size, or not both alone and together, determine no rate")
            continue
        alone, together = (fit.line(*zip(*rows, strict=True)) for rows in measured)
        if alone.slope.value and together.slope.value:
            found.copies[kind] = points.world, alone, together


def _cpu(points: Points, found: Calibration, profile: Profile) -> None:
    """Adam on the host: bytes/s of one thread; and, where all ranks fill the DRAM, their share of its nominal rate."""
    host, traffic = points.host, 28  # bytes per element: parameter, gradient and two moments read, three written
    alone = None
    for threads, measured in sorted(points.cpu_optimizer.items()):
        rate = fit.mean([traffic * numel / seconds for numel, seconds in measured])
        if threads == 1:
            alone = found.determined[f"cpu.thread_bandwidth.{_vendor(host, profile)}"] = rate
        elif alone and rate.value > _ALL * threads * alone.value:
            found.notes.append(f"CPU optimizer: {threads} threads are {threads} times as fast as one: DRAM has more")
        elif host is not None:
            found.determined["cpu.dram_efficiency"] = rate.scaled(points.world / host.dram_bandwidth)


def _vendor(host: Host | None, profile: Profile) -> str:
    """The entry that prices this host."""
    return host.vendor if host is not None and host.vendor in profile.cpu.thread_bandwidth else "default"
