"""DeepSpeed's asynchronous file I/O in plain Python, for runs that swap to files where its C++ is not compiled.

What is swapped when, through which buffers, is DeepSpeed's own; only reading and writing are done here, at once.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


class Handle:
    def __init__(self, **settings: Any) -> None:
        self._done = 0

    def new_cpu_locked_tensor(self, numel: int, example: torch.Tensor) -> torch.Tensor:
        tensor = torch.empty(numel, dtype=example.dtype).zero_()  # locked pages are resident
        PINNED[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> None:
        PINNED.pop(tensor.untyped_storage().data_ptr(), None)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in PINNED

    def async_pread(self, tensor: torch.Tensor, path: str, offset: int = 0) -> int:
        with open(path, "rb") as file:
            file.seek(offset)
            file.readinto(_bytes(tensor))
        self._done += 1
        return 0

    def async_pwrite(self, tensor: torch.Tensor, path: str, offset: int = 0) -> int:
        Path(path).touch()
        with open(path, "r+b") as file:
            file.seek(offset)
            file.write(_bytes(tensor))
        self._done += 1
        return 0

    def wait(self) -> int:
        done, self._done = self._done, 0
        return done


PINNED: dict[int, torch.Tensor] = {}


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def install() -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    AsyncIOBuilder.load = lambda self, verbose=True: SimpleNamespace(aio_handle=Handle)
    AsyncIOBuilder.is_compatible = lambda self, verbose=False: True
