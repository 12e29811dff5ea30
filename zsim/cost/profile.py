"""Constants of a device and of a software stack, read from YAML files inside the package.

A profile never holds what the catalog or the topology already says (peaks, bandwidths): only the share of them that
kernels reach, and the time that software adds. One file per device, over `generic.yaml` for what the device's own does
not say; `stacks.yaml` for what depends on the framework rather than on the GPU; `fitted.yaml`, which `zsim calibrate
published` writes, for what was fitted to published runs, and how far off it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zsim.cost.measured import Measured, MeasuredCopy

PROFILES = Path(__file__).parent / "profiles"
Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class GemmCost:
    """Matrix products: `efficiency` of the dense peak for a large one, sustained over a whole step.

    Small ones lose by `tile` (the side of an output tile) and by `depth` (elements of k that filling and draining a
    tile costs).
    """

    efficiency: float
    tile: int
    depth: int
    # By `Gemm.float8` the efficiency, of float8's own peak, in shares of that above; and its "depth"
    float8: Mapping[str, float]
    unaligned: float  # share of that efficiency where a row is no whole number of 4 bytes

    def of_float8(self, kind: str) -> GemmCost:
        depth = int(self.float8["depth"])
        return GemmCost(self.efficiency * self.float8[kind], self.tile, depth, {}, self.unaligned)


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """Fused attention at head size 128 and long sequences: share of the dense peak, forward and backward.

    Causal kernels do half of the square plus the diagonal blocks; `causal_tile` is how much of it they do too much
    (elements of the sequence). A block of queries also pays for loading itself and writing its result, as much as
    for `depth` keys. `small_head` is the relative efficiency at head size 64.
    """

    forward: float
    backward: float
    causal_tile: int
    depth: int
    small_head: float


@dataclass(frozen=True, slots=True)
class HostCost:
    """Seconds the issuing Python thread spends per operator that launches a kernel (in backward: per kernel), for the
    CUDA driver in each of them, per call (`calls` by field of `Calls`) and per hook (`hooks` by HostWork label)."""

    launch: float
    backward_launch: float
    driver: float
    calls: Mapping[str, float]
    collective: float
    copy: float
    default_hook: float
    hooks: Mapping[str, float]

    def scaled(self, pace: float) -> HostCost:
        """On a host where everything takes `pace` times as long."""

        def times(value: Any) -> Any:
            return (
                {kind: pace * seconds for kind, seconds in value.items()}
                if isinstance(value, Mapping)
                else pace * value
            )

        return HostCost(**{item.name: times(getattr(self, item.name)) for item in fields(self)})


@dataclass(frozen=True, slots=True)
class CpuCost:
    """Arithmetic on host tensors, which only moves bytes: the share of nominal DRAM bandwidth that the processes of a
    node reach together, with as many threads as cores (`dram_efficiency`) or from twice as many on
    (`crowded_efficiency`), and bytes/s of one thread by the CPU's vendor. `conversion`: seconds of one thread for an
    element of DeepSpeedCPUAdam on 16-bit weights, by instruction set and by the type of its moments."""

    dram_efficiency: float
    crowded_efficiency: float
    thread_bandwidth: Mapping[str, float]
    conversion: Mapping[str, Mapping[str, float]]


REACH = 4.0  # beyond so many times more or fewer tokens in a micro-batch something else decides: Python, or the GPU
_NAMES = {
    "deepspeed": ("DeepSpeed",),
    "fsdp2": ("FSDP2",),
    "fsdp1": ("FSDP1", "accelerate FSDP"),
    "ddp": ("DDP", "single GPU"),
}


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the profile was held against: `mape` and `bias` in percent over `rows` runs that `source` published.

    `device` and `framework`: what they ran on and with, in the source's words; "" of runs on several.
    """

    source: str
    mape: float
    bias: float
    rows: int
    min_gpus: int
    max_gpus: int
    device: str = ""
    framework: str = ""
    adapters: bool = False  # on a frozen model
    min_tokens: int = 1  # of a micro-batch
    max_tokens: int = 1 << 40

    def is_of(self, framework: str) -> bool:
        """Whether runs of "deepspeed", "fsdp2", "fsdp1" or "ddp" stand behind it, by what `framework` names."""
        return any(name in self.framework for name in _NAMES[framework])

    def speaks_for(self, framework: str, tokens: int) -> bool:
        """Whether they were also of micro-batches that keep GPU and host about as busy as `tokens` do."""
        return self.is_of(framework) and self.min_tokens / REACH <= tokens <= self.max_tokens * REACH


