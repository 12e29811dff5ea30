"""Reserved bytes over steps in which one micro-step stands for more: its events run as often as it does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from zsim.engine.allocator import Replay, Reserved
from zsim.engine.timeline import TEMPORARY, MemoryEvent
from zsim.program.ops import DELAYED_FREES, Launch, Program

Events = Sequence[MemoryEvent]


class Stretch(NamedTuple):
    """Events of one GPU that follow each other, then `again`, `more` times."""

    events: Events
    again: Events = ()
    more: int = 0


def stretches(program: Program, steps: Sequence[Events], micro: int, more: int) -> list[list[Stretch]] | None:
    """The ledger of a rank's GPU, step by step from the init on, with micro-step `micro` (from 0) of each step `more`
    times more.

    None where in some step it does something else to memory than the one before it, or keeps something.
    """
    if not more:
        return [[Stretch(events)] for events in steps]
    found = [[Stretch(steps[0])]]
    micro_of: dict[int, dict[int, int]] = {}  # by id of a step's instructions: of each op
    for step, events in enumerate(steps[1:], 1):
        instructions = program.steps[min(step, len(program.steps)) - 1]
        if id(instructions) not in micro_of:
            micro_of[id(instructions)] = {
                each.op.id: each.op.micro for each in instructions if isinstance(each, Launch)
            }
        begin, own, behind = _begins(events, micro_of[id(instructions)], micro)
        again = _again(events[begin:own], events[own:behind])
        if again is None:
            return None
        found.append([Stretch(events[:own]), Stretch(events[own:behind], again, more), Stretch(events[behind:])])
    return found


def _begins(events: Events, micro_of: Mapping[int, int], micro: int) -> tuple[int, int, int]:
    """The first event of the micro-step before `micro`, of `micro`, and of the one behind it."""
    begins: dict[int, int] = {}
    for position, event in enumerate(events):
        if event.op is not None:
            begins.setdefault(micro_of[event.op], position)
    return begins[micro - 1], begins[micro], begins[micro + 1]


def _again(before: Events, own: Events) -> Events | None:
    """The events of a micro-step as they are once it follows itself, not the one before; None if it is not like that.

    What it frees of the one before is what it then has left itself.
    """
    if [_done(event) for event in before] != [_done(event) for event in own]:
        return None
    born = {event.key: place for place, event in enumerate(before) if event.nbytes > 0}
    held: Counter[tuple[str, bool]] = Counter()
    renamed: dict[str, str] = {}
    for event in own:
        if event.key == TEMPORARY:
            continue
        if event.nbytes < 0 and not held[_tensor(event)]:
            if event.key not in born:
                return None
            renamed[event.key] = own[born[event.key]].key
        else:
            held[_tensor(event)] += 1 if event.nbytes > 0 else -1
    again = [event._replace(key=renamed.get(event.key, event.key)) for event in own] if renamed else own
    return again if _leaves_what_it_finds(again, held) else None


def _done(event: MemoryEvent) -> tuple[object, ...]:
    return event.category, event.nbytes, event.lane, event.tensors


def _tensor(event: MemoryEvent) -> tuple[str, bool]:
    """And whether it is one that other streams still read."""
    return event.key, event.category == DELAYED_FREES


def _leaves_what_it_finds(events: Events, found: Counter[tuple[str, bool]]) -> bool:
    """Whether `events` free what there is and allocate what there is not, and at the end there is what was `found`."""
    there = Counter(found)
    for event in events:
        if event.key == TEMPORARY:
            continue
        tensor = _tensor(event)
        there[tensor] += 1 if event.nbytes > 0 else -1
        # one key may wait several times
        if there[tensor] < 0 or (there[tensor] > 1 and event.category != DELAYED_FREES):
            return False
    return there == found and not sum(event.nbytes for event in events if event.key == TEMPORARY)


def run_through(replay: Replay, parts: Iterable[Stretch]) -> Reserved:
    """What is reserved up to the end of `parts`, of which there are some."""
    for events, again, more in parts:
        run = _run_often(replay, events, again, more) if more else replay.run(events)
        if run.out_of_memory:
            break
    return run


def _run_often(replay: Replay, events: Events, again: Events, more: int) -> Reserved:
    """Until cached blocks lie as they lay before. From there on all repeats what came between, how often the allocator
    gave memory back included."""
    allocator, done, left = replay.allocator, 0, 1 + more
    seen: dict[tuple[tuple[int, ...], ...], tuple[int, int]] = {}
    while left:
        state = allocator.cached()
        if state in seen:
            earlier, retries = seen[state]
            rounds, left = divmod(left, earlier - left)
            allocator.retries += allocator.retries[retries:] * rounds
            seen.clear()
            continue
        seen[state] = left, len(allocator.retries)
        run = replay.run(again if done else events)
        if run.out_of_memory:
            return run._replace(repetition=done)
        done, left = done + 1, left - 1
    return run._replace(retries=tuple(allocator.retries))
