"""The whole path, once: read -> lower -> run -> measure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from zsim.engine.simulator import uncollected
from zsim.errors import InputError
from zsim.result.measure import own_profile, timed
from zsim.scenario import Scenario, Setup, load

if TYPE_CHECKING:
    from zsim.result.measure import Result


def load_scenario(path: str | PathLike[str], overrides: Sequence[str] = ()) -> Scenario:
    """Read a scenario file. `overrides` are "field.path=value" strings. Raises InputError on bad input."""
    return load(Path(path), overrides)


def simulate(
    scenario: str | PathLike[str] | Scenario | Setup, overrides: Sequence[str] = (), *, fold: bool = True
) -> Result:
    """Simulate training steps of `scenario` and measure the steady one.

    `scenario` is a YAML path, a loaded Scenario, or an already resolved Setup. `fold=False` simulates every
    rank instead of one per class of equal ranks, and every micro-step instead of a few where the others repeat them
    (same result, slower).
    A run that does not fit in memory is a Result with `fits == False`, never an exception.
    Raises InputError (bad input) or NotModeled, and TypeError for anything else than these three.
    """
    begun = time.perf_counter()
    if isinstance(scenario, (str, PathLike)):
        scenario = load_scenario(scenario, overrides)
    elif not isinstance(scenario, (Scenario, Setup)):
        taken = "the path of a scenario file, a Scenario that load_scenario read, or a Setup"
        raise TypeError(f"simulate takes {taken}, not {type(scenario).__name__}")
    elif overrides:
        raise TypeError("overrides apply to a scenario file; change a loaded Scenario directly")
    setup = scenario if isinstance(scenario, Setup) else scenario.resolve()

    try:
        with uncollected():
            return timed(setup, own_profile(setup), fold=fold, begun=begun)
    except InputError as error:
        if error.file is None and setup.sources:
            error.file = setup.sources[0]
        raise
