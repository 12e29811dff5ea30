"""MiCS, which left DeepSpeed with 0.19.7. Its recordings are of 0.18.9, which stands in for the installed one by

pip install --no-deps --target DIR deepspeed==0.18.9; PYTHONPATH=DIR python -m validation.oracles.record z3_mics
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any


def install() -> None:
    """gloo cannot gather calls as they come, which MiCS asks for by naming a device: torch then collects them."""
    from torch.distributed import distributed_c10d

    coalescing = distributed_c10d._coalescing_manager

    def manager(group: Any = None, device: Any = None, async_ops: bool = False) -> AbstractContextManager[Any]:
        return coalescing(group, None, async_ops)

    distributed_c10d._coalescing_manager = manager  # type: ignore[assignment]
