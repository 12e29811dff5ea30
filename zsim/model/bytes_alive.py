"""How many bytes of a tape are alive, and of which storages: `graph.Storage` writes it as it comes and goes."""

from __future__ import annotations

from zsim.model.spec import UNKNOWN


class Bytes:
    """What a segment finds alive, and how much more at its peak, apart from what counts as saved."""

    def __init__(self) -> None:
        self.live = self.peak = 0
        self.born = self.peak_born = self.born_before = 0  # storages there have been: in all, at the peak, at the start
        self.alive: dict[int, int] = {}  # bytes of each by number, oldest first
        self.died: dict[int, int] = {}  # since the peak
        self.saved: set[int] = set()  # those that segments hold as saved
        self.disturbed = False  # a storage has died elsewhere than in the code of zsim.model
        self.base = 0  # bytes that segments hold as saved: what is alive besides is temporary

    def new_peak(self) -> None:
        """A segment begins: its peak counts from here."""
        self.peak, self.peak_born, self.born_before = self.live, self.born, self.born
        self.died.clear()

    def at_peak(self, total: int) -> tuple[tuple[int, int], ...]:
        """Those that were there before the segment have their number negative."""
        before, born = self.born_before, self.peak_born
        there = [one for one in sorted((self.alive | self.died).items()) if one[0] <= born and one[0] not in self.saved]
        return fitted([(-key if key <= before else key, nbytes) for key, nbytes in there], total)

    def unsaved(self, total: int) -> tuple[tuple[int, int], ...]:
        alive = (
            self.alive.copy()
        )  # at once: a sampler's thread may let go of a storage while this one goes through them
        return fitted([one for one in alive.items() if one[0] not in self.saved], total)


def fitted(tensors: list[tuple[int, int]], total: int) -> tuple[tuple[int, int], ...]:
    """`tensors` (number, bytes), oldest first, so that the bytes add up to `total`.

    They are too many where a tensor was yet to be saved, which counts as saved all along: the youngest of its size
    stands for it.
    """
    more = sum(nbytes for _, nbytes in tensors) - max(0, total)
    for place in range(len(tensors) - 1, -1, -1):
        if tensors[place][1] == more:
            del tensors[place]
            return tuple(tensors)
    while more > 0:
        number, nbytes = tensors.pop()
        if nbytes > more:
            tensors.append((number, nbytes - more))
        more = max(0, more - nbytes)
    return (*tensors, (UNKNOWN, -more)) if more else tuple(tensors)
