"""Inputs of checkpointed blocks in host memory between forward and recomputation.

As Unsloth's checkpointer does it, and with it axolotl (gradient_checkpointing: offload) and LLaMA-Factory
(use_unsloth_gc): `.to("cpu", non_blocking=True)` before the block runs and back before it runs again, both on the
compute stream, whose kernels wait for the copies. torch pins what a non-blocking copy makes on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.model.spec import Module
from zsim.program.builder import Builder, pinned_bytes
from zsim.program.ops import COMPUTE, D2H, H2D, Copy

Tensors = Sequence[tuple[str, str, tuple[int, ...]]]  # (key, category, sizes in bytes) of what a block keeps


class OffloadedInputs:
    def __init__(self, builder: Builder, micro: int) -> None:
        self.builder, self.micro = builder, micro

    def store(self, module: Module, tensors: Tensors) -> None:
        """Before the block runs: its input also goes to the host."""
        sizes = [size for _, _, each in tensors for size in each]
        nbytes = sum(pinned_bytes(size) for size in sizes)
        self.builder.alloc(self._key(module), "activations", nbytes, "host")
        self._copy(D2H, "input to host", "forward", module, sum(sizes))

    def drop(self, tensors: Tensors) -> None:
        """The block has run: the GPU's copy is gone."""
        for key, _, _ in tensors:
            self.builder.free(key)

    def fetch(self, module: Module, tensors: Tensors) -> None:
        """Before the block runs again."""
        for key, category, sizes in tensors:
            self.builder.alloc(key, category, sum(sizes), tensors=sizes)
        self._copy(H2D, "input from host", "recompute", module, sum(size for _, _, each in tensors for size in each))
        self.builder.free(self._key(module), self.builder.last(H2D))

    def _key(self, module: Module) -> str:
        return f"input on host:{self.micro}:{module.name}"

    def _copy(self, lane: str, label: str, phase: str, module: Module, nbytes: int) -> None:
        builder, direction = self.builder, "d2h" if lane == D2H else "h2d"
        builder.wait_stream(lane, COMPUTE)
        copy = Copy(direction, nbytes)
        builder.stream_wait(COMPUTE, builder.launch(lane, label, phase, copy, module=module.name, micro=self.micro))
