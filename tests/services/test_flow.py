"""How far ahead of a node its senders may be."""

import pytest

from services.runtime.flow import AHEAD_S, BLOCKS_LEAST, STUCK_S, Distance, Pace, Reached, _said
from topology.ingest.settings import IngestSettings, RoundSize


def said(block_s: float, *workers: int) -> list[Reached]:
    return [Reached(worker, block_s) for worker in workers]


def test_a_receiver_nobody_has_heard_of_is_given_a_few_blocks() -> None:
    distance = Distance(2, 0.0)
    assert not distance.is_far([BLOCKS_LEAST, BLOCKS_LEAST], 0.1)
    assert distance.is_far([BLOCKS_LEAST, BLOCKS_LEAST + 1], 0.1)


def test_a_fast_receiver_is_given_what_it_does_in_a_moment() -> None:
    distance = Distance(1, 0.0)
    distance.reached([4000], said(0.0025, 0), 10.0)
    most = int(AHEAD_S / 0.0025)
    assert not distance.is_far([4000 + most - 2], 10.0)
    assert distance.is_far([4000 + most + 2], 10.0)


def test_workers_work_side_by_side() -> None:
    """What is too much for one is not for two; and one that is behind is not helped by another that is not."""
    half = int(AHEAD_S / 0.01) * 3 // 4
    together, apart = Distance(2, 0.0), Distance(2, 0.0)
    together.reached([0, 1], said(0.01, 0, 0), 1.0)
    apart.reached([0, 1], said(0.01, 0, 1), 1.0)
    assert together.is_far([half, half + 1], 1.0)
    assert not apart.is_far([half, half + 1], 1.0)
    assert apart.is_far([2 * half, 1], 1.0)


def test_nobody_waits_for_a_receiver_that_does_not_move() -> None:
    distance = Distance(1, 0.0)
    distance.reached([5], said(0.1, 0), 1.0)
    assert distance.is_far([1000], 1.0 + STUCK_S / 2)
    distance.reached([5], said(0.1, 0), 1.0 + STUCK_S)
    assert not distance.is_far([1000], 1.0 + STUCK_S)
    distance.reached([6], said(0.1, 0), 8.0)
    assert distance.is_far([1000], 8.1)  # it is back


def test_a_place_that_goes_back_is_far_again() -> None:
    """A node that lost its volume begins again."""
    distance = Distance(1, 0.0)
    distance.reached([100], said(0.1, 0), 1.0)
    assert not distance.is_far([100], 1.0)
    distance.reached([0], said(0.1, 0), 2.0)
    assert distance.is_far([100], 2.0)


def test_the_pace_is_that_of_work_and_of_late() -> None:
    pace = Pace()
    assert pace.block_s == AHEAD_S
    for _ in range(100):
        pace.add(0.1, 1)
    assert abs(pace.block_s - 0.1) < 1e-9
    for _ in range(1_000):
        pace.add(0.002, 1)
    assert pace.block_s < 0.01


@pytest.mark.parametrize("metadata", [None, "", "x", "[", "{}", "[1]", '["a",2]', "[1,0.5,3]"])
def test_what_stands_beside_a_place_may_be_anything(metadata: str | None) -> None:
    assert _said(metadata).block_s == AHEAD_S


def test_a_round_is_halved_once_for_each_wait() -> None:
    """However often it is asked while it waits; and it does not grow by asking either."""
    size = RoundSize(IngestSettings(4_000, 400), waits=True)
    assert size.now == 400
    size.now = 1_000
    assert not any(size.room(False) for _ in range(50))
    assert size.now == 500
    assert all(size.room(True) for _ in range(50))
    assert size.now == 500
    for has_room in (False, True) * 5:
        size.room(has_room)
    assert size.now == 400
    size.sent()
    assert size.now == 500
