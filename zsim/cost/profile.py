"""Constants of a device and of a software stack, read from YAML files inside the package.

A profile never holds what the catalog or the topology already says (peaks, bandwidths): only the share of them that
kernels reach, and the time that software adds. One file per device, `generic.yaml` for devices nobody measured, and
`stacks.yaml` for what depends on the framework rather than on the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

PROFILES = Path(__file__).parent / "profiles"


@dataclass(frozen=True, slots=True)
class GemmCost:
    """Matrix products: `efficiency` of the dense peak for a large one, sustained over a whole step.

    Small ones lose by `tile` (the side of an output tile), by `depth` (elements of k that filling and draining a tile
    costs), and by `ramp` seconds in which a product starts and ends on a partly idle device.
    """

    efficiency: float
    tile: int = 128
    depth: int = 128
    ramp: float = 5e-6


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """Fused attention at head size 128 and long sequences: share of the dense peak, forward and backward.

    Causal kernels do half of the square plus the diagonal blocks; `causal_tile` is how much of it they do too much
    (elements of the sequence). A block of queries also pays for loading itself and writing its result, as much as
    for `depth` keys. `small_head` is the relative efficiency at head size 64.
    """

    forward: float
    backward: float
    causal_tile: int = 256
    depth: int = 100
    small_head: float = 0.8


@dataclass(frozen=True, slots=True)
class HostCost:
    """Seconds the issuing Python thread spends per launch and per hook (`hooks` by HostWork label)."""

    launch: float
    backward_launch: float
    collective: float
    copy: float
    hooks: Mapping[str, float]
    default_hook: float = 10e-6


@dataclass(frozen=True, slots=True)
class CpuCost:
    """Optimizer on the CPU: bytes/s share of nominal DRAM bandwidth and parameters/s of one core."""

    dram_efficiency: float
    params_per_core: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the profile was held against: `mape` and `bias` in percent over `rows` rows of the kind described."""

    text: str
    mape: float
    bias: float
    rows: int
    min_gpus: int
    max_gpus: int
    stack: str = ""


@dataclass(frozen=True)
class Profile:
    device: str
    stack: str
    gemm: GemmCost
    attention: Mapping[str, AttentionCost]
    memory_efficiency: Mapping[str, float]  # by kernel label; "default" for the rest
    launch_gap: float  # seconds between two kernels on the device
    collective_slowdown: float  # factor on kernels while collectives are in flight
    spread: float  # relative standard deviation of speed between GPUs of one model
    host: HostCost
    cpu: CpuCost
    provenance: str
    evidence: tuple[Evidence, ...] = ()

    def expected_error(self, gpus: int) -> Evidence | None:
        """The nearest evidence for a run on `gpus` GPUs: same stack first, then nearest in scale. None: none at all."""

        def distance(evidence: Evidence) -> tuple[bool, float]:
            outside = max(evidence.min_gpus / gpus, gpus / evidence.max_gpus, 1.0)
            return evidence.stack not in ("", self.stack), outside

        return min(self.evidence, key=distance, default=None)


def load_profile(device: str, stack: str | None = None) -> Profile:
    """The profile of a catalog device under a software stack of `profiles/stacks.yaml` (None: the default one).

    Raises InputError for a stack that does not exist; a device without a file of its own gets the generic profile.
    """
    return _load(device, stack or "default")


@cache
def _load(device: str, stack: str) -> Profile:
    from zsim.errors import InputError

    stacks = _read("stacks")
    if stack not in stacks:
        raise InputError(f"unknown software stack '{stack}'", field="profile", accepted=", ".join(sorted(stacks)))
    document = _device_document(device)
    host = _merge(stacks["default"], stacks[stack])
    return Profile(
        device=device,
        stack=stack,
        gemm=GemmCost(**document["gemm"]),
        attention=_attention(document["attention"], host.get("attention", {})),
        memory_efficiency=document["memory_efficiency"],
        launch_gap=document["launch_gap"],
        collective_slowdown=document["collective_slowdown"],
        spread=document["spread"],
        host=HostCost(**{item.name: host[item.name] for item in fields(HostCost) if item.name in host}),
        cpu=CpuCost(**document["cpu"]),
        provenance=document["provenance"],
        evidence=tuple(Evidence(**entry) for entry in document.get("evidence", ())),
    )


def _attention(kernels: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, AttentionCost]:
    """Costs by implementation; `renamed`: which kernels this stack's implementations really are."""
    costs = {name: AttentionCost(**entry) for name, entry in kernels.items()}
    return costs | {name: costs[kernel] for name, kernel in renamed.items()}


def _device_document(device: str) -> Mapping[str, Any]:
    own = PROFILES / f"{slug(device)}.yaml"
    if not own.exists():
        return _read("generic")
    document = _read(own.stem)
    base = _read(document.get("like", "generic"))
    return _merge(base, document)


def slug(device: str) -> str:
    return device.lower().replace(" ", "-")


def _merge(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in change.items():
        known = merged.get(key)
        merged[key] = _merge(known, value) if isinstance(value, Mapping) and isinstance(known, Mapping) else value
    return merged


@cache
def _read(name: str) -> Mapping[str, Any]:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    with open(PROFILES / f"{name}.yaml", encoding="utf-8") as file:
        return yaml.load(file, loader)  # type: ignore[no-any-return]
