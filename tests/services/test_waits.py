"""How long the sink and a node wait follows the load: not at all when there is nothing to wait for."""

from dataclasses import dataclass
from typing import Any

import pytest

from services.join_node import app
from services.join_node.app import NodeWorker
from services.sink import loop
from services.sink.loop import Closing, Sink


@dataclass
class Clock:
    now: float = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (app, loop):
        monkeypatch.setattr(module, "time", clock)
    return clock


def open_sink(clock: Clock, pending: int = 1) -> Any:
    sink = Sink.__new__(Sink)
    sink.started, sink.pending, sink.closing = clock.now, pending, Closing()
    return sink


def test_a_lone_block_is_committed_at_once(clock: Clock) -> None:
    sink = open_sink(clock)
    assert not sink._is_to_close(nothing_waits=False)
    assert sink._is_to_close(nothing_waits=True)
    sink.started = None
    assert not sink._is_to_close(nothing_waits=True)
    assert sink._wait_s() == loop.IDLE_S


def test_closing_takes_half_of_the_time_at_most(clock: Clock) -> None:
    sink = open_sink(clock)
    for _ in range(100):
        sink.closing.took(clock.now, clock.now + 0.02)
        clock.now += 0.02
        sink.started = clock.now
        assert not sink._is_to_close(nothing_waits=True)
        assert sink._wait_s() == pytest.approx(sink.closing.cost_s)
        clock.now += sink._wait_s() + 1e-6
        assert sink._is_to_close(nothing_waits=True)
    assert sink.closing.cost_s == pytest.approx(0.02, rel=0.01)


def test_a_commit_that_hung_does_not_make_the_next_ones_wait_for_long(clock: Clock) -> None:
    sink = open_sink(clock)
    sink.closing.took(clock.now, clock.now + 9.0)
    assert sink.closing.cost_s == pytest.approx(loop.TRANSACTION_S / 8)
    assert sink.closing.due == pytest.approx(clock.now + 9.0 + sink.closing.cost_s)


def test_while_blocks_keep_coming_a_transaction_grows_to_its_limits(clock: Clock) -> None:
    sink = open_sink(clock)
    clock.now += loop.TRANSACTION_S * 0.99
    assert not sink._is_to_close(nothing_waits=False)
    sink.pending = loop.TRANSACTION_RESULTS
    assert sink._is_to_close(nothing_waits=False)
    sink.pending = 1
    clock.now += loop.TRANSACTION_S * 0.02
    assert sink._is_to_close(nothing_waits=False)


def test_steps_of_a_node_wait_longer_the_longer_it_has_been_behind(clock: Clock) -> None:
    worker = NodeWorker.__new__(NodeWorker)
    worker._rested = clock.now
    waits = []
    for _ in range(100):
        waits.append(worker._together_s())
        clock.now += 0.01
    assert waits[0] == app.TOGETHER_LEAST_S
    assert waits[-1] == app.TOGETHER_MOST_S
    assert waits == sorted(waits)
    worker._rested = clock.now
    assert worker._together_s() == app.TOGETHER_LEAST_S
