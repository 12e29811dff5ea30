"""The keys of a DeepSpeed configuration, each by itself: known to which version, of which kind, with which effect."""

from __future__ import annotations

from typing import Any

from zsim.document import Path_, dotted, nearest
from zsim.errors import NotModeled
from zsim.plan.deepspeed_keys import (
    ALIASES,
    GONE_IN_0_19_7,
    LISTED,
    MODELS,
    NONE,
    NULLABLE,
    OLDER,
    REFUSED,
    REMOVED,
    SECTIONS,
    STRICT,
    USED,
    Key,
)
from zsim.plan.reading import Reading
from zsim.plan.values import KINDS, coerce, refuse_unfilled, shown

AUTO = "auto"
OPTIMIZERS = {"adam": "adam", "adamw": "adamw", "lion": "lion", "sgd": "sgd", "muon": "muon"}
_PLAIN_BEFORE_0_17 = ("bf16", "bfloat16", "fp16")  # no pydantic models yet
_ONE_BIT = {"onebitadam", "onebitlamb", "zerooneadam"}


class Keys:
    """One walk over the keys: those with an effect end in `values`, the others in the lists of the reading."""

    def __init__(self, reading: Reading, version: tuple[int, ...]) -> None:
        self.reading, self.document, self.version = reading, reading.document, version
        self.values: dict[str, Any] = {}  # used keys by dotted path, checked; "auto" stays "auto"
        self.without_effect: dict[str, list[str]] = {}

    def walk(self, section: str, path: Path_, data: dict[str, Any]) -> None:
        keys = SECTIONS[section]
        for name, value in data.items():
            here = (*path, name)
            canonical = ALIASES.get(name, name) if section == "zero_optimization" else name
            key = keys.get(canonical)
            full = f"{section}.{canonical}" if section else canonical
            if full in REMOVED:
                self.removed(here, full, value)
            elif key is None:
                self.unknown(section, here, name, keys)
            else:
                if canonical != name and canonical in data:
                    raise self.document.error(here, f"stands here twice, as {name} and as {canonical}")
                self.known(section, here, full, key, value)

    def known(self, section: str, path: Path_, full: str, key: Key, value: Any) -> None:
        if value is None and section in MODELS and full not in NULLABLE and not self.lenient(section):
            accepted = f"{KINDS[key.kind]}, or leave it out"
            raise self.document.error(path, f"null is not {KINDS[key.kind]}, and DeepSpeed refuses it", accepted)
        if key.kind is dict:
            if value is None:
                return None
            if full == "zero_optimization" and isinstance(value, bool):
                return self.old_zero(path, value)
            if not isinstance(value, dict):
                raise self.document.error(path, f"{shown(value)} is not a section", accepted="{ ... }")
            if full == "optimizer":
                self.refuse_optimizer(value)
            if full == "expert_parallel" and value.get("enabled") is not True:
                self.without_effect.setdefault("expert parallelism is off", []).append(full)
                return None
            if full in SECTIONS:
                self.values[full] = value
                return self.walk(full, path, value)
        else:
            value = self.checked(path, full, key, value)
        if key.effect == USED:
            self.values[full] = value
        elif key.effect == NONE:
            self.without_effect.setdefault(key.why, []).append(full)
        elif value in (key.default, AUTO, None):
            return None
        elif key.effect == LISTED:
            self.reading.not_modeled.append(f"{full}: {key.why}")
        elif key.effect == REFUSED and not (full == "tensor_parallel.autotp_size" and value == 1):
            raise self.document.error(
                path, key.why, None if key.default in (None, {}) else shown(key.default), kind=NotModeled
            )
        return None

    def checked(self, path: Path_, full: str, key: Key, value: Any) -> Any:
        """`value` as pydantic would take it for `key`; "auto" and null pass."""
        if value is None or value == AUTO:
            return value
        if isinstance(value, str) and key.kind is not str:
            refuse_unfilled(self.document, path, value)
            if full.startswith("zero_optimization.leaf_module."):  # one name may stand without brackets
                value = [value]
        if isinstance(value, list) and key.kind is not list:
            raise self.document.error(
                path, f"{value} is a list of values to tune; one is needed", accepted=KINDS[key.kind]
            )
        section = full.rpartition(".")[0]
        if section == "optimizer.params" and key.kind is bool:  # Python's `if`: "torch_impl" is true, and "false" too
            return bool(value)
        try:
            return coerce(value, float if key.kind is int and self.lenient(section) else key.kind)
        except ValueError:
            accepted = KINDS[key.kind]
            if section in _PLAIN_BEFORE_0_17 and key.kind is int and isinstance(value, float):
                accepted += "; any number for a framework.version before 0.17"
            raise self.document.error(path, f"{shown(value)} is not {KINDS[key.kind]}", accepted) from None

    def removed(self, path: Path_, full: str, value: Any) -> None:
        if self.version >= ((0, 19, 7) if full in GONE_IN_0_19_7 else (0, 19, 8)):
            raise self.document.error(
                path,
                f"DeepSpeed has removed {REMOVED[full]} and refuses this key",
                notes=("with an older DeepSpeed: framework: {name: deepspeed, version: 0.18.9}",),
            )
        if full in OLDER:
            self.values[full] = self.checked(path, full, OLDER[full], value)
            return
        off = not value or (isinstance(value, dict) and value.get("enabled") is False) or value == -1
        if not off:
            raise self.document.error(path, REMOVED[full], kind=NotModeled)
        self.without_effect.setdefault("switched off", []).append(full)

    def unknown(self, section: str, path: Path_, name: str, keys: dict[str, Key]) -> None:
        homes = [] if section else [home for home, its in SECTIONS.items() if home and name in its]
        close = homes[0] if homes else nearest(name, [*keys, *(ALIASES if section == "zero_optimization" else ())])
        hint = f"; did you mean {f'{close}.{name}' if homes else close}?" if close else ""
        if section in STRICT and not self.lenient(section):
            old = section in _PLAIN_BEFORE_0_17
            notes = ("DeepSpeed before 0.17 ignored it: framework: {name: deepspeed, version: 0.16.9}",) if old else ()
            raise self.document.error(
                path, f"DeepSpeed does not know this key and refuses it{hint}", close or ", ".join(keys), notes
            )
        if not str(name).startswith("_"):
            self.reading.notes.append(f"DeepSpeed does not know {dotted(path)} and ignores it{hint}")

    def lenient(self, section: str) -> bool:
        return section in _PLAIN_BEFORE_0_17 and self.version < (0, 17)

    def old_zero(self, path: Path_, value: bool) -> None:
        """`"zero_optimization": true`, which DeepSpeed still takes for stage 1."""
        self.values["zero_optimization.stage"] = int(value)
        self.reading.notes.append(f"zero_optimization: {str(value).lower()} is the old way to write stage {int(value)}")

    def refuse_optimizer(self, section: dict[str, Any]) -> None:
        """Before its parameters are looked at, which belong to it alone."""
        name, params = section.get("type"), section.get("params")
        known = "Adam, AdamW, Lion, Muon, SGD"
        if isinstance(name, str) and name.lower() in _ONE_BIT:
            why = f"{name} averages compressed gradients itself, which ZeRO does not support"
            raise self.document.error(("optimizer", "type"), why, known, kind=NotModeled)
        if isinstance(name, str) and name.lower() not in OPTIMIZERS:
            raise self.document.error(("optimizer", "type"), f"optimizer {name}", known, kind=NotModeled)
        if isinstance(params, dict) and "max_grad_norm" in params:
            path = ("optimizer", "params", "max_grad_norm")
            raise self.document.error(
                path, "DeepSpeed refuses it here", accepted="gradient_clipping at the top of the file"
            )