@dataclass(frozen=True)
class Profile:
    device: str
    stack: str
    gemm: GemmCost
    attention: Mapping[str, AttentionCost]
    memory_efficiency: Mapping[str, float]  # by kernel label; "default" for the rest
    launch_gap: float  # seconds between two kernels on the device
    collective_slowdown: float  # factor on kernels while collectives are in flight
    device_spread: float  # standard deviation of the speed of equal GPUs
    host: HostCost
    cpu: CpuCost
    own_host: bool = False  # `host` was measured on the machine itself, however fast its CPU is
    evidence: tuple[Evidence, ...] = ()
    full_memory: Evidence | None = None  # of runs whose allocator gives memory back in every step, which is not timed
    held_up: Evidence | None = None  # of runs whose host holds up the step; None too where it was measured itself
    float8: Evidence | None = None  # of runs in float8 on this kind of GPU
    # By kind, where the machine itself was measured.
    collectives: Mapping[str, Measured] = field(default_factory=dict)
    copies: Mapping[str, MeasuredCopy] = field(default_factory=dict)  # "h2d pinned"


def load_profile(device: str, stack: str | None = None) -> Profile:
    """The profile of a catalog device under a software stack of `profiles/stacks.yaml` (None: the default one).

    `stack` may also be the path of a file that `zsim calibrate` wrote: what it holds goes over the base it names.
    Raises InputError for a stack that does not exist; a device without a file of its own gets the generic profile.
    """
    if stack and stack.endswith((".yaml", ".yml")):
        return _load_file(device, Path(stack))
    return _load(device, stack or "default")


def _load_file(device: str, path: Path) -> Profile:
    """A calibrated profile: `values` over the device's own and fitted ones, `host` over the stack `base`."""
    from zsim.cost.measured import read_copies, read_measured
    from zsim.document import read_yaml
    from zsim.errors import InputError

    accepted = "a file that `zsim calibrate` wrote"
    own = read_yaml(path, "profile").data
    if "values" not in own or "device" not in own:
        raise InputError("is no profile", path, accepted=accepted)
    if own["device"] != device:
        raise InputError(f"was calibrated on {own['device']}, the cluster has {device}", path, field="device")
    base, name = own.get("base", "default"), slug(device)
    try:
        own |= _numbers({key: own.get(key, {}) for key in ("values", "host", "collectives", "copies")})
        changes: dict[str, Document] = {
            name: own["values"], "fitted": {"values": {name: own["values"]}}, "stacks": {base: own["host"]},
        }  # fmt: skip
        made = build(device, base, lambda wanted: _merge(read(wanted) or {}, changes.get(wanted, {})) or None)
        measured, copies = read_measured(own["collectives"]), read_copies(own["copies"])
        own_host = "pace" in own["host"]
        held_up = None if own_host else made.held_up
        return replace(made, stack=str(path), collectives=measured, copies=copies, held_up=held_up, own_host=own_host)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(f"is no profile: {error!r}", path, accepted=accepted) from None


def _numbers(value: Any) -> Any:
    """`value` with all numbers as such: YAML reads 1e-6 as text.

    Raises ValueError for what is neither a mapping, a list, nor a number >= 0.
    """
    if isinstance(value, dict):
        return {key: _numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_numbers(inner) for inner in value]
    if isinstance(value, bool) or not float(value) >= 0:  # infinite: sizes too small to tell a bandwidth
        raise ValueError(f"{value!r} where a number should be")
    return float(value) if isinstance(value, str) else value


