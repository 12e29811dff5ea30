"""A gather of ZeRO-3 on its way."""

from __future__ import annotations

from dataclasses import dataclass

from zsim.program.zero3_coordinator import Params


@dataclass(slots=True)
class Gather:
    """A gather in flight. `flat` is the buffer that its parameters are copied out of; None if there is but one.

    Quantized: `ranks` of the group, `sent` the buffers of what this one contributes; else 0 and none. `together`: those
    that are waited for with it, itself among them. `alone`: no other rank has a part of its parameters.
    """

    params: Params
    event: int
    flat: str | None
    unfetched: int
    done: bool = False
    ranks: int = 0
    sent: tuple[str, ...] = ()
    together: tuple[Gather, ...] = ()
    alone: bool = False
