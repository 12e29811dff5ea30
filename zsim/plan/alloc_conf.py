"""PYTORCH_ALLOC_CONF, also written PYTORCH_CUDA_ALLOC_CONF: "expandable_segments:True,max_split_size_mb:512".

Read from torch 2.13: c10/core/AllocatorConfig.h and c10/cuda/CUDAAllocatorConfig.h. libc10's own parser accepts and
refuses the same values (tests/plan/test_alloc_conf.py).
"""

from __future__ import annotations

import re

from zsim.document import nearest
from zsim.errors import InputError, NotModeled

INTERVALS = 16  # of roundup_power2_divisions: requests below 2 MiB, below 4 MiB, ... from 32 GiB on
_NO_EFFECT = (
    "release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "graph_capture_record_stream_reuse",
    "throw_on_cudamalloc_oom", "pinned_use_background_threads", "pinned_num_register_threads",
)  # fmt: skip
_NOT_MODELED = {
    "large_segment_size_mb": "segments of another size than 20 MiB",
    "max_non_split_rounding_mb": "another limit on what an unsplit block may waste than 20 MiB",
    "pinned_use_cuda_host_register": "pinned memory by cudaHostRegister",
    "pinned_use_hip_host_register": "pinned memory by hipHostRegister",
    "pinned_reserve_segment_size_mb": "a reserved segment of pinned memory",
    "pinned_max_round_threshold_mb": "pinned memory that is not rounded to powers of two",
    "pinned_max_cached_size_mb": "pinned memory that is not cached",
    "pinned_free_catch_all": "errors while pinned memory is freed",
}
_MODELED = (
    "expandable_segments", "max_split_size_mb", "garbage_collection_threshold", "per_process_memory_fraction",
    "roundup_power2_divisions",
)  # fmt: skip

Value = bool | int | float | str


def parse(text: str) -> tuple[dict[str, Value], list[str]]:
    """The settings in `text` that a scenario has fields for, as they stand there, and notes on those without effect.

    Raises InputError for what torch refuses, NotModeled for what it takes and zsim has not.
    """
    found: dict[str, Value] = {}
    notes = []
    for item in re.split(r",(?![^\[]*\])", re.sub(r"\s", "", text)):
        key, colon, value = item.partition(":")
        if not item:
            continue
        if not colon or not value:
            raise InputError(f"{item!r} is not key:value", accepted="expandable_segments:True,max_split_size_mb:512")
        if key == "backend" and value != "native":
            raise NotModeled(f"the allocator {value}", accepted="backend:native")
        if key in _NOT_MODELED:
            raise NotModeled(f"{key}: {_NOT_MODELED[key]}")
        if key in _NO_EFFECT or key == "backend":
            notes.append(f"{key} has no effect on a simulation")
        elif key in _MODELED:
            found[key] = _value(key, value)
        else:
            close = nearest(key, (*_MODELED, *_NO_EFFECT, *_NOT_MODELED))
            hint = f"; did you mean {close}?" if close else ""
            raise InputError(f"torch's allocator has no setting {key}{hint}", accepted=", ".join(_MODELED))
    return found, notes


def _value(key: str, text: str) -> Value:
    if key == "roundup_power2_divisions":
        return text
    if key == "expandable_segments":
        if text not in ("True", "False"):
            raise InputError(f"{key}:{text}", accepted=f"{key}:True or {key}:False")
        return text == "True"
    try:
        return int(text) if key == "max_split_size_mb" else float(text)
    except ValueError:
        raise InputError(f"{key}:{text}: {text!r} is not a number", accepted=f"{key}:a number") from None


def divisions(text: str) -> tuple[int, ...]:
    """`roundup_power2_divisions` per interval: "4", or by megabytes "[256:1,512:2,1024:4,>:8]". Raises InputError.

    As AllocatorConfig.cpp, parseRoundUpPower2Divisions: what stands first holds for smaller requests as well, `>` for
    all beyond the last, and intervals that nothing is said of have none.
    """
    accepted = "a power of two, or [256:1,512:2,>:8] by megabytes"
    if text.isdecimal():
        if not _power_of_2(int(text)):
            raise InputError(f"{text} is no power of two", accepted=accepted)
        return (int(text),) * INTERVALS
    if not re.fullmatch(r"\[((\d+|>):\d+)(,(\d+|>):\d+)*\]", text):
        raise InputError(f"{text!r} is not a list of megabytes:divisions", accepted=accepted)
    each, last = [0] * INTERVALS, 0
    for number, item in enumerate(text[1:-1].split(",")):
        start, _, count = item.partition(":")
        if int(count) and not _power_of_2(int(count)):
            raise InputError(f"{item}: {count} is no power of two", accepted=accepted)
        if start == ">":
            each[last + 1 :] = [int(count)] * (INTERVALS - last - 1)
            continue
        if not _power_of_2(int(start)):
            raise InputError(f"{item}: {start} is no power of two", accepted=accepted)
        last = min(int(start).bit_length() - 1, INTERVALS - 1)
        if number == 0:
            each[:last] = [int(count)] * last
        each[last] = int(count)
    return tuple(each)


def _power_of_2(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
