"""Counts the bytes of every tensor storage that is alive during a real run, whatever the engine.

    python -m validation.oracles.storage NAME-PART ... --out DIR

Where torch's own tracker knows FSDP2 only, this one gives totals for DDP, FSDP1 and DeepSpeed too: when each forward,
backward and optimizer step begins, and the peaks between. Ranks are CPU processes, and what a CPU adds is no oracle
for GPUs: `_chunk_cat` casts through a copy (FSDP2's reduction in another dtype), gloo's reduce-scatter copies its
input, torch's Adam on the host has temporaries that DeepSpeed's has not. Configurations whose peak is one of those are
not kept here. gloo's threads hold what FSDP1 has them reduce a moment longer: they get copies that are not counted.
"""

from __future__ import annotations

import argparse
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class StorageTracker(TorchDispatchMode):
    """A watcher with the recorder's interface. A row: where the run is, bytes alive, the peak since the row before."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, Any]] = []
        self.enabled = True
        self._alive: dict[int, int] = {}
        self._total = self._peak = 0
        self._op = self._peak_op = ""
        self._step, self._micro = 0, 0
        resize = torch.UntypedStorage.resize_

        def tracked_resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._alive:
                self._set(storage)
            return result

        torch.UntypedStorage.resize_ = tracked_resize  # type: ignore[method-assign, assignment]
        self._reduce = dist.reduce_scatter_single
        dist.reduce_scatter_single = self._reduce_copies

    def at(self, phase: str, *, step: int | None = None, micro: int | None = None) -> None:
        """Writes a row that closes what came before `phase`."""
        self.rows.append(
            {
                "step": self._step, "micro": self._micro, "before": phase, "bytes": self._total,
                "peak": max(self._peak, self._total), "peak_op": self._peak_op,
            }
        )  # fmt: skip
        self._step = self._step if step is None else step
        self._micro = self._micro if micro is None else micro
        self._peak, self._peak_op = self._total, ""

    def watch(self, model: torch.nn.Module, marked: Iterable[str]) -> None:
        """Nothing to name; the model was built while this mode was on."""

    def watch_backward(self, model: torch.nn.Module) -> None: ...

    def watch_optimizer(self, optimizer: Any) -> None: ...

    def _reduce_copies(self, output: torch.Tensor, input: torch.Tensor, **settings: Any) -> None:
        enabled, self.enabled = self.enabled, False
        part = torch.empty_like(output)
        self._reduce(part, input.clone(), **settings)
        output.copy_(part)
        self.enabled = enabled

    def _set(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key not in self._alive:
            weakref.finalize(storage, self._drop, key)
        self._total += nbytes - self._alive.get(key, 0)
        self._alive[key] = nbytes

    def _drop(self, key: int) -> None:
        self._total -= self._alive.pop(key, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(cls.__name__ == "DTensor" for cls in types):
            return NotImplemented  # its local tensors come by
        out = func(*args, **(kwargs or {}))
        if self.enabled:
            for tensor in tree_flatten(out)[0]:
                if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                    self._set(tensor.untyped_storage())
            if self._total > self._peak:
                self._peak, self._peak_op = self._total, func._opname
        return out


def main(arguments: list[str] | None = None) -> int:
    from validation.oracles.configurations import configurations
    from validation.oracles.record import _header, run, write

    parser = argparse.ArgumentParser(prog="python -m validation.oracles.storage", description=__doc__)
    parser.add_argument("names", nargs="+", help="parts of names of configurations.py")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "storage")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for config in configurations():
        if any(name in config["name"] for name in options.names):
            config = config | {"attention": "eager"}  # the kernels of fused attention differ between CPU and GPU
            rows, header = run(config, StorageTracker)
            write([_header(config, header), *rows], options.out / f"{config['name']}.jsonl.gz")
            print(f"{config['name']}: peak {max(row['peak'] for row in rows):,} bytes", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
