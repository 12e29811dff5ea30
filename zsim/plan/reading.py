"""What zsim understood from somebody's configuration file, in the fields of a scenario."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from zsim.document import Document, Path_, Place, dotted

NOT_SHARDED = "neither deepspeed nor fsdp: DistributedDataParallel"
LOADED_IN = "the model is loaded in {} and trained without master weights"
FSDP = ("fsdp1", "fsdp2")
NOT_ENABLED = "neither bf16 nor fp16 is enabled: fp32"
ALLOCATOR: Path_ = ("allocator", "conf")
FP32_ASSUMED = "no mixed precision: the model trains in the type it is loaded in; fp32 assumed"


@dataclass
class Reading:
    """`fields` holds scenario fields by path, ("zero", "stage"); `places` where each was said.

    `notes` say how a value came about; `without_effect` which keys do not matter to a simulation, and why;
    `not_read` those of which nothing is known here;
    `not_modeled` what has an effect in reality that is not simulated; `missing` what a scenario needs and this file
    does not say; `ranks` for how many it is written, if it says so; `loaded` the type that the whole model is loaded in
    and trains in, as long as no file asks for mixed precision; `model_name` what the file calls the model.
    """

    kind: str
    document: Document
    fields: dict[Path_, Any] = field(default_factory=dict)
    places: dict[Path_, Place] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    without_effect: list[str] = field(default_factory=list)
    not_read: list[str] = field(default_factory=list)
    not_modeled: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    ranks: int | None = None
    defaults: set[Path_] = field(
        default_factory=set
    )  # fields that are a tool's default; another file may say otherwise
    loaded: str | None = None
    model_name: str = ""
    vision: dict[Path_, Any] = field(default_factory=dict)  # further fields, where the model has a vision tower

    def set(self, to: Path_, value: Any, path: Path_) -> None:
        """Scenario field `to` has `value`, as the key `path` of the file says."""
        self.fields[to] = value
        self.places[to] = self.document.place(path)

    def without_launcher(self) -> None:
        """The run starts otherwise than by the tool's own launcher, or where its variables have no effect."""
        if ALLOCATOR in self.defaults:
            del self.fields[ALLOCATOR]
            self.defaults.discard(ALLOCATOR)
            self.notes = [note for note in self.notes if not note.startswith("allocator: ")]

    def lacks(self, field: str, why: str = "") -> None:
        """A scenario needs `field`, and this file leaves it open; `why` in parentheses."""
        known = [what.split(" ")[0] for what in self.missing]
        if field not in known:
            self.missing.append(f"{field} {why}".strip())
        elif why and field in self.missing:
            self.missing[self.missing.index(field)] = f"{field} {why}"

    def include(self, other: Reading) -> None:
        """Add what another file says. The same field with two values is a contradiction, as the tools treat it."""
        loaded, silent = self.loaded or other.loaded, other if self.loaded else self
        unmixed = ("precision",) in silent.defaults or ("precision",) not in silent.fields
        for to, value in other.fields.items():
            own = self.fields.get(to, value)
            if own != value and to in other.defaults:
                continue
            if own != value and to not in self.defaults and "auto" not in (own, value):
                theirs, ours = (text_of(reading.places.get(to), reading) for reading in (other, self))
                message = f"{dotted(to)} is {value} in {theirs} and {own} in {ours}"
                raise other.document.error((), message, accepted="one of them, or auto in DeepSpeed's")
            if own == "auto" or to not in self.fields or to in self.defaults:
                self.fields[to] = value
                self.places[to] = other.places.get(to, (other.document.file, None))
                (self.defaults.add if to in other.defaults else self.defaults.discard)(to)
        self.vision |= other.vision
        self.notes += other.notes
        if self.fields.get(("framework", "name")) != "ddp":  # one file was silent, the other one names what shards
            for to in [to for to in self.fields if to[0] == "ddp"]:
                del self.fields[to]
            widened = [LOADED_IN.format(dtype) for dtype in ("bf16", "bfloat16", "float16")]
            if loaded and unmixed and self.fields.get(("framework", "name")) in FSDP:
                self.fields[("fsdp", "storage_dtype")] = loaded
                widened.remove(LOADED_IN.format(loaded))
            self.notes = [text for text in self.notes if text not in (NOT_SHARDED, *widened)]
        self.loaded = loaded
        if self.fields.get(("precision",)) != "fp32":
            self.notes = [text for text in self.notes if text not in (FP32_ASSUMED, NOT_ENABLED)]
        self.without_effect += other.without_effect
        self.not_read += other.not_read
        self.not_modeled += other.not_modeled
        self.ranks = self.ranks or other.ranks
        self.model_name = self.model_name or other.model_name
        for what in other.missing:
            self.lacks(*what.partition(" ")[::2])

    def still_missing(self) -> list[str]:
        """What no field says by now."""
        said = {dotted(to) for to in self.fields} | {str(to[0]) for to in self.fields}
        return [what for what in self.missing if what.split(" ")[0] not in said]

    def nested(self) -> dict[str, Any]:
        """`fields` as a scenario file nests them."""
        tree: dict[str, Any] = {}
        for path, value in self.fields.items():
            inner = tree
            for part in path[:-1]:
                inner = inner.setdefault(str(part), {})
            inner[str(path[-1])] = value
        return tree


def text_of(place: Place | None, reading: Reading) -> str:
    """ "ds.json:12"."""
    file, line = place or (reading.document.file, None)
    return f"{file}:{line}" if line else str(file)
