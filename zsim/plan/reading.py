"""What zsim understood from somebody's configuration file, in the fields of a scenario."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from zsim.plan.document import Document, Path_, Place


@dataclass
class Reading:
    """`fields` holds scenario fields by path, ("zero", "stage"); `places` where each was said.

    `notes` say how a value came about; `without_effect` which keys do not matter to a simulation, and why; `not_modeled`
    what has an effect in reality that is not simulated; `missing` what a scenario needs and this file does not say.
    """

    kind: str
    document: Document
    fields: dict[Path_, Any] = field(default_factory=dict)
    places: dict[Path_, Place] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    without_effect: list[str] = field(default_factory=list)
    not_modeled: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def set(self, to: Path_, value: Any, path: Path_) -> None:
        """Scenario field `to` has `value`, as the key `path` of the file says."""
        self.fields[to] = value
        self.places[to] = self.document.place(path)

    def lacks(self, field: str, why: str = "") -> None:
        """A scenario needs `field`, and this file leaves it open."""
        if field not in [name.split(" ")[0] for name in self.missing]:
            self.missing.append(f"{field} ({why})" if why else field)

    def nested(self) -> dict[str, Any]:
        """`fields` as a scenario file nests them."""
        tree: dict[str, Any] = {}
        for path, value in self.fields.items():
            inner = tree
            for part in path[:-1]:
                inner = inner.setdefault(str(part), {})
            inner[str(path[-1])] = value
        return tree
