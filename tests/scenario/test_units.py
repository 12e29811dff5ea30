"""Numbers as people write them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim import units
from zsim.errors import InputError


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("450 GB/s", "bandwidth", 450e9),
        ("25 GiB/s", "bandwidth", 25 * 2**30),
        ("400 Gb/s", "bandwidth", 50e9),  # bits
        ("400Gbps", "bandwidth", 50e9),
        ("80 GiB", "size", 80 * 2**30),
        ("80 GB", "size", 80e9),
        ("512 MiB", "size", 2**29),
        ("1_000 B", "size", 1000),
        ("5 us", "time", 5e-6),
        ("5 µs", "time", 5e-6),
        ("1.5ms", "time", 1.5e-3),
        ("8B", "count", 8e9),
        ("500M", "count", 5e8),
        ("8e9", "count", 8e9),
        ("5e8", "count", 5e8),
        ("4k", "count", 4000),
        (8_000_000_000, "count", 8e9),
        ("989 TFLOP/s", "rate", 989e12),
        (" 2 s ", "time", 2.0),
    ],
)
def test_parses(text: object, kind: str, value: float) -> None:
    assert units.parse(text, kind) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("8 GB", "count", "unit 'GB'"),
        ("80", "nothing", None),
        ("GB", "size", "is not a size"),
        ("12 parsecs", "size", "unit 'parsecs'"),
        ("80 gb", "size", "unit 'gb'"),
        (float("nan"), "count", "finite"),
        (float("inf"), "size", "finite"),
        (True, "count", "is not a count"),
        (None, "size", "is not a size"),
        ([1], "size", "is not a size"),
        ("1.5", "whole", "whole"),
    ],
)
def test_refuses(text: object, kind: str, says: str | None) -> None:
    if says is None:
        with pytest.raises(KeyError):
            units.parse(text, kind)
        return
    with pytest.raises(InputError, match=says) as refused:
        units.parse_count(text) if kind == "whole" else units.parse(text, kind)
    assert refused.value.accepted


@given(st.floats(min_value=1e3, max_value=1e15))
def test_sizes_survive_formatting(size: float) -> None:
    """Three digits at least remain."""
    assert units.parse(units.format_gb(size), "size") == pytest.approx(size, rel=6e-3)


@pytest.mark.parametrize(
    ("size", "text"), [(128e9, "128 GB"), (44e9, "44 GB"), (1234e9, "1234 GB"), (0.5e9, "0.5 GB"), (0, "0 GB")]
)
def test_formats_gb(size: float, text: str) -> None:
    assert units.format_gb(size) == text


def test_formats_counts() -> None:
    assert [units.format_count(number) for number in (8.03e9, 124e6, 512, 0)] == ["8.03B", "124M", "512", "0"]
    assert not math.isnan(units.parse(units.format_count(7_615_616_512), "count"))
