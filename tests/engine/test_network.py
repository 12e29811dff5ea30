"""Links shared by flows: what fair means, and that bytes are neither lost nor made."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.worlds import World, collective, steps, worlds
from zsim.cost.transfer import Transfer
from zsim.engine.network import Flow, Network, fair_rates
from zsim.engine.simulator import run
from zsim.program.ops import ALL_GATHER, D2H, H2D, REDUCE_SCATTER, Copy, HostWait, Launch, Op, Program

LINKS = "abcdef"


@st.composite
def transfers(draw):
    links = draw(st.lists(st.sampled_from(LINKS), max_size=4, unique=True))
    usage = {link: draw(st.sampled_from([0.25, 0.5, 1.0, 1.75, 7.0])) for link in links}
    cap = draw(st.sampled_from([0.5, 2.0, 8.0, float("inf")])) if links else 3.0
    return Transfer(draw(st.integers(0, 100)) / 1.0, usage, 0.0, cap)


capacities = st.fixed_dictionaries({link: st.sampled_from([0.5, 1.0, 3.0, 10.0]) for link in LINKS})


@given(st.lists(transfers(), min_size=1, max_size=6), capacities)
def test_rates_are_max_min_fair(flows, capacity):
    """Each flow is at its own cap, or crosses a full link on which nobody gets more than it does."""
    rates = fair_rates(flows, capacity)
    load = Counter()
    for flow, rate in zip(flows, rates, strict=True):
        assert 0 < rate <= flow.max_rate
        for link, usage in flow.usage.items():
            load[link] += rate * usage
    assert all(load[link] <= capacity[link] * (1 + 1e-12) for link in load)
    for flow, rate in zip(flows, rates, strict=True):
        if rate == flow.max_rate:
            continue
        full = [link for link in flow.usage if load[link] >= capacity[link] * (1 - 1e-12)]
        assert any(
            all(other <= rate * (1 + 1e-12) for peer, other in zip(flows, rates, strict=True) if link in peer.usage)
            for link in full
        )


@given(st.lists(transfers(), min_size=1, max_size=4), st.integers(2, 5), capacities)
def test_one_flow_for_equal_groups_gets_what_each_would(flows, count, capacity):
    """Folding: `count` copies of a transfer side by side on shared links, or one with the summed usage."""
    summed = [
        Transfer(f.payload_bytes, {link: u * count for link, u in f.usage.items()}, 0.0, f.max_rate) for f in flows
    ]
    separate = fair_rates([flow for flow in flows for _ in range(count)], capacity)
    assert fair_rates(summed, capacity) == pytest.approx(separate[::count], rel=1e-12)


@given(st.lists(transfers(), min_size=1, max_size=4), capacities, st.data())
def test_recomputing_only_what_changed_gives_the_rates_of_all(kinds, capacity, data):
    network = Network(capacity)
    numbers = [network.add_kind(transfer) for transfer in kinds]
    now = 0.0
    for _ in range(data.draw(st.integers(1, 12))):
        if network.flows and data.draw(st.booleans()):
            network.remove(data.draw(st.sampled_from(network.flows)), now)
        else:
            kind = data.draw(st.sampled_from(numbers))
            network.add(Flow(kind, kinds[kind], None))
        network.share(now)
        now += 0.125
        expected = fair_rates([flow.transfer for flow in network.flows], capacity)
        assert [flow.rate for flow in network.flows] == pytest.approx(expected, rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.booleans().flatmap(worlds), st.lists(steps(), min_size=1, max_size=2))
def test_bytes_over_each_link_are_payload_times_usage(world, programs):
    timeline = run(world.program(*programs), world.classes, world)
    expected, carried = Counter(), Counter()
    for flow in timeline.flows:
        moved = sum(r * (b - a) for r, a, b in zip(flow.rates, flow.times, flow.times[1:], strict=False) if b > a)
        assert moved == pytest.approx(flow.transfer.payload_bytes, rel=1e-9)
        for link, usage in flow.transfer.usage.items():
            expected[link] += flow.transfer.payload_bytes * usage
    for use in timeline.links:
        carried[use.link] += use.rate * (use.end_s - use.start_s)
        assert use.rate <= timeline.link_capacity[use.link] * (1 + 1e-9)
    for link, nbytes in expected.items():
        assert carried[link] == pytest.approx(nbytes, rel=1e-9, abs=1e-3)
    for one, other in zip(timeline.links, timeline.links[1:], strict=False):
        assert one.link < other.link or one.end_s <= other.start_s


def durations(world, *ops):
    """Of ops started together, in a step that waits for all of them."""
    launches = [Launch(Op(number, lane, lane, "forward", work)) for number, (lane, work) in enumerate(ops)]
    program = Program(world.size, world.groups, [], ([*launches, HostWait(None)],))
    return [record.end_s - record.start_s for record in run(program, world.classes, world).ops]


def test_two_flows_on_one_link_take_twice_as_long_and_on_separate_links_no_longer():
    world = World(latency=0.0, issue=0.0, max_rate=float("inf"), dram=2e9, bus=1e12, port=1e12, spine=0.75e9)
    copy = (H2D, Copy(H2D, 5e6))
    back = (D2H, Copy(D2H, 5e6))
    gather = (ALL_GATHER, collective(10_000_000))
    (alone,) = durations(world, copy)
    assert alone == pytest.approx(5e-3, rel=1e-12)  # 5 MB at 1e9 bytes/s, over its own PCIe link
    assert durations(world, copy, back) == pytest.approx([2 * alone, 2 * alone], rel=1e-12)
    (gathering,) = durations(world, gather)
    assert gathering == pytest.approx(10e-3, rel=1e-12)  # 10 MB x 0.75 over a spine of 0.75e9 bytes/s
    assert durations(world, copy, gather) == pytest.approx([alone, gathering], rel=1e-12)
    assert durations(world, gather, (REDUCE_SCATTER, collective(10_000_000))) == pytest.approx([20e-3] * 2, rel=1e-12)


def test_a_flow_speeds_up_when_its_neighbour_ends():
    world = World(latency=0.0, issue=0.0, max_rate=float("inf"), dram=1e12)
    short, long = durations(world, (H2D, Copy(H2D, 1e6)), (D2H, Copy(D2H, 3e6)))
    assert (short, long) == pytest.approx((2e-3, 4e-3), rel=1e-12)  # half speed for 2 ms, then alone with 2 MB left
