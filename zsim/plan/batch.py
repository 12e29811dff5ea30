"""DeepSpeed's batch-size triangle: train_batch_size = micro_batch x grad_accum x ranks."""

from __future__ import annotations

from zsim.errors import InputError


def triangle(train: int | None, micro: int | None, accum: int | None, ranks: int) -> tuple[int, int]:
    """Micro-batch and accumulation steps from whichever of the three sizes are known, on `ranks` data-parallel ranks.

    As DeepSpeed 0.19.8 does (runtime/config.py, _set_batch_related_parameters and _batch_assertion). Raises InputError
    where neither the whole nor the micro-batch is known, or where they do not multiply.
    """
    if train is None and micro is None:
        raise InputError("neither train_batch_size nor micro_batch is given", accepted="micro_batch: 1")
    if train is None:
        assert micro is not None
        return micro, accum or 1
    if micro is None:
        accum = accum or 1
        micro = train // ranks // accum
    elif accum is None:
        accum = train // micro // ranks
    if micro < 1 or accum < 1 or train != micro * accum * ranks:
        raise InputError(
            f"train_batch_size is not micro_batch x grad_accum x ranks: {train} != {micro} x {accum} x {ranks}",
            field="train_batch_size",
            accepted=f"a multiple of {ranks} ranks, and of micro_batch and grad_accum where they are given",
        )
    return micro, accum
