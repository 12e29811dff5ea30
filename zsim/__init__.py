"""zsim: a discrete-event simulator of ZeRO and FSDP training.

`simulate("scenario.yaml") -> Result` is the whole tool; `load_scenario` reads a file to look at or change first.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["InputError", "Result", "Scenario", "load_scenario", "simulate"]

if TYPE_CHECKING:
    from zsim.api import load_scenario, simulate
    from zsim.errors import InputError
    from zsim.result.spec import Result
    from zsim.scenario import Scenario

_HOMES = {
    "InputError": "zsim.errors",
    "Result": "zsim.result.spec",
    "Scenario": "zsim.scenario",
    "load_scenario": "zsim.api",
    "simulate": "zsim.api",
}


def __getattr__(name: str) -> Any:
    """Imports on first use: `import zsim` alone costs nothing, and the rooms below may import the version."""
    if name not in _HOMES:
        raise AttributeError(f"module 'zsim' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """What can be had from here, before its first use too: for those who complete names."""
    return sorted([*globals(), *_HOMES])
