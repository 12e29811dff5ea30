"""DeepSpeed's batch-size triangle: train_batch_size = micro_batch x grad_accum x ranks."""

from __future__ import annotations

from zsim.errors import InputError


def triangle(train: int | None, micro: int | None, accum: int | None, ranks: int) -> tuple[int, int]:
    """Micro-batch and accumulation steps from whichever of the three sizes are known, on `ranks` data-parallel ranks.

    As DeepSpeed 0.19.8 does (runtime/config.py, _set_batch_related_parameters and _batch_assertion). Raises InputError
    where neither the whole nor the micro-batch is known, or where they do not multiply.
    """
    if train is None and micro is None:
        raise InputError(
            "neither train_batch_size nor micro_batch is given", field="micro_batch", accepted="micro_batch: 1"
        )
    if train is None:
        assert micro is not None
        return micro, accum or 1
    whole = (micro or 1) * (accum or 1) * ranks  # what it must be a multiple of
    if micro is not None and accum is not None:
        if train != whole:
            raise InputError(
                f"{train} is not {micro} x {accum} x {ranks} (micro_batch x grad_accum x ranks)",
                field="train_batch_size",
                accepted=f"{whole}, or leave one of the three out",
            )
        return micro, accum
    if train % whole or train < whole:
        given = (("micro_batch", micro), ("grad_accum", accum))
        factors = "".join(f" x {name} {size}" for name, size in given if size is not None)
        raise InputError(
            f"{train} is no multiple of {ranks} ranks{factors}",
            field="train_batch_size",
            accepted=f"a multiple of {whole}",
        )
    return (train // whole, accum or 1) if micro is None else (micro, train // whole)


def divisors(of: int) -> str:
    """The sizes of equal groups that `of` ranks or heads can form, as an error's `accepted` lists them."""
    return ", ".join(str(size) for size in range(1, of + 1) if of % size == 0)
