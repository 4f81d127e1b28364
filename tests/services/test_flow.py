"""How far ahead of a node its senders may be."""

from dataclasses import dataclass

from services.ingest.loop import Ingest
from services.runtime.flow import AHEAD_S, BLOCKS_LEAST, STUCK_S, Distance


def test_a_slow_receiver_is_given_a_few_blocks() -> None:
    distance = Distance(2, 0.0)
    assert not distance.is_far([BLOCKS_LEAST, BLOCKS_LEAST], 0.1)
    assert distance.is_far([BLOCKS_LEAST, BLOCKS_LEAST + 1], 0.1)


def test_a_fast_receiver_is_given_what_it_does_in_a_moment() -> None:
    distance = Distance(1, 0.0)
    for tenth in range(1, 101):
        distance.reached([tenth * 40], tenth / 10)  # 400 a second
    assert abs(distance.rate - 400) < 1
    most = int(400 * AHEAD_S)
    assert not distance.is_far([4000 + most - 2], 10.0)
    assert distance.is_far([4000 + most + 2], 10.0)


def test_nobody_waits_for_a_receiver_that_does_not_move() -> None:
    distance = Distance(1, 0.0)
    distance.reached([5], 1.0)
    assert distance.is_far([1000], 1.0 + STUCK_S / 2)
    distance.reached([5], 1.0 + STUCK_S)
    assert not distance.is_far([1000], 1.0 + STUCK_S)
    distance.reached([6], 8.0)
    assert distance.is_far([1000], 8.1)  # it is back


def test_a_place_that_goes_back_counts_as_nothing_done() -> None:
    """A node that lost its volume begins again."""
    distance = Distance(1, 0.0)
    distance.reached([100], 1.0)
    rate = distance.rate
    distance.reached([0], 2.0)
    assert distance.rate < rate
    assert distance.is_far([100], 2.0)


@dataclass
class Queue:
    is_ahead: bool = False


def test_a_round_is_halved_once_for_each_wait() -> None:
    """However often it is asked while it waits; and it is never smaller than a block for each partition is worth."""
    queue, ingest = Queue(), Ingest.__new__(Ingest)
    ingest.flows, ingest.per_round, ingest.per_round_least, ingest.has_room = (queue,), 1_000, 400, True  # type: ignore[assignment]
    queue.is_ahead = True
    assert not any(ingest._may_send() for _ in range(50))
    assert ingest.per_round == 500
    queue.is_ahead = False
    assert ingest._may_send()
    assert ingest.per_round == 625
    for _ in range(10):
        queue.is_ahead = not queue.is_ahead
        ingest._may_send()
    assert 400 <= ingest.per_round < 625
