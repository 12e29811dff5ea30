"""Whatever is done to a trace, a capture or a calibrated profile: it is read, or refused by one InputError."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zsim.cost.profile import load_profile
from zsim.errors import InputError
from zsim.validation.capture_read import runs
from zsim.validation.fit_profile import calibrate
from zsim.validation.kineto import read

ROOT = Path(__file__).parents[2]
GLOO = ROOT / "validation" / "measured" / "gloo_cpu"
HEAD = {"deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}], "distributedInfo": {"rank": 1}}
ARGS = {
    "Collective name": "_allgather_base", "In msg nelems": 8, "Out msg nelems": 64, "Group size": 8,
    "dtype": "BFloat16", "stream": 20, "correlation": 5, "Input Dims": [[4, 8], [8, 2]], "Input type": ["float"],
}  # fmt: skip
EVENTS: list[dict[str, Any]] = [
    {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": 10.0 * at, "dur": 5.0, "args": ARGS}
    for at, (cat, name, tid) in enumerate(
        [
            ("user_annotation", "ProfilerStep#3", 1), ("cpu_op", "aten::mm", 1), ("cuda_runtime", "cudaLaunch", 1),
            ("kernel", "ncclDevKernel_AllGather_RING_LL(args)", 20), ("kernel", "ampere_sgemm_128x64_tn", 7),
            ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 7), ("cpu_op", "record_param_comms", 1),
            ("user_annotation", "gloo:all_reduce", 2),
        ]
    )
]  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
FUZZ = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


def read_or_refused(question: Callable[[], object], *names: str) -> None:
    """No other exception; a refusal names the file, or what it lacks."""
    refused = ""
    try:
        question()
    except InputError as error:
        refused = str(error)
    assert not refused or any(name in refused for name in names), refused


@given(data=st.data())
@FUZZ
def test_traces_with_foreign_values(tmp_path: Path, data: st.DataObject) -> None:
    events = json.loads(json.dumps(EVENTS))
    document: dict[str, Any] = {**HEAD, "traceEvents": events}
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from([document, *events, *(event["args"] for event in events)]))
        key = data.draw(st.sampled_from(sorted(place)))
        place[key] = data.draw(JSON)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document))
    read_or_refused(lambda: read(path), "trace.json")
    read_or_refused(lambda: calibrate([path]), "trace.json", "device", "gpu")


@given(cut=st.integers(0, 2000), length=st.integers(0, 60), noise=st.binary(max_size=6), packed=st.booleans())
@FUZZ
def test_traces_cut_and_overwritten(tmp_path: Path, cut: int, length: int, noise: bytes, packed: bool) -> None:
    raw = json.dumps({**HEAD, "traceEvents": EVENTS}).encode()
    raw = gzip.compress(raw, mtime=0) if packed else raw
    cut %= len(raw)
    path = tmp_path / "trace.json.gz"
    path.write_bytes(raw[:cut] + noise + (raw[cut + length :] if length else b""))
    read_or_refused(lambda: read(path), "trace.json.gz")


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("capture") / "damaged"
    shutil.copytree(GLOO, folder, ignore=shutil.ignore_patterns("trace_*"))
    return folder


@pytest.mark.parametrize("name", ["machine.json", "microbench.csv", "steps.csv", "topology.yaml"])
@given(data=st.data())
@settings(FUZZ, max_examples=12)
def test_captures_cut_and_overwritten(capture: Path, name: str, data: st.DataObject) -> None:
    raw = (GLOO / name).read_bytes()
    cut, length = data.draw(st.integers(0, len(raw))), data.draw(st.integers(0, 40))
    noise = data.draw(st.sampled_from([b"", b"nan", b",", b"-1", b"1e400", b"\n", b"\xff\x00", b"[", b"x"]))
    (capture / name).write_bytes(raw[:cut] + noise + raw[cut + length :])
    try:
        read_or_refused(lambda: calibrate([capture]), "damaged", name)
        read_or_refused(lambda: runs(capture), "damaged", name)
    finally:
        (capture / name).write_bytes(raw)


@pytest.fixture(scope="module")
def fitted() -> dict[str, Any]:
    return calibrate([GLOO]).document()


@given(data=st.data())
@settings(FUZZ, max_examples=25)
def test_profiles_with_foreign_values(fitted: dict[str, Any], tmp_path: Path, data: st.DataObject) -> None:
    changed = json.loads(json.dumps(fitted))
    place = changed
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else list(range(len(place)))))
        inner = place[key]
        if not isinstance(inner, (dict, list)) or not inner or data.draw(st.booleans()):
            place[key] = data.draw(JSON)
            break
        place = inner
    path = tmp_path / "profile.yaml"
    path.write_text(yaml.safe_dump(changed))
    read_or_refused(lambda: load_profile("CPU core", str(path)), "profile.yaml", "software stack")
