"""Kernels that only move bytes: norms, activations, rotary, residuals, casts, optimizer."""

from __future__ import annotations

from collections.abc import Mapping


def seconds(label: str, nbytes: float, bandwidth: float, efficiency: Mapping[str, float]) -> float:
    """`bandwidth` is the device memory's nominal bytes/s; `efficiency` its usable share by kind of kernel."""
    return nbytes / (bandwidth * efficiency.get(label, efficiency["default"]))
