"""Constants from measured points: least squares of relative errors, with 95 % confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, sqrt

import numpy as np

_Z = 1.96
TILES = (1, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A constant with its 95 % interval and the number of points behind it."""

    value: float
    low: float
    high: float
    points: int

    def scaled(self, factor: float) -> Estimate:
        low, high = sorted((self.low * factor, self.high * factor))
        return Estimate(self.value * factor, low, high, self.points)

    def inverse(self, numerator: float = 1.0) -> Estimate:
        """numerator / this."""
        return Estimate(
            numerator / self.value if self.value else inf,
            numerator / self.high if self.high > 0 else 0.0,
            numerator / self.low if self.low > 0 else inf,
            self.points,
        )


@dataclass(frozen=True, slots=True)
class Line:
    """seconds = latency + slope x size. `error`: root mean square of the relative errors."""

    latency: Estimate
    slope: Estimate
    error: float


def mean(values: Sequence[float]) -> Estimate:
    """The geometric mean: rates and times err by factors. One value alone has no interval: 0 to infinity."""
    logs = np.log(np.asarray(values, float))
    middle = float(logs.mean())
    if len(logs) == 1:
        return Estimate(float(np.exp(middle)), 0.0, inf, 1)
    half = _Z * float(logs.std(ddof=1)) / sqrt(len(logs))
    return Estimate(float(np.exp(middle)), float(np.exp(middle - half)), float(np.exp(middle + half)), len(logs))


def non_negative(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[list[Estimate], float]:
    """Coefficients >= 0 of `columns` that make `seconds`, each point weighed by 1 / its seconds; and the rms error."""
    y = np.asarray(seconds, float)
    a = np.asarray(columns, float).T / y[:, None]
    # Bytes beside ones would leave nothing of the smaller one within the precision of a pseudo-inverse.
    scale = np.linalg.norm(a, axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    a = a / scale
    active = list(range(a.shape[1]))
    while True:
        solved, *_ = np.linalg.lstsq(a[:, active], np.ones(len(y)), rcond=None)
        negative = [index for index, value in zip(active, solved, strict=True) if value < 0]
        if not negative:
            break
        active.remove(negative[0])
    residual = a[:, active] @ solved - 1.0
    freedom = max(1, len(y) - len(active))
    covariance = np.linalg.pinv(a[:, active].T @ a[:, active]) * float(residual @ residual) / freedom
    found = [Estimate(0.0, 0.0, 0.0, len(y))] * a.shape[1]
    for place, (index, value) in enumerate(zip(active, solved, strict=True)):
        middle = float(value / scale[index])
        half = _Z * sqrt(max(0.0, float(covariance[place, place]))) / float(scale[index])
        found[index] = Estimate(middle, max(0.0, middle - half), middle + half, len(y))
    return found, sqrt(float(residual @ residual) / len(y))


def line(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """Latency and seconds per unit of size; at least two sizes are needed."""
    (latency, slope), error = non_negative([[1.0] * len(sizes), list(sizes)], seconds)
    return Line(latency, slope, error)


def regimes(sizes: Sequence[float], seconds: Sequence[float]) -> list[tuple[float, Line]]:
    """(largest size, line) of one range of sizes, or of two where protocols or caches change: only if a second line
    halves an error that is over 5 %."""
    points = sorted(zip(sizes, seconds, strict=True))
    x, y = [point[0] for point in points], [point[1] for point in points]
    whole = line(x, y)
    borders = [n for n in range(3, len(x) - 2) if x[n] > x[n - 1]]
    if whole.error < 0.05 or not borders:
        return [(x[-1], whole)]

    def cut(border: int) -> tuple[float, Line, Line]:
        below, above = line(x[:border], y[:border]), line(x[border:], y[border:])
        squares = border * below.error**2 + (len(x) - border) * above.error**2
        return sqrt(squares / len(x)), below, above

    best = min(borders, key=lambda border: cut(border)[0])
    error, below, above = cut(best)
    if error > whole.error / 2 or not above.slope.value:
        return [(x[-1], whole)]
    return [(x[best - 1], below), (x[-1], above)]


def gemm(shapes: Sequence[tuple[int, int, int, int]], seconds: Sequence[float], peak: float) -> tuple[int, Line]:
    """The tile, and a line over it: slope = 1 / efficiency, latency = depth / efficiency (see cost.gemm).

    `shapes`: (batch, m, n, k). The tile is the one of TILES with the least error.
    """

    def solved(tile: int) -> Line:
        areas = [ceil(m / tile) * ceil(n / tile) * batch * 2.0 * tile**2 / peak for batch, m, n, _ in shapes]
        deep = [area * shape[3] for area, shape in zip(areas, shapes, strict=True)]
        (depth, inverse), error = non_negative([areas, deep], seconds)
        return Line(depth, inverse, error)

    fits = {tile: solved(tile) for tile in TILES}
    tile = min(fits, key=lambda tile: fits[tile].error)
    return tile, fits[tile]
