"""Inputs of checkpointed blocks in host memory between forward and recomputation, pinned, in either of two ways."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from zsim.model.spec import Module
from zsim.program.builder import Builder, pinned_bytes
from zsim.program.ops import COMPUTE, D2H, H2D, Copy

Tensors = Sequence[tuple[str, str, tuple[int, ...]]]  # (key, category, sizes in bytes) of what a block keeps


class OffloadedInputs:
    """Unsloth's checkpointer, axolotl's (activation_offloading: legacy) and LLaMA-Factory's (use_unsloth_gc).

    `.to("cpu", non_blocking=True)` before the block runs and back before it runs again, both on the compute stream,
    whose kernels wait for the copies. torch pins what a non-blocking copy makes on the host.
    """

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


MIN_OFFLOAD_BYTES, MAX_FORWARD_STASH = 1024, 5  # min_offload_size, max_fwd_stash_size


class StreamedTensors:
    """OffloadActivations of TRL (trl/models/activation_offloading.py) and torchtune: `activation_offloading: true`.

    What autograd saves outside the head goes to the host on a second stream, the inputs of checkpointed blocks above
    all. The last five tensors stay on the GPU until their copies are done, or until backward, which finds them there.
    The others come up when backward asks for them, no earlier than the one before has been used.
    """

    def __init__(self, builder: Builder, micro: int) -> None:
        self.builder, self.micro = builder, micro
        self.stash: deque[tuple[str, str, tuple[int, ...], int]] = deque()  # key, category, bytes, the copy of each
        self.away: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._used = builder.last(COMPUTE)  # what had been issued when the tensor before was asked for

    def pack(self, key: str, category: str, sizes: tuple[int, ...]) -> None:
        """After the kernels that saved it."""
        large = [size for size in sizes if size >= MIN_OFFLOAD_BYTES]
        if not large:
            return
        while sum(len(sizes) for _, _, sizes, _ in self.stash) + len(large) > MAX_FORWARD_STASH and self.stash:
            self._drop()
        builder = self.builder
        builder.alloc(f"on host:{key}", "activations", sum(map(pinned_bytes, large)), "host")
        builder.wait_stream(D2H, COMPUTE)
        event = builder.launch(D2H, "saved to host", "forward", Copy("d2h", sum(large)), micro=self.micro)
        self.stash.append((key, category, sizes, event))

    def _drop(self) -> None:
        key, category, sizes, event = self.stash.popleft()
        self.builder.stream_wait(COMPUTE, event)
        self.builder.free(key)
        self.away[key] = category, sizes

    def unpack(self, key: str) -> None:
        """Before the first kernel of backward that reads it."""
        builder = self.builder
        for held in [held for held in self.stash if held[0] == key]:
            self.stash.remove(held)
            builder.free(f"on host:{key}")
        if key not in self.away:
            return
        category, sizes = self.away.pop(key)
        builder.alloc(key, category, sum(sizes), tensors=sizes)
        builder.wait_stream(H2D, D2H)  # one stream for both directions
        builder.stream_wait(H2D, self._used)
        self._used = builder.last(COMPUTE)
        event = builder.launch(H2D, "saved from host", "backward", Copy("h2d", sum(sizes)), micro=self.micro)
        builder.stream_wait(COMPUTE, event)
        builder.free(f"on host:{key}", after=event)