@cache
def _load(device: str, stack: str) -> Profile:
    return build(device, stack, read)


def build(device: str, stack: str, read: Callable[[str], Document | None]) -> Profile:
    """A profile from the documents that `read` returns by name (file name without ending; None: no such file)."""
    from zsim.errors import InputError

    stacks = read("stacks") or {}
    if stack not in stacks:
        raise InputError(f"unknown software stack '{stack}'", field="profile", accepted=", ".join(sorted(stacks)))
    content, fitted = document(slug(device), read), read("fitted") or {}
    full, held_up, float8 = fitted.get("full_memory"), fitted.get("held_up"), fitted.get("float8", {}).get(kind(device))
    host = _merge(stacks["default"], stacks[stack])
    renamed, pace = host.pop("attention", {}), host.pop("pace")
    attention = {name: AttentionCost(**entry) for name, entry in content["attention"].items()}
    return Profile(
        device=device,
        stack=stack,
        gemm=GemmCost(**content["gemm"]),
        # `renamed`: which kernels this stack's implementations really are
        attention=attention | {name: attention[kernel] for name, kernel in renamed.items()},
        memory_efficiency=content["memory_efficiency"],
        launch_gap=content["launch_gap"],
        collective_slowdown=content["collective_slowdown"],
        device_spread=content["device_spread"],
        host=HostCost(**host).scaled(pace),
        cpu=CpuCost(**content["cpu"]),
        evidence=tuple(Evidence(**entry) for entry in content.get("evidence", ())),
        full_memory=Evidence(**full) if full else None,
        held_up=Evidence(**held_up) if held_up else None,
        float8=Evidence(**float8) if float8 else None,
    )


def document(name: str, read: Callable[[str], Document | None]) -> Document:
    """A device's own document with what was fitted, over the one it is `like`, over the generic one."""
    own = read(name)
    if own is None:
        return document("generic", read)
    fitted = read("fitted") or {}
    own = _merge(own, fitted.get("values", {}).get(name, {}))
    if name in fitted.get("evidence", {}):
        own["evidence"] = fitted["evidence"][name]
    if name == "generic":
        return own
    base = document(own.get("like", "generic"), read)
    return _merge(base, _with_efficient(base["attention"], own))


def _with_efficient(base: Document, own: Document) -> Document:
    """What a device's file says, with torch's memory-efficient kernel where it says FlashAttention 2 alone: both are
    written for Ampere's instructions, so that on another device the one is as far from `base` as the other.

    It reaches 0.52 of FlashAttention 2 on A100 (generic.yaml), 0.63 on H100 (microsoft/onnxruntime pull request 21629,
    256 tokens) and 0.43 on a Blackwell card of sm_120 (NVIDIA/TileGym pull request 49, 2,048 tokens and more).
    """
    attention = own.get("attention", {})
    if "flash" not in attention or "efficient" in attention:
        return own
    flash = base["flash"] | attention["flash"]
    ways = {way: base["efficient"][way] * flash[way] / base["flash"][way] for way in ("forward", "backward")}
    return {**own, "attention": {**attention, "efficient": ways}}


def slug(device: str) -> str:
    """Name of the device's file."""
    return device.lower().replace(" ", "-")


def kind(device: str) -> str:
    """What the boards of a GPU share: "H100" of "H100-SXM" and "H100-PCIe"."""
    return device.partition("-")[0]


def _merge(base: Document, change: Document) -> dict[str, Any]:
    merged = dict(base)
    for key, value in change.items():
        known = merged.get(key)
        merged[key] = _merge(known, value) if isinstance(value, Mapping) and isinstance(known, Mapping) else value
    return merged


@cache
def read(name: str) -> Document | None:
    """The document `name` of the package."""
    import yaml

    path = PROFILES / f"{name}.yaml"
    if not path.exists():
        return None
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    with path.open(encoding="utf-8") as file:
        return yaml.load(file, loader)
