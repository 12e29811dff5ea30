"""What readers of training recipes (Trainer arguments, axolotl, LLaMA-Factory, accelerate) share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from zsim.document import Path_, nearest
from zsim.errors import InputError, NotModeled
from zsim.plan.reading import ALLOCATOR, Reading

# transformers 5.24 training_args.py, OptimizerNames -> name and implementation of the scenario's optimizer.
OPTIMIZERS: dict[str, tuple[str, str | None]] = {
    "adamw_torch": ("adamw", "foreach"),
    "adamw_torch_fused": ("adamw", "fused"),
    "adamw_hf": ("adamw", "loop"),
    "adamw_apex_fused": ("adamw", "fused"),
    "adamw_bnb_8bit": ("adamw8bit", None),
    "adamw_8bit": ("adamw8bit", None),
    "adamw_torch_8bit": ("adamw8bit", None),
    "adamw_torch_4bit": ("adamw4bit", None),
    "ao_adamw_8bit": ("adamw8bit", None),  # axolotl's older names
    "ao_adamw_4bit": ("adamw4bit", None),
    "paged_adamw_8bit": ("adamw8bit", None),
    "paged_adamw_32bit": ("adamw", "fused"),
    "paged_adamw": ("adamw", "fused"),
    "adafactor": ("adafactor", None),
    "sgd": ("sgd", None),
    "lion_32bit": ("lion", None),
}


# What is simulated in place of other ways to cut sequences.
ULYSSES = "1, or Ulysses with DeepSpeed: sequence_parallel_size of a scenario"
_EMPTY: tuple[Any, ...] = ("", None, [], {})
# Values that are only named.
_NAMES = ("model_name_or_path", "vision_tower", "deepspeed", "model", "model_id_or_path")


class Recipe:
    """A walk over a recipe's keys that remembers which of them were read."""

    def __init__(self, reading: Reading) -> None:
        self.reading, self.document = reading, reading.document
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a top-level key; null counts as absent."""
        self._read.add(name)
        value = self.document.data.get(name)
        if name in self.document.unknown and name not in _NAMES:
            raise self.error((name,), self.document.unknown[name], "its value")
        return default if value is None else value

    def says(self, name: str) -> bool:
        """Whether it says anything under that name, of whatever value, also one that is not known."""
        self._read.add(name)
        return self.document.data.get(name) is not None

    def flag(self, name: str, default: bool = False) -> bool:
        """A switch; "yes", "no", "true" and "false" as text too. Raises InputError."""
        return as_flag(self.get(name, default), lambda text: self.error((name,), text, "true or false"))

    def count(self, name: str) -> int | None:
        """A whole number greater than 0; None where it is absent. Raises InputError."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.error((name,), f"{value!r} is not a number greater than 0", "a whole number")
        return value

    def set(self, field: str, value: Any, name: str) -> None:
        """Scenario field `field` (dotted) has `value`, as the key `name` says; by default, where it is absent."""
        to = tuple(field.split("."))
        self.reading.set(to, value, (name,))
        is_default = self.document.data.get(name) is None
        (self.reading.defaults.add if is_default else self.reading.defaults.discard)(to)

    def threads(self, launcher: str) -> None:
        """accelerate (commands/launch.py) and torchrun (torch/distributed/run.py) set OMP_NUM_THREADS=1 where it is not
        set, which slows what runs on the CPU."""
        if "OMP_NUM_THREADS" in self.document.environment:
            return
        fields = self.reading.fields
        offload = fields.get(("zero", "offload_optimizer", "device"), fields.get(("zero", "offload_optimizer")))
        if offload not in (None, "none") or fields.get(("fsdp", "cpu_offload")):
            fields[("omp_num_threads",)] = 1
            self.reading.notes.append(f"omp_num_threads: 1, as {launcher} sets OMP_NUM_THREADS unless it is exported")

    def allocator(self, conf: str, launcher: str) -> None:
        """What `launcher` exports to torch's allocator where the user does not."""
        self.reading.fields[ALLOCATOR] = conf
        self.reading.defaults.add(ALLOCATOR)
        self.reading.notes.append(f"allocator: {conf}, as {launcher} exports PYTORCH_ALLOC_CONF")

    def refuse(self, name: str, harmless: Iterable[Any], why: str, accepted: str | None = None) -> None:
        """NotModeled unless the key is absent or has a harmless value."""
        value = self.get(name)
        # True equals 1, and is not the harmless 1 of a parallel degree
        same = (value == other and isinstance(value, bool) == isinstance(other, bool) for other in harmless)
        if value is not None and not any(same):
            shown = (
                ["false"]
                if any(other is False for other in harmless)
                else [str(o) for o in harmless if o not in _EMPTY]
            )
            accepted = accepted or ", ".join(shown) or "a recipe without it"
            raise self.document.error((name,), why, accepted, kind=NotModeled)

    def error(self, path: Path_, message: str, accepted: str | None = None) -> InputError:
        return self.document.error(path, message, accepted)

    def optimizer(self, name: str, default: str) -> None:
        """How a default steps depends on the release, which the scenario says (scenario/plans.py)."""
        value = str(self.get(name, default)).lower()
        if value not in OPTIMIZERS:
            raise self.document.error((name,), f"optimizer {value}", ", ".join(OPTIMIZERS), kind=NotModeled)
        kind, implementation = OPTIMIZERS[value]
        self.set("optimizer.name", kind, name)
        if implementation and self.get(name) is not None:
            self.set("optimizer.impl", implementation, name)
        if value.startswith("paged"):
            self.set("optimizer.paged", True, name)

    def precision(self, bf16: bool, fp16: bool) -> None:
        if bf16 and fp16:
            raise self.error(("fp16",), "bf16 and fp16 cannot both be true")
        name = "bf16" if bf16 else "fp16"
        self.set("precision", name if bf16 or fp16 else "fp32", name)

    def deepspeed(self, name: str) -> bool:
        """Read the DeepSpeed configuration that the recipe names, next to it or in place. False: it names none.

        The Trainer's from_pretrained builds a stage 3 model under zero.Init.
        """
        from zsim.document import Document
        from zsim.plan.deepspeed import read_deepspeed, read_document, with_trainers_groups

        value = self.get(name)
        if not value:
            return False
        if value is True:
            raise self.error((name,), "is a switch of the script's own", "the path of a DeepSpeed configuration")
        self.set("framework.name", "deepspeed", name)
        if isinstance(value, dict):
            places = {path[1:]: place for path, place in self.document.places.items() if path[:1] == (name,)}
            read = read_document(Document(self.document.file, value, places), zero_init=True)
            self.reading.include(with_trainers_groups(read))
            return True
        path = self.document.beside(str(value), "deepspeed")
        if path.is_file():
            self.reading.include(with_trainers_groups(read_deepspeed(path, zero_init=True)))
        else:
            self.reading.lacks("deepspeed_config", f"(names {value}, which is not there)")
        return True

    def rest(self, harmless: Iterable[str] = ()) -> None:
        """List the keys that nobody looked at."""
        unread = [name for name in self.document.data if name not in self._read and not str(name).startswith("_")]
        quiet = {*harmless, *(name for name in unread if self.document.data[name] in (None, ""))}
        known = [name for name in unread if name in quiet]
        other = [name for name in unread if name not in quiet]
        if known:
            self.reading.without_effect.append(
                f"{', '.join(map(str, known))} (data, learning rate, saving and logging)"
            )
        for name in other:
            close = nearest(name, self._read - self.document.data.keys(), 0.9)
            if close:
                self.reading.notes.append(f"{name} is not read; did you mean {close}?")
        if other:
            self.reading.not_read.append(", ".join(map(str, other)))


def hub_attention(value: str) -> str | None:
    """The kernel of a repository of the hub, "kernels-community/flash-attn3"; None for others."""
    if "/" not in value or "flash-attn" not in value:
        return None
    return next((f"flash{n}" for n in (3, 4) if f"flash-attn{n}" in value), "flash")


def as_flag(value: Any, error: Callable[[str], InputError]) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() in ("true", "yes", "1", "on"):
        return True
    if str(value).lower() in ("false", "no", "0", "off", "none"):
        return False
    raise error(f"{value!r} is not true or false")
