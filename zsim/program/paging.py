"""Paged optimizers of bitsandbytes (optim/optimizer.py get_state_buffer, prefetch_state): states in managed memory.

CUDA's driver keeps managed pages on the GPU as long as nothing else needs the room, and moves the least recently used
ones to the host for a `cudaMalloc` or for other pages. torch's allocator gives nothing back once it has it, so that in
steady training the states have what is never reserved. Where they fit there, nothing moves. Where they do not, an
update goes through all of them in the same order each time, and what it needs next is always what was moved longest
ago: every page comes up and goes down once per step.
"""

from __future__ import annotations

from zsim.program.builder import Builder
from zsim.program.ops import COMPUTE, D2H, H2D, Copy

PAGED_NUMEL = 100_000  # smaller tensors keep their states on the GPU


def allocate(builder: Builder, key: str, nbytes: int) -> None:
    builder.alloc(f"{key}_paged_states", "optimizer_states", nbytes, "managed")


def fetch(builder: Builder, nbytes: int) -> None:
    """cudaMemPrefetchAsync before an update: the driver first makes room, then brings up what is not there.

    One after the other, each at the rate of the wire: Llama-3-8B with 64 GB of states beside 16 GB of weights takes
    over 6 s a step where Llama-2-7B with 54 GB takes less than one (torchtune pull request 990).
    """
    builder.wait_stream(D2H, COMPUTE)
    evicted = builder.launch(D2H, "states to host", "optimizer", Copy("d2h", nbytes, paged=True))
    builder.stream_wait(H2D, evicted)
    fetched = builder.launch(H2D, "states from host", "optimizer", Copy("h2d", nbytes, paged=True))
    builder.stream_wait(COMPUTE, fetched)
