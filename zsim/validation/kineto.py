"""Reads the traces that torch.profiler exports (Kineto's Chrome traces), of torch 1.13 and later, CUDA, ROCm or CPU.

Files are read in pieces, so that one of hundreds of MB needs memory only for what is kept of it. What the trace says
of a collective depends on its age: in newer ones the kernel itself carries `Collective name` and sizes; before, the
`record_param_comms` around its launch does, or only a `nccl:all_reduce` annotation with the shapes of its inputs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from sys import intern
from typing import Any, TypeGuard

from zsim.errors import InputError
from zsim.validation.trace import COMMUNICATION, COPY, Call, Nested, Slice, Step, Trace, classify
from zsim.validation.trace_json import ACCEPTED, entries

Event = Mapping[str, Any]
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset", "mtia_ccp_events"}
_LAUNCHES = {"cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime", "Runtime", "privateuse1_runtime"}
# On a CPU an operator's work is that of the outermost ATen operator but these, which only call others; everything
# without a namespace, and autograd's own, may hold hooks that wait for collectives.
_ONLY_CALLS = re.compile(
    r"^(c10d|_c10d_functional|autograd|torch::autograd)::"
    r"|^aten::(linear|matmul|einsum|scaled_dot_product_attention|conv\dd|convolution|to|contiguous|reshape)$"
)
_RUNS_HERE = re.compile(r"^(gloo|mpi|ucc):(\w+)")  # annotations around the transfer itself
_ANNOTATION = re.compile(r"^(?:nccl|gloo|mpi|ucc|xccl|hccl):(\w+)")
_KINDS = (
    ("all_gather", re.compile(r"_?all_?gather", re.IGNORECASE)),
    ("reduce_scatter", re.compile(r"_?reduce_?scatter", re.IGNORECASE)),
    ("all_reduce", re.compile(r"all_?reduce", re.IGNORECASE)),
    ("all_to_all", re.compile(r"all_?to_?all", re.IGNORECASE)),
    ("send_recv", re.compile(r"send|recv", re.IGNORECASE)),
    ("broadcast", re.compile(r"broadcast", re.IGNORECASE)),
    ("barrier", re.compile(r"barrier", re.IGNORECASE)),
    ("gather", re.compile(r"gather", re.IGNORECASE)),
    ("scatter", re.compile(r"scatter", re.IGNORECASE)),
    ("reduce", re.compile(r"reduce", re.IGNORECASE)),
)
_DTYPES = {
    "float": "float32", "double": "float64", "half": "float16", "bfloat16": "bfloat16", "byte": "uint8",
    "unsigned char": "uint8", "char": "int8", "signed char": "int8", "int": "int32", "long": "int64",
    "long int": "int64",
    "bool": "bool", "short": "int16", "float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2",
}  # fmt: skip
_ARGS = (
    "Collective name", "In msg nelems", "Out msg nelems", "Group size", "dtype", "Process Group Name", "stream",
    "correlation", "Input Dims", "Input type", "phase", "module", "micro-batch",
)  # fmt: skip
_LISTS = ("Input Dims", "Input type")
_HUGE = 1e18  # beyond what microseconds and numbers of elements can be
_MATRIX = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}


def read(path: Path | str) -> Trace:
    """The trace of one rank. Raises InputError for what is no trace, or a damaged one."""
    path = Path(path)
    head: dict[str, Any] = {}
    events: list[Event] = []
    for key, value in entries(path):
        if key is not None:
            head[key] = value
        elif not isinstance(value, dict):
            raise InputError(f"holds {value!r:.40} where an event should be", path, accepted=ACCEPTED)
        elif value.get("ph") == "X" and value.get("cat") not in ("python_function", "Trace", "overhead"):
            for key in ("cat", "pid", "tid"):
                if not isinstance(value.get(key), (str, int, float, type(None))):
                    raise InputError(f"an event has {key} = {value[key]!r:.40}", path, accepted=ACCEPTED)
            events.append(_kept(value))
    if not any("cat" in event for event in events):
        raise InputError("holds no event of a profiled run", path, accepted=ACCEPTED)
    return _Reading(path, head, events).trace()


def _kept(event: Event) -> Event:
    """What of an event is read later: a trace has millions, and stacks, grids and strides are most of it."""
    kept = {key: event[key] for key in ("name", "cat", "pid", "tid", "ts", "dur") if key in event}
    if isinstance(kept.get("name"), str):
        kept["name"] = intern(kept["name"])
    if isinstance(args := event.get("args"), dict):
        kept["args"] = {
            key: args[key] for key in _ARGS if isinstance(args.get(key), list if key in _LISTS else (str, int, float))
        }
        if event.get("cat") == "cpu_op" and event.get("name") not in _MATRIX:
            kept["args"].pop("Input Dims", None)
            kept["args"].pop("Input type", None)
    return kept


class _Reading:
    """From events to slices. Times stay in microseconds until a slice is made."""

    def __init__(self, path: Path, head: dict[str, Any], events: list[Event]) -> None:
        self.path = path
        info = head.get("distributedInfo")
        self.info: Mapping[str, Any] = info if isinstance(info, dict) else {}
        devices = head.get("deviceProperties")
        self.devices = [d for d in devices if isinstance(d, dict)] if isinstance(devices, list) else []
        self.events = [event for event in events if self._checked(event)]
        self.zero = min((event["ts"] for event in self.events), default=0.0)

    def _checked(self, event: Event) -> bool:
        for field in ("ts", "dur"):
            value = event.get(field, 0 if field == "dur" else None)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _HUGE:
                name = f"{event.get('name')!r:.60}"
                raise InputError(f"event {name} has {field} = {value!r:.40}", self.path, accepted="microseconds")
        return isinstance(event.get("name"), str)

    def trace(self) -> Trace:
        by_category: dict[str, list[Event]] = {}
        for event in self.events:
            by_category.setdefault(str(event.get("cat")), []).append(event)
        self.ops = by_category.get("cpu_op", []) + by_category.get("Operator", [])
        self.notes = by_category.get("user_annotation", [])
        device = [event for cat in _DEVICE for event in by_category.get(cat, [])]
        slices = self._device_slices(device, by_category) if device else self._cpu_slices()
        slices += [self._slice(op, *_titled(op)) for op in self.ops if device and "micro-batch" in _args(op)]
        rank = self.info.get("rank")
        return Trace(
            path=self.path,
            rank=rank if isinstance(rank, int) else None,
            world_size=self._world(),
            backend=str(self.info.get("backend", "")),
            device=str(self.devices[0].get("name", "")) if self.devices else "",
            on_device=bool(device),
            slices=tuple(sorted(slices, key=lambda piece: (piece.start_s, piece.end_s, piece.lane))),
            steps=self._steps(),
        )

    def _world(self) -> int | None:
        world = self.info.get("world_size")
        return world if isinstance(world, int) else None

    def _steps(self) -> tuple[Step, ...]:
        """`ProfilerStep#` annotations of the CPU; some profilers draw them on the GPU as well."""
        found = {}
        for event in self.notes + self.ops:
            if event["name"].startswith("ProfilerStep#") and event["name"][13:].isdecimal():
                start, end = self._span(event)
                found[int(event["name"][13:])] = Step(int(event["name"][13:]), start, end)
        return tuple(found[number] for number in sorted(found))

    def _span(self, event: Event) -> tuple[float, float]:
        start = (event["ts"] - self.zero) * 1e-6
        return start, start + event.get("dur", 0) * 1e-6

    def _slice(self, event: Event, kind: str, lane: str, **more: Any) -> Slice:
        args, (start, end) = _args(event), self._span(event)
        phase, module = str(args.get("phase", "")), str(args.get("module", ""))
        return Slice(event["name"], kind, lane, start, end, phase=phase, module=module, **more)

    # ---- GPUs

    def _device_slices(self, events: list[Event], by_category: Mapping[str, list[Event]]) -> list[Slice]:
        launches = {
            _args(event)["correlation"]: event
            for cat in _LAUNCHES
            for event in by_category.get(cat, [])
            if "correlation" in _args(event)
        }
        calls = [op for op in self.ops if op["name"] == "record_param_comms" and "Collective name" in _args(op)]
        calls += [note for note in self.notes if _ANNOTATION.match(note["name"])]
        around = _Threads(calls)
        products = _Threads([op for op in self.ops if op["name"] in _MATRIX])
        slices = []
        for event in events:
            args = _args(event)
            launch = launches.get(args.get("correlation"))
            kind = COPY if str(event["cat"]).lower() in ("gpu_memcpy", "gpu_memset", "memcpy", "memset") else None
            kind = kind or classify(event["name"])
            call = gemm = None
            if kind == COMMUNICATION:
                call = self._call(event, around.innermost(launch) if launch else None)
            elif kind == "gemm" and launch and (op := products.innermost(launch)):
                gemm = _product(op)
            launched = (launch["ts"] - self.zero) * 1e-6 if launch else None
            lane = f"stream {args.get('stream', event.get('tid'))}"
            slices.append(self._slice(event, kind, lane, call=call, gemm=gemm, launched_s=launched))
        return slices

    def _call(self, kernel: Event, around: Event | None) -> Call:
        args = _args(kernel)
        if "Collective name" not in args and around is not None:
            args = _args(around) if "Collective name" in _args(around) else {}
            if not args:
                return self._annotated(around)
        name = str(args.get("Collective name") or kernel["name"])
        return Call(
            kind=_kind(name) if _kind(name) != "unknown" else _kind(kernel["name"]),
            dtype=_dtype(args.get("dtype")),
            in_numel=_whole(args.get("In msg nelems")),
            out_numel=_whole(args.get("Out msg nelems")),
            group_size=_whole(args.get("Group size")) or self._world(),
            group=str(args.get("Process Group Name", "")),
        )

    def _annotated(self, note: Event) -> Call:
        """From `nccl:all_reduce` or `gloo:all_gather` and, where shapes were recorded, its inputs."""
        kind, world = _kind(note["name"]), self._world()
        dims, types = _args(note).get("Input Dims"), _args(note).get("Input type")
        if not isinstance(dims, list) or not dims or not isinstance(types, list) or not types:
            return Call(kind, group_size=world)
        shapes = [dim for dim in dims if _is_shape(dim)]
        sent = sum(prod(shape) for shape in shapes)
        received = sent
        if world and kind == "all_gather":
            received = sent * world
        elif world and kind == "reduce_scatter":
            received = sent // world
        return Call(kind, _dtype(types[0]), sent, received, world)

    # ---- CPUs

    def _cpu_slices(self) -> list[Slice]:
        """Outermost operators that compute, and the transfers that gloo's threads ran."""
        slices = []
        threads: dict[object, list[Event]] = {}
        for op in self.ops:
            if "::" in op["name"] and not _ONLY_CALLS.match(op["name"]):
                threads.setdefault((op.get("pid"), op.get("tid")), []).append(op)
        for ops in threads.values():
            covered = float("-inf")
            for op in sorted(ops, key=lambda op: (op["ts"], -op.get("dur", 0))):
                if op["ts"] < covered:
                    continue
                covered = op["ts"] + op.get("dur", 0)
                gemm = _product(op) if op["name"] in _MATRIX else None
                slices.append(self._slice(op, classify(op["name"]), f"thread {op.get('tid')}", gemm=gemm))
        for note in self.notes:
            if _RUNS_HERE.match(note["name"]):
                lane = f"thread {note.get('tid')}"
                slices.append(self._slice(note, COMMUNICATION, lane, call=self._annotated(note)))
        return slices


