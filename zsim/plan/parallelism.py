"""The dimensions beside data parallelism in an accelerate configuration (accelerate 1.15 parallelism_config.py)."""

from __future__ import annotations

from typing import Any

from zsim.document import subsection
from zsim.errors import InputError, NotModeled
from zsim.plan.recipe import Recipe, as_flag, hub_attention

SECTION = "parallelism_config"
# utils/dataclasses.py, DeepSpeedSequenceParallelConfig, which takes kernels of the hub besides
_ATTENTION = {"sdpa": "sdpa", "flash_attention_2": "flash", "flash_attention_3": "flash3"}
_ULYSSES = "1, or parallelism_config_sp_size with distributed_type DEEPSPEED"


class Sizes:
    """The section, its sizes checked."""

    def __init__(self, recipe: Recipe) -> None:
        self.reading, self.document = recipe.reading, recipe.document
        self.section = subsection(self.document, self.document.data, (), SECTION)
        if self.size("tp_size") > 1:
            raise self.error("tp_size", "tensor parallelism", "1", NotModeled)
        if self.size("cp_size") > 1:
            raise self.error("cp_size", "context parallelism (ring attention)", _ULYSSES, NotModeled)

    def get(self, option: str, default: Any = None) -> Any:
        value = self.section.get(f"{SECTION}_{option}")
        return default if value is None else value

    def error(self, option: str, message: str, accepted: str, kind: type[InputError] = InputError) -> InputError:
        return self.document.error((SECTION, f"{SECTION}_{option}"), message, accepted, kind=kind)

    def size(self, option: str) -> int:
        value = self.get(option, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(option, f"{value!r} is not a size", "1 or more")
        return value

    def mesh(self) -> list[int] | None:
        """(replicate, shard) of FSDP2's device mesh."""
        if self.size("sp_size") > 1:
            why = "sequence parallelism without DeepSpeed, which accelerate has it from"
            raise self.error("sp_size", why, "1, or distributed_type: DEEPSPEED")
        replicate, shard = self.size("dp_replicate_size"), self.size("dp_shard_size")
        return [replicate, shard] if replicate > 1 else None

    def share_sequences(self, processes: int | None) -> None:
        """Ulysses, as Accelerator._prepare_deepspeed sets it up."""
        size = self.size("sp_size")
        if size == 1:
            return
        backend = self.get("sp_backend", "deepspeed")
        if backend != "deepspeed":
            raise self.error("sp_backend", f"{backend!r} is not known", "deepspeed")
        self.set("sequence_parallel_size", size, "sp_size")
        data_parallel = self.size("dp_replicate_size") * self.size("dp_shard_size")
        if processes and processes != data_parallel * size:
            why = (
                f"{data_parallel} (dp_replicate_size x dp_shard_size) x {size} is not num_processes {processes}: "
                "DeepSpeed refuses the train_batch_size that accelerate makes of it"
            )
            raise self.error("dp_shard_size", why, f"{processes // size}")
        variable = self.get("sp_seq_length_is_variable", True)
        length = self.get("sp_seq_length")
        if not as_flag(variable, lambda text: self.error("sp_seq_length_is_variable", text, "true or false")):
            if not str(length).isdecimal():
                raise self.error("sp_seq_length", "is needed where lengths do not vary", "a number of tokens")
            self.set("seq_len", int(str(length)), "sp_seq_length")
        value = str(self.get("sp_attn_implementation", "sdpa"))
        kernel = _ATTENTION.get(value) or hub_attention(value)
        if kernel is None:
            raise self.error("sp_attn_implementation", f"{value!r} is not supported", ", ".join(_ATTENTION))
        self.set("attention", kernel, "sp_attn_implementation")

    def set(self, field: str, value: Any, option: str) -> None:
        self.reading.set((field,), value, (SECTION, f"{SECTION}_{option}"))
