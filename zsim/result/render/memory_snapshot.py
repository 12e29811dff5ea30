"""memory.pickle: what `torch.cuda.memory._snapshot()` would return, for torch.cuda._memory_viz and its web page.

Everything from initialization to the end of the steady step, as the caching allocator serves it: with the memory that
the device has, so that cached segments go back to the driver where the run needs that, and as if there were no limit
where the run does not fit. Where a real snapshot has Python stacks, these have the category, the tensor and the op it
is for.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zsim.engine.allocator import LARGE_SEGMENT, SMALL_SEGMENT, CachingAllocator, replay
from zsim.engine.blocks import Block
from zsim.engine.timeline import MemoryEvent
from zsim.program.ops import COMPUTE, Launch, Op, Program
from zsim.result.critical_path import RankView
from zsim.result.memory import served
from zsim.result.render.chrome_trace import STREAMS
from zsim.result.spec import Result

BASE_ADDRESS = 0x7F0000000000  # where CUDA's addresses tend to lie
DEFAULT_STREAM = 0  # as the allocator numbers it; profiles call it 7
Entry = dict[str, Any]


def write(result: Result, path: Path) -> None:
    with path.open("wb") as file:
        pickle.dump(snapshot(result), file)


def snapshot(result: Result) -> dict[str, Any]:
    """The snapshot of the fullest GPU, as device 0."""
    view = RankView(result.program, result.timeline, result.gpu.peak_rank)
    recorder = served(result, _Recorder)
    recorder.ops = _ops(result.program)
    replay((event for event in view.ledgers["gpu"] if event.step <= view.steady.step), allocator=recorder)
    return {
        "segments": [_segment(recorder, *segment) for segment in _segments(recorder)],
        "device_traces": [recorder.trace],
        "allocator_settings": {"expandable_segments": recorder.settings.expandable_segments},
        "external_annotations": [],
    }


@dataclass
class _Recorder(CachingAllocator):
    """Writes down every action of the allocator. Addresses are its own, offset."""

    ops: list[dict[int, Op]] = field(default_factory=list)  # by step, by id
    trace: list[Entry] = field(default_factory=list)
    # address -> size, stream, small; of expandable segments, their pages
    segments: dict[int, tuple[int, str, bool]] = field(default_factory=dict)
    used: dict[int, Entry] = field(default_factory=dict)  # address -> block entry
    _frames: dict[tuple[Any, ...], list[Entry]] = field(default_factory=dict)
    _stream: str = ""

    def malloc(self, nbytes: int, stream: str) -> Block:
        self._stream = stream
        block = super().malloc(nbytes, stream)
        address, frames = BASE_ADDRESS + block.address, self._stack()
        self.used[address] = {
            "address": address,
            "size": block.size,
            "requested_size": nbytes,
            "state": "active_allocated",
            "frames": frames,
        }
        self._log("alloc", address, nbytes, stream, frames)
        return block

    def free(self, block: Block) -> None:
        entry = self.used.pop(BASE_ADDRESS + block.address)
        if entry["state"] == "active_allocated":
            self._freed("free_requested", entry)
        self._freed("free_completed", entry)
        super().free(block)

    def free_later(self, key: str, blocks: list[Block]) -> None:
        for block in blocks:
            entry = self.used[BASE_ADDRESS + block.address]
            entry["state"] = "active_pending_free"
            self._freed("free_requested", entry)
        super().free_later(key, blocks)

    def take(self, address: int, size: int, small: bool) -> bool:
        if not super().take(address, size, small):
            return False
        address += BASE_ADDRESS
        action, unit = "segment_alloc", size
        if self.settings.expandable_segments:
            action, unit = "segment_map", SMALL_SEGMENT if small else LARGE_SEGMENT
        for page in range(address, address + size, unit):
            self.segments[page] = unit, self._stream, small
        self._log(action, address, size, self._stream, [])
        return True

    def give_back(self, address: int, size: int) -> None:
        super().give_back(address, size)
        address += BASE_ADDRESS
        stream, given = self.segments[address][1], 0
        while given < size:
            given += self.segments.pop(address + given)[0]
        action = "segment_unmap" if self.settings.expandable_segments else "segment_free"
        self._log(action, address, size, stream, [])

    def _freed(self, action: str, entry: Entry) -> None:
        self._log(action, entry["address"], entry["requested_size"], "", entry["frames"])

    def _log(self, action: str, address: int, size: int, stream: str, frames: list[Entry]) -> None:
        assert self.event is not None
        self.trace.append(
            {
                "action": action,
                "addr": address,
                "size": size,
                "stream": _stream(stream),
                "time_us": round(1e6 * self.event.time_s),
                "frames": frames,
            }
        )

    def _stack(self) -> list[Entry]:
        event = self.event
        assert event is not None
        key = event.step, event.op, event.category, event.key
        known = self._frames.get(key)
        if known is None:
            known = self._frames[key] = _frames(event, self.ops)
        return known


def _frames(event: MemoryEvent, ops: list[dict[int, Op]]) -> list[Entry]:
    """Innermost first, as torch writes them."""
    where = "initialization" if event.step == 0 else f"step {event.step}"
    frames = [_frame(event.category, event.key)]
    if event.step and event.op is not None:
        op = ops[min(event.step, len(ops)) - 1][event.op]
        frames.append(_frame(op.module or op.lane, f"{op.phase}: {op.label}"))
    return [*frames, _frame("zsim", where)]


def _ops(program: Program) -> list[dict[int, Op]]:
    known: dict[int, dict[int, Op]] = {}  # equal steps are the same object
    for step in program.steps:
        if id(step) not in known:
            known[id(step)] = {i.op.id: i.op for i in step if isinstance(i, Launch)}
    return [known[id(step)] for step in program.steps]


def _stream(lane: str) -> int:
    return DEFAULT_STREAM if lane in ("", COMPUTE) else STREAMS.get(lane, DEFAULT_STREAM)


def _frame(filename: str, name: str) -> Entry:
    return {"filename": filename, "line": 0, "name": name}


def _segments(recorder: _Recorder) -> list[tuple[int, int, str, bool]]:
    """Address, size, stream and whether small, by address; pages in a row are one segment, as torch reports them."""
    found: list[tuple[int, int, str, bool]] = []
    for address in sorted(recorder.segments):
        size, stream, small = recorder.segments[address]
        start, length, *its = found[-1] if found else (0, 0)
        if recorder.settings.expandable_segments and start + length == address and its == [stream, small]:
            found[-1] = (start, length + size, stream, small)
        else:
            found.append((address, size, stream, small))
    return found


def _segment(recorder: _Recorder, address: int, size: int, stream: str, small: bool) -> Entry:
    blocks: list[Entry] = []
    at = address
    for start in sorted(start for start in recorder.used if address <= start < address + size):
        if start > at:
            blocks.append(_inactive(at, start - at))
        blocks.append(recorder.used[start])
        at = start + recorder.used[start]["size"]
    if at < address + size:
        blocks.append(_inactive(at, address + size - at))
    active = [block for block in blocks if block["state"] != "inactive"]
    allocated = [block for block in active if block["state"] == "active_allocated"]
    return {
        "device": 0,
        "address": address,
        "total_size": size,
        "stream": _stream(stream),
        "segment_type": "small" if small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": recorder.settings.expandable_segments,
        "allocated_size": sum(block["size"] for block in allocated),
        "active_size": sum(block["size"] for block in active),
        "requested_size": sum(block["requested_size"] for block in allocated),
        "frames": [],
        "blocks": blocks,
    }


def _inactive(address: int, size: int) -> Entry:
    return {"address": address, "size": size, "requested_size": 0, "state": "inactive", "frames": []}
