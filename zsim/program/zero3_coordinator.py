"""Decides which parameters ZeRO-3 gathers, prefetches and releases, and when.

DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py, class PartitionedParameterCoordinator. It knows
nothing of streams or bytes: `fetch` and `release` return parameters, `zero3_parameters.py` turns them into ops.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

NEVER = -1

Params = tuple[int, ...]


class Uses(NamedTuple):
    """Where a complete trace uses each parameter, and the elements that the modules before a step use."""

    steps: Mapping[int, Sequence[int]]
    elements_before: Sequence[int]

    def again_within(self, param: int, step: int, distance: int) -> bool:
        """Whether a use starts fewer than `distance` elements after `step`."""
        steps = self.steps.get(param, ())
        following = bisect_left(steps, step)
        if following == len(steps):
            return False
        return self.elements_before[steps[following]] - self.elements_before[step] < distance


@dataclass
class Coordinator:
    """`owned`: module -> its own parameters, ascending; `inside`: the same with those of its children.

    A leaf module is fetched and released with everything inside it. `numel` is unpadded.
    """

    owned: Mapping[str, Params]
    inside: Mapping[str, Params]
    leaves: frozenset[str]
    numel: Sequence[int]
    persistent: frozenset[int]
    frozen: frozenset[int]
    prefetch_bucket_size: int
    max_live_parameters: int
    max_reuse_distance: int
    lent: Mapping[str, Params] = field(default_factory=dict)  # to others while it runs, and its own between steps
    unread: Callable[[int], bool] = lambda param: False  # whether its shard lies on NVMe and nobody is reading it

    params: dict[str, Params] = field(init=False)  # module -> what it is fetched and released with
    read_outside: dict[str, Params] = field(default_factory=dict)  # module -> of these, parameters of other modules
    live: set[int] = field(default_factory=set)  # gathered or in flight (ds_status is not NOT_AVAILABLE)
    recording: bool = False
    complete: bool = False
    _available: int = 0
    _step_id: int = 0
    _modules: list[str] = field(default_factory=list)
    _trace: list[tuple[int, int]] = field(default_factory=list)  # (parameter, step id of the module that uses it)
    _uses: dict[bool, Uses] = field(default_factory=dict)
    _queue: deque[tuple[int, int]] = field(default_factory=deque)
    _dequeued_to: list[int] = field(default_factory=list)  # __most_recent_step_id_param_fetched_for
    _in_flight: set[int] = field(default_factory=set)  # prefetched, and not waited for yet
    _active: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    _decisions: dict[tuple[str, int], frozenset[int]] = field(default_factory=dict)
    _open: dict[str, set[int]] = field(default_factory=dict)  # modules in backward -> what they recomputed for

    def __post_init__(self) -> None:
        self.params = {**self.owned, **{leaf: self.inside[leaf] for leaf in self.leaves}}

    def register(self, external: Mapping[str, Params]) -> None:
        """register_external_parameter: from now on a module is fetched with these parameters of others, too."""
        for module, params in external.items():
            self.params[module] = tuple(sorted({*self.params[module], *params}))
            self.read_outside[module] = tuple(sorted({*self.read_outside.get(module, ()), *params}))

    def read(self, module: str, param: int) -> bool:
        """Whether `param`, which the code of `module` takes from another one, has to be gathered now."""
        missing = self._take((param,))
        if missing:
            self.register({module: missing})
        return bool(missing)

    def reset_step(self) -> tuple[int, ...]:
        """Start of a forward. Returns the lengths of the integer lists that ranks compare with rank 0's.

        reset_step: the trace is recorded during the first forward and backward and complete from the next
        forward on, be that the next micro-step. `available` restarts at 0 even if parameters are live.
        """
        compared: tuple[int, ...] = ()
        if not self.complete:
            compared = (len(self._modules),)
            if self.recording:
                self._trace = [
                    (param, step)
                    for step, module in enumerate(self._modules)
                    for param in sorted({*self.params[module], *self.lent.get(module, ())})
                ]
                compared += (len(self._trace), len(self._trace))
                self.complete, self.recording = True, False
            else:
                self.recording = True
        self._queue = deque(self._trace)
        self._dequeued_to = [NEVER] * len(self.numel)
        self._step_id = 0
        self._available = 0
        return compared

    def expect(self, module: str) -> Params:
        """trace_prologue: a module that is not the next one of a complete trace ends it. Returns what was prefetched,
        which goes; nothing is prefetched until two more forwards have begun, the first of which is recorded."""
        if not self.complete or (self._step_id < len(self._modules) and self._modules[self._step_id] == module):
            return ()
        self.complete, self.recording = False, False
        self._modules, self._trace, self._uses = [], [], {}
        return self.drop_in_flight()

    def drop_in_flight(self) -> Params:
        """_clean_inflight_param_registry, before a forward, too: what was prefetched and is not used yet goes."""
        dropped = tuple(sorted(param for param in self._in_flight if not self._active[param]))
        self._in_flight.clear()
        self.live.difference_update(dropped)
        self._available -= sum(self.numel[param] for param in dropped)
        return dropped

    def fetch(self, module: str, phase: str) -> tuple[Params, Params]:
        """fetch_sub_module: the module's own parameters now; with a complete trace the next ones too. What is to be
        gathered of either, in one call each.

        A frozen parameter has no gradient whose arrival would end its use: fetched by a recomputation, it stays until
        the module whose backward asked for that is done.
        """
        if phase == "backward":
            self._open[module] = set()
        if self.recording:
            self._modules.append(module)
        own = self.params[module]
        needed: Params = ()
        if own:
            needed = self._take(own)
            self._in_flight.difference_update(own)
            for param in own:
                self._active[param].add(module)
                if phase == "recompute" and param in self.frozen and self._open:
                    asking = next(reversed(self._open))
                    self._open[asking].add(param)
                    self._active[param].add(asking)
        prefetched: Params = ()
        if self.complete and self._queue:
            if own:
                self._dequeue(own)
            if self.prefetch_bucket_size > 0:
                prefetched = self._prefetch()
                self._in_flight.update(prefetched)
        self._step_id += 1
        return needed, prefetched

    def _take(self, params: Params) -> Params:
        live = self.live
        missing = tuple([param for param in params if param not in live])
        if missing:
            live.update(missing)
            self._available += sum([self.numel[param] for param in missing])
        return missing

    def _dequeue(self, own: Params) -> None:
        """Takes the module's parameters off the queue so that they are not prefetched again."""
        fresh = len([param for param in own if self._dequeued_to[param] < self._step_id])
        taken: set[int] = set()
        while self._queue and len(taken) < fresh:
            param, step = self._queue.popleft()
            self._dequeued_to[param] = step
            taken.add(param)

    def _prefetch(self) -> Params:
        limit = min(self.max_live_parameters - self._available, self.prefetch_bucket_size)
        queue, dequeued_to, live = self._queue, self._dequeued_to, self.live
        chosen: set[int] = set()
        elements = 0
        while queue and elements < limit:
            param, step = queue[0]
            if self.unread(param):
                break
            queue.popleft()
            if step > dequeued_to[param]:
                dequeued_to[param] = step
            if param not in live and param not in chosen:
                chosen.add(param)
                elements += self.numel[param]
        return self._take(tuple(sorted(chosen)))

    def upcoming(self) -> Iterator[int]:
        """Parameters of the trace that nothing has fetched or prefetched yet."""
        return (param for param, _ in self._queue) if self.complete else iter(())

    def release(self, module: str, *, backward: bool = False) -> Params:
        """release_sub_module: the module's parameters that may go, in ascending order."""
        own = self.params[module]
        recomputed = self._open.pop(module) if backward else set()
        if not own and not recomputed:
            return ()
        releasable: Collection[int] = self._releasable(module, own) if self.complete else own
        if recomputed:
            own = tuple(sorted(recomputed.union(own)))
            releasable = recomputed.difference(self.persistent).union(releasable)
        return self._leave(module, own, releasable)

    def release_leftovers(self, *, keep: bool = False) -> Params:
        """release_backward_leftovers: modules whose post-backward hook never fired, the last one first.

        `keep`: as before DeepSpeed 0.19.3, where their parameters stayed until the step.
        """
        released: Params = ()
        if keep:
            self._open.clear()
        while self._open:
            module, recomputed = self._open.popitem()
            own = tuple(sorted(recomputed.union(self.params[module])))
            released += self._leave(module, own, set(own) - self.persistent)
        return released

    def _leave(self, module: str, own: Params, releasable: Collection[int]) -> Params:
        released = []
        for param in own:
            active = self._active[param]
            active.discard(module)
            if param in releasable and param in self.live and not active:
                self.live.discard(param)
                self._available -= self.numel[param]
                released.append(param)
        return tuple(released)

    def _releasable(self, module: str, own: Params) -> frozenset[int]:
        """__params_to_release. Decided once per (module, step id) and kept: the function is under lru_cache."""
        key = (module, self._step_id)
        if key not in self._decisions:
            uses = self._uses_of(module in self.leaves)
            self._decisions[key] = frozenset(
                param
                for param in own
                if param not in self.persistent
                and self._dequeued_to[param] <= self._step_id  # the prefetcher has not passed over a later use
                and not uses.again_within(param, self._step_id, self.max_reuse_distance)
            )
        return self._decisions[key]

    def _uses_of(self, recursive: bool) -> Uses:
        """Modules ahead are looked into as the released one is: with their children if that one is a leaf."""
        if recursive not in self._uses:
            inside = self.inside if recursive else self.owned
            steps: dict[int, list[int]] = {}
            elements = []
            for step, module in enumerate(self._modules):
                params = inside[module] + self.read_outside.get(module, ())
                elements.append(sum(self.numel[param] for param in params))
                for param in params:
                    steps.setdefault(param, []).append(step)
            self._uses[recursive] = Uses(steps, list(accumulate(elements, initial=0)))
        return self._uses[recursive]

    def partition_all(self) -> Params:
        """partition_all_parameters at the start of the optimizer step: everything live goes."""
        released = tuple(sorted(self.live))
        self.live.clear()
        for modules in self._active.values():
            modules.clear()
        return released

    def gather_persistent(self) -> Params:
        """_post_step: the persistent parameters come back."""
        gathered = tuple(sorted(self.persistent))
        self.live.update(gathered)
        return gathered
