"""Links shared by the transfers in flight: fluid, max-min fair, recomputed only where something changed.

At payload rate r a flow loads each link l with r * usage[l]. All rates rise together until a link is full or
a flow reaches its own `max_rate`; what is stopped by that stays, the others rise on (progressive filling,
Bertsekas & Gallager, Data Networks, section 6.5.2, with weights). Fairness is on r, so one folded flow whose
usage is the sum over many equal groups gets the rate that each of those groups would get.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zsim.cost.transfer import Transfer

INFINITY = float("inf")


def fair_rates(transfers: Sequence[Transfer], capacity: Mapping[str, float]) -> list[float]:
    """Max-min fair payload rates, bytes/s, of `transfers` that run at the same time."""
    rates = [-1.0] * len(transfers)  # negative: still rising
    users: dict[str, list[int]] = {}
    for index, transfer in enumerate(transfers):
        for link, usage in transfer.usage.items():
            if usage > 0:
                users.setdefault(link, []).append(index)
    rising = set(range(len(transfers)))
    while rising:
        caps = {index: transfers[index].max_rate for index in rising}
        level = min(caps.values())
        full: list[str] = []
        for link, indices in users.items():
            demand = left = 0.0
            for index in indices:
                if index in rising:
                    demand += transfers[index].usage[link]
                else:
                    left += rates[index] * transfers[index].usage[link]
            if demand > 0:
                fill = max(0.0, capacity[link] - left) / demand
                if fill < level:
                    level, full = fill, [link]
                elif fill == level:
                    full.append(link)
        stopped = {index for link in full for index in users[link] if index in rising}
        stopped |= {index for index, cap in caps.items() if cap <= level}
        for index in stopped:
            rates[index] = level
        rising -= stopped
    return rates


class Flow:
    """A transfer in flight. `owner` is handed back at its end."""

    __slots__ = ("end", "kind", "owner", "rate", "rates", "remaining", "times", "transfer")

    def __init__(self, kind: int, transfer: Transfer, owner: object) -> None:
        self.kind, self.transfer, self.owner = kind, transfer, owner
        self.remaining = transfer.payload_bytes
        self.rate = 0.0
        self.end = INFINITY
        self.times: list[float] = []
        self.rates: list[float] = []


class Network:
    """The flows in flight. `kind` numbers distinct transfers, so that rates of a known mix are looked up."""

    def __init__(self, capacity: Mapping[str, float]) -> None:
        self.capacity = capacity
        self.transfers: list[Transfer] = []
        self.flows: list[Flow] = []
        self.joining: list[Flow] = []  # in their latency, to be added at its end
        self.changed: list[int] = []  # kinds that came or went since the last `share`
        self._rates: dict[tuple[int, ...], list[float]] = {}
        self._touch: dict[tuple[int, int], bool] = {}

    def add_kind(self, transfer: Transfer) -> int:
        self.transfers.append(transfer)
        return len(self.transfers) - 1

    def add(self, flow: Flow) -> None:
        self.flows.append(flow)
        self.changed.append(flow.kind)

    def rate_alone(self, kind: int) -> float:
        """bytes/s of payload if nothing else is in flight."""
        return self._fair_rates((kind,))[0]

    def plan_alone(self, flow: Flow, time: float) -> bool:
        """If no other flow is near, say at once how `flow` will run from `time` on: the common case, kept cheap."""
        for others in (self.flows, self.joining):
            for other in others:
                if self._touching(flow.kind, other.kind):
                    return False
        flow.rate = self.rate_alone(flow.kind)
        flow.times.append(time)
        flow.rates.append(flow.rate)
        flow.end = time + flow.remaining / flow.rate
        self.flows.append(flow)
        return True

    def unplan(self, kind: int, now: float) -> list[Flow]:
        """Flows planned alone that a flow of `kind` may meet before they begin to load the network."""
        early = [flow for flow in self.flows if flow.times[0] > now and self._touching(kind, flow.kind)]
        for flow in early:
            self.flows.remove(flow)
            flow.rates.clear()
            flow.rate, flow.end = 0.0, INFINITY
        return early

    def remove(self, flow: Flow, now: float) -> None:
        flow.times.append(now)
        flow.end = INFINITY
        self.flows.remove(flow)
        self.changed.append(flow.kind)

    def share(self, now: float) -> list[Flow]:
        """Give new rates to flows joined by shared links to what changed; returns flows whose `end` moved."""
        affected = sorted(self._affected(), key=lambda flow: flow.kind) if self.flows else []
        self.changed.clear()
        if not affected:
            return affected
        rates = self._fair_rates(tuple(flow.kind for flow in affected))
        moved = []
        for flow, rate in zip(affected, rates, strict=True):
            if rate != flow.rate:
                if flow.times:
                    flow.remaining = max(0.0, flow.remaining - flow.rate * (now - flow.times[-1]))
                flow.rate = rate
                flow.times.append(now)
                flow.rates.append(rate)
                flow.end = now + flow.remaining / rate if flow.remaining else now
                moved.append(flow)
        return moved

    def _fair_rates(self, mix: tuple[int, ...]) -> list[float]:
        rates = self._rates.get(mix)
        if rates is None:
            rates = self._rates[mix] = fair_rates([self.transfers[kind] for kind in mix], self.capacity)
        return rates

    def _affected(self) -> list[Flow]:
        frontier, seen, found = list(self.changed), set(self.changed), []
        waiting = self.flows
        while frontier and waiting:
            kind = frontier.pop()
            apart = []
            for flow in waiting:
                if self._touching(kind, flow.kind):
                    found.append(flow)
                    if flow.kind not in seen:
                        seen.add(flow.kind)
                        frontier.append(flow.kind)
                else:
                    apart.append(flow)
            waiting = apart
        return found

    def _touching(self, one: int, other: int) -> bool:
        if one == other:
            return True
        known = self._touch.get((one, other))
        if known is None:
            usage = self.transfers[one].usage
            known = not usage.keys().isdisjoint(self.transfers[other].usage.keys())
            self._touch[one, other] = self._touch[other, one] = known
        return known
