"""The same function over many items: in order, on all cores, with what went wrong."""

import os
import signal
import sys

import pytest

from zsim.cli import processes
from zsim.sweep import executors


def test_results_come_in_order_whatever_cannot_be_sent():
    offset = {"not": lambda: "picklable"}
    assert processes.each(lambda item: (item * item, len(offset)), range(7), "squaring") == [
        (n * n, 1) for n in range(7)
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux only")
def test_several_cores_are_used(monkeypatch):
    monkeypatch.setattr(executors, "usable_cores", lambda: 2)
    assert os.getpid() not in processes.each(lambda _: os.getpid(), range(4), "asking")
    monkeypatch.setattr(executors, "usable_cores", lambda: 1)
    assert set(processes.each(lambda _: os.getpid(), range(4), "asking")) == {os.getpid()}


@pytest.fixture
def interruptible():
    """As in a terminal: what a shell starts behind it ignores SIGINT, and so does Python then."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(sys.platform == "win32", reason="has no masks of signals")
@pytest.mark.usefixtures("interruptible")
def test_an_interruption_amid_a_fork_is_not_lost():
    went_on = []

    def forks():
        with executors.uninterrupted():
            signal.raise_signal(signal.SIGINT)
            went_on.append(True)

    with pytest.raises(KeyboardInterrupt):
        forks()
    assert went_on


def test_a_bug_is_not_lost():
    def fails(item):
        return 1 // (item - 2)

    with pytest.raises(ZeroDivisionError):
        processes.each(fails, range(4), "dividing")