class _Threads:
    """Which of some events was running on a thread at a moment."""

    def __init__(self, events: list[Event]) -> None:
        self._events = events
        spans: dict[object, list[tuple[float, float, int]]] = {}
        for index, event in enumerate(events):
            where = (event.get("pid"), event.get("tid"))
            spans.setdefault(where, []).append((event["ts"], event["ts"] + event.get("dur", 0), index))
        self._threads = {where: Nested(found) for where, found in spans.items()}

    def innermost(self, moment: Event) -> Event | None:
        thread = self._threads.get((moment.get("pid"), moment.get("tid")))
        index = thread.at(moment["ts"]) if thread else -1
        return self._events[index] if index >= 0 else None


def _args(event: Event) -> Mapping[str, Any]:
    args = event.get("args")
    return args if isinstance(args, dict) else {}


def _titled(op: Event) -> tuple[str, str]:
    """Class and lane of CPU work in a trace that zsim wrote."""
    kind = classify(op["name"])
    return ("optimizer" if kind == "other" else kind), f"cpu thread {op.get('tid')}"


def _kind(name: str) -> str:
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), "unknown")


def _dtype(name: object) -> str | None:
    return _DTYPES.get(str(name).removeprefix("c10::").lower()) if name is not None else None


def _whole(value: object) -> int | None:
    if isinstance(value, str) and value.isdecimal():
        value = int(value) if len(value) < 20 else None
    return int(value) if isinstance(value, (int, float)) and 0 <= value < _HUGE else None


def _is_shape(dims: object) -> TypeGuard[list[int]]:
    return isinstance(dims, list) and all(isinstance(n, int) and 0 <= n < _HUGE for n in dims)


def _product(op: Event) -> tuple[int, int, int, int, str] | None:
    """(batch, m, n, k, dtype) of a matrix product whose shapes were recorded."""
    dims, types = _args(op).get("Input Dims"), _args(op).get("Input type")
    if not isinstance(dims, list) or not isinstance(types, list):
        return None
    first = 1 if op["name"] in ("aten::addmm", "aten::baddbmm") else 0
    a, b = (*dims[first : first + 2], None, None)[:2]
    dtype = _dtype(types[first]) if len(types) > first else None
    if not (_is_shape(a) and _is_shape(b) and len(a) == len(b) >= 2 and a[-1] == b[-2] and dtype):
        return None
    return prod(a[:-2]), a[-2], b[-1], a[-1], dtype
