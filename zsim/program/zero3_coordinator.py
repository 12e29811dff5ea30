"""Decides which parameters ZeRO-3 gathers, prefetches and releases, and when.

DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py, class PartitionedParameterCoordinator. It knows
nothing of streams or bytes: `fetch` and `release` return lists of parameters, `zero3.py` turns them into ops.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

NEVER = -1


@dataclass(frozen=True, slots=True)
class Fetch:
    """What one `fetch_sub_module` gathers: `needed` by the module itself, then `prefetched`, each in one call."""

    needed: tuple[int, ...]
    prefetched: tuple[int, ...]


@dataclass
class Coordinator:
    """`owned`: module name -> its own parameters, ascending. `numel`: elements of each parameter, unpadded."""

    owned: Mapping[str, tuple[int, ...]]
    numel: Sequence[int]
    persistent: frozenset[int]
    prefetch_bucket_size: int
    max_live_parameters: int
    max_reuse_distance: int

    live: set[int] = field(default_factory=set)  # gathered or in flight (ds_status is not NOT_AVAILABLE)
    recording: bool = False
    complete: bool = False
    _available: int = 0
    _step_id: int = 0
    _modules: list[str] = field(default_factory=list)
    _params: list[tuple[int, int]] = field(default_factory=list)  # (parameter, step id of the module using it)
    _queue: deque[tuple[int, int]] = field(default_factory=deque)
    _fetched_for: list[int] = field(default_factory=list)  # step id up to which a parameter's uses were dequeued
    _active: dict[int, set[str]] = field(default_factory=dict)
    _decisions: dict[tuple[str, int], frozenset[int]] = field(default_factory=dict)

    def reset_step(self) -> tuple[int, ...]:
        """Start of a forward. Returns the lengths of the integer lists that ranks compare with rank 0's.

        reset_step: the trace is recorded during the first forward and backward and complete from the next
        forward on, be that the next micro-step. `available` restarts at 0 even if parameters are live.
        """
        compared: tuple[int, ...] = ()
        if not self.complete:
            compared = (len(self._modules),)
            if self.recording:
                self._params = [
                    (param, step) for step, module in enumerate(self._modules) for param in self.owned.get(module, ())
                ]
                compared += (len(self._params), len(self._params))
                self.complete, self.recording = True, False
            else:
                self.recording = True
        self._queue = deque(self._params)
        self._fetched_for = [NEVER] * len(self.numel)
        self._step_id = 0
        self._available = 0
        return compared

    def fetch(self, module: str) -> Fetch:
        """fetch_sub_module: the module's own parameters now; with a complete trace the next ones too."""
        if self.recording:
            self._modules.append(module)
        own = self.owned.get(module, ())
        needed = self._take(own)
        for param in own:
            self._active.setdefault(param, set()).add(module)
        prefetched: tuple[int, ...] = ()
        if self.complete:
            self._dequeue(own)
            if self.prefetch_bucket_size > 0 and self._queue:
                prefetched = self._prefetch()
        self._step_id += 1
        return Fetch(needed, prefetched)

    def _take(self, params: Sequence[int]) -> tuple[int, ...]:
        missing = tuple(param for param in params if param not in self.live)
        if missing:
            self.live.update(missing)
            self._available += sum(self.numel[param] for param in missing)
        return missing

    def _dequeue(self, own: tuple[int, ...]) -> None:
        """Takes the module's parameters off the queue so that they are not prefetched again."""
        fresh = sum(self._fetched_for[param] < self._step_id for param in own)
        taken: set[int] = set()
        while self._queue and len(taken) < fresh:
            param, step = self._queue.popleft()
            self._fetched_for[param] = step
            taken.add(param)

    def _prefetch(self) -> tuple[int, ...]:
        limit = min(self.max_live_parameters - self._available, self.prefetch_bucket_size)
        chosen: list[int] = []
        elements = 0
        while self._queue and elements < limit:
            param, step = self._queue.popleft()
            self._fetched_for[param] = max(self._fetched_for[param], step)
            if param not in self.live and param not in chosen:
                chosen.append(param)
                elements += self.numel[param]
        return self._take(sorted(chosen))

    def release(self, module: str) -> tuple[int, ...]:
        """release_sub_module: the module's parameters that may go, in ascending order."""
        own = self.owned.get(module, ())
        if not own:
            return ()
        releasable = self._releasable(module, own) if self.complete else own
        return self._leave(module, own, releasable)

    def release_leftover(self, module: str) -> tuple[int, ...]:
        """release_backward_leftovers: for a module whose post-backward hook never fired."""
        own = self.owned.get(module, ())
        return self._leave(module, own, [param for param in own if param not in self.persistent])

    def _leave(self, module: str, own: tuple[int, ...], releasable: Sequence[int] | frozenset[int]) -> tuple[int, ...]:
        released = []
        for param in own:
            active = self._active.setdefault(param, set())
            active.discard(module)
            if param in releasable and param in self.live and not active:
                self.live.discard(param)
                self._available -= self.numel[param]
                released.append(param)
        return tuple(released)

    def _releasable(self, module: str, own: tuple[int, ...]) -> frozenset[int]:
        """__params_to_release. Decided once per (module, step id) and kept: the function is under lru_cache."""
        key = (module, self._step_id)
        if key not in self._decisions:
            candidates = {
                param for param in own if param not in self.persistent and self._fetched_for[param] <= self._step_id
            }
            traversed = 0
            for later in range(self._step_id, len(self._modules)):
                if traversed >= self.max_reuse_distance or not candidates:
                    break
                for param in self.owned.get(self._modules[later], ()):
                    candidates.discard(param)
                    traversed += self.numel[param]
            self._decisions[key] = frozenset(candidates)
        return self._decisions[key]

    def partition_all(self) -> tuple[int, ...]:
        """partition_all_parameters at the start of the optimizer step: everything live goes."""
        released = tuple(sorted(self.live))
        self.live.clear()
        self._active.clear()
        return released

    def gather_persistent(self) -> tuple[int, ...]:
        """_post_step: the persistent parameters come back."""
        gathered = tuple(sorted(self.persistent - self.live))
        self.live.update(gathered)
        return gathered
