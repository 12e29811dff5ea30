"""Numbers as people write them, to SI and back: "450 GB/s", "80 GiB", "5 us", "8B", 5e8.

Decimal prefixes are powers of 1000 and binary ones powers of 1024: GB = 1e9 bytes, GiB = 2**30 bytes.
A small "b" is a bit: "400 Gb/s" and "400 Gbps" are 50e9 bytes/s.
"""

from __future__ import annotations

import math
import re

from zsim.errors import InputError

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_PREFIXES = _DECIMAL | _BINARY
_NUMBER = r"[+-]?(?:\d[\d_,]*\.?[\d_]*|\.\d+)(?:[eE][+-]?\d+)?"
_QUANTITY = re.compile(rf"\s*({_NUMBER})\s*(.*?)\s*")

BYTES = {f"{prefix}B": scale for prefix, scale in _PREFIXES.items()} | {"bytes": 1.0, "byte": 1.0, "": 1.0}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0, "": 1.0}
COUNT = {"": 1.0, "k": 1e3, "K": 1e3, "Ki": 2.0**10, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
FLOPS = {f"{prefix}FLOP/s": scale for prefix, scale in _DECIMAL.items()}
FLOPS |= {f"{prefix}FLOPS": scale for prefix, scale in _DECIMAL.items()} | {"": 1.0}
BANDWIDTH = {f"{prefix}B/s": scale for prefix, scale in _PREFIXES.items()}
BANDWIDTH |= {f"{prefix}b/s": scale / 8 for prefix, scale in _PREFIXES.items()}
BANDWIDTH |= {f"{prefix}bps": scale / 8 for prefix, scale in _DECIMAL.items()} | {"": 1.0}

# What an error tells the user to write.
_ACCEPTED = {
    "size": (BYTES, 'bytes: a number or "80 GB" (1e9), "80 GiB" (2**30), "512 MiB"'),
    "bandwidth": (BANDWIDTH, 'bytes per second: a number or "450 GB/s", "25 GiB/s", "400 Gb/s" (bits)'),
    "time": (SECONDS, 'seconds: a number or "5 us", "1.5 ms", "2 s"'),
    "count": (COUNT, 'a number such as 5e8, "500M", "8B" (8e9)'),
    "rate": (FLOPS, 'FLOP per second: a number or "989 TFLOP/s"'),
}


def parse(value: object, kind: str) -> float:
    """`value` (a number or text with a unit) as an SI number.

    `kind` is "size" (bytes), "bandwidth" (bytes/s), "time" (s), "count" or "rate" (FLOP/s). A number without a unit is
    taken as SI. Raises InputError for another unit, no number, NaN or infinity; negative numbers pass.
    """
    units, accepted = _ACCEPTED[kind]
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise InputError(f"{value!r} is not a {kind}", accepted=accepted)
    if isinstance(value, str):
        match = _QUANTITY.fullmatch(value)
        if match is None:
            raise InputError(f"{value!r} is not a {kind}", accepted=accepted)
        digits, unit = match.groups()
        if unit not in units:
            raise InputError(f"unit {unit!r} of {value!r} is not one of a {kind}", accepted=accepted)
        value = float(digits.replace("_", "").replace(",", "")) * units[unit]
    try:
        number = float(value)
    except OverflowError:  # an integer of more than 308 digits
        number = math.inf
    if not math.isfinite(number):
        raise InputError(f"{number} is not a finite {kind}", accepted=accepted)
    return number


def parse_size(value: object) -> int:
    """Bytes, rounded to whole ones."""
    return round(parse(value, "size"))


def parse_count(value: object) -> int:
    """A whole number of things: 5e8, "500M", "8B". Raises InputError where it is not whole."""
    number = parse(value, "count")
    if number != int(number):
        raise InputError(f"{value!r} is not a whole number", accepted=_ACCEPTED["count"][1])
    return int(number)


def format_gb(size: float) -> str:
    """Bytes in GB (1e9), three significant digits or more: "128 GB", "44.2 GB", "0.512 GB"."""
    return f"{_digits(size / 1e9)} GB"


def format_count(number: float) -> str:
    """ "8.03B", "124M", "512"."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= scale:
            return f"{_digits(number / scale)}{unit}"
    return f"{number:g}"


def _digits(value: float) -> str:
    """Three significant digits, without dropping any before the point; "44", not "44.0"."""
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
