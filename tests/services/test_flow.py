"""How far ahead of a node its senders may be."""

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
