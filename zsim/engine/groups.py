"""Which simulated ranks meet in a collective, and which groups of the cluster they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zsim.engine.prices import Groups


class Bundle(NamedTuple):
    """Simulated ranks (`members`, places among them) that wait for each other, standing for all of `groups`."""

    members: tuple[int, ...]
    groups: Groups


def bundles_of(groups: Groups, classes: Sequence[tuple[int, ...]]) -> dict[int, Bundle]:
    """Simulated rank -> its bundle. Classes that share a group, directly or through others, form one.

    With one class that is one bundle of all groups, with classes of one rank each it is a bundle per group.
    """
    class_of = {rank: index for index, members in enumerate(classes) for rank in members}
    joined: list[tuple[set[int], list[tuple[int, ...]]]] = []
    for group in groups:
        members, merged = {class_of[rank] for rank in group}, [group]
        apart = []
        for other in joined:
            if other[0].isdisjoint(members):
                apart.append(other)
            else:
                members |= other[0]
                merged = other[1] + merged
        joined = [*apart, (members, merged)]
    bundles: dict[int, Bundle] = {}
    for members, merged in joined:
        bundle = Bundle(tuple(sorted(members)), tuple(merged))
        bundles.update(dict.fromkeys(bundle.members, bundle))
    return bundles
