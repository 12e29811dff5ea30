"""What zsim understood from somebody's configuration file, in the fields of a scenario."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from zsim.plan.document import Document, Path_, Place


@dataclass
class Reading:
    """`fields` holds scenario fields by path, ("zero", "stage"); `places` where each was said.

    `notes` say how a value came about and which keys have no effect on a simulation; `not_modeled` what has an effect
    in reality that is not simulated; `missing` what a scenario needs and this file does not say.
    """

    kind: str
    document: Document
    fields: dict[Path_, Any] = field(default_factory=dict)
    places: dict[Path_, Place] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    not_modeled: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def set(self, to: Path_, value: Any, path: Path_) -> None:
        """Scenario field `to` has `value`, as the key `path` of the file says."""
        self.fields[to] = value
        self.places[to] = self.document.place(path)

    def lacks(self, wanted: Iterable[tuple[Path_, str]]) -> None:
        """List each scenario field that has no value, as `what` it is."""
        self.missing += [what for to, what in wanted if to not in self.fields]

    def nested(self) -> dict[str, Any]:
        """`fields` as a scenario file nests them."""
        tree: dict[str, Any] = {}
        for path, value in self.fields.items():
            inner = tree
            for part in path[:-1]:
                inner = inner.setdefault(str(part), {})
            inner[str(path[-1])] = value
        return tree
