"""When an input speaks: what one look promises, what was really spared, and what is not worth a look."""

import numpy as np
import pytest

from schemas.block import NO_WATERMARK
from schemas.rows import U64
from topology.plan.shapes import Shape
from topology.restraint.detection import are_few, kinds, repeats
from topology.restraint.suspension.demand import NO_PARTNER, NOT_WANTED, Demand
from topology.restraint.suspension.policy import Weighed, Weights
from topology.restraint.tables import entries_of
from topology.state.window import COMPLETE

W = Weights()
SHAPES = 4
BLOCK = 8_000  # rows


def values(count: int, of: int) -> U64:
    return np.random.default_rng(count + of).integers(0, of, count).astype(np.uint64)


def look(weighed: Weighed, useless: int, of: int, rows: int = BLOCK, filled: float = 1.0) -> bool:
    """A block comes; if it is looked at, the lattice finds so many rows useless, with values out of so many. Whether
    the side begins or ceases to speak."""
    if weighed.takes(W, rows, SHAPES):
        sample = min(rows, 2_000)
        found = sample * useless // rows
        weighed.looked(W, sample, SHAPES, [(0, values(0, 1)), (found, values(found, of))], filled)
    return weighed.turn(W)


@pytest.mark.parametrize("of", [50, 500, 2_500, 10_000])
def test_how_many_values_there_are_follows_from_how_many_repeat(of: int) -> None:
    sample = values(1_500, of)
    assert 0.6 < kinds(len(sample), len(np.unique(sample))) / of < 1.7


def test_values_are_few_if_rows_share_them() -> None:
    assert repeats(1_000, 500)
    assert not repeats(1_000, 999)
    assert are_few(np.sort(values(1_000, 100)))
    assert not are_few(np.sort(values(1_000, 10**9)))
    assert not are_few(np.sort(values(2, 1)))  # of so few rows nothing can be told


def test_the_first_look_at_many_useless_rows_is_enough() -> None:
    weighed = Weighed()
    assert look(weighed, useless=BLOCK * 9 // 10, of=2_000)
    assert weighed.speaks
    assert weighed.lattice


def test_it_does_not_speak_of_values_that_hardly_come_twice() -> None:
    weighed = Weighed()
    assert not any(look(weighed, useless=BLOCK * 9 // 10, of=10**9) for _ in range(200))


def test_what_is_asked_for_again_within_a_window_is_not_saved() -> None:
    """If half of the rows have a partner at any time, half of what is left out is wanted before it ends."""
    assert not any(look(weighed, useless=BLOCK // 2, of=50) for weighed in [Weighed()] for _ in range(200))
    assert look(Weighed(), useless=BLOCK * 9 // 10, of=50)


def test_what_has_no_partner_while_windows_fill_may_find_one() -> None:
    """A tenth of the rows has a partner after a tenth of the window: most will have one. A hundredth of few values
    after a sixtieth: nobody knows yet."""
    assert not look(Weighed(), useless=BLOCK * 9 // 10, of=2_000, filled=0.1)
    assert look(Weighed(), useless=BLOCK * 999 // 1000, of=2_000, filled=0.1)
    assert not look(Weighed(), useless=BLOCK, of=50, filled=1 / 60)
    assert look(Weighed(), useless=BLOCK, of=2_000, filled=1 / 60)


def test_a_window_fills_from_where_the_other_sides_were_first_heard_of() -> None:
    weighed = Weighed()
    assert weighed.filled(W, NO_WATERMARK, 1_000) == W.filled_least
    assert weighed.filled(W, 5_000, 1_000) == W.filled_least
    assert weighed.filled(W, 5_250, 1_000) == 0.25
    assert weighed.filled(W, 9_000, 1_000) == 1.0
    assert weighed.filled(W, COMPLETE, 1_000) == 1.0


def test_blocks_too_small_to_save_anything_are_not_looked_at() -> None:
    weighed = Weighed()
    assert not any(weighed.takes(W, 100, SHAPES) or weighed.turn(W) for _ in range(50 * W.look_blocks))


def speaking() -> Weighed:
    weighed = Weighed()
    look(weighed, useless=BLOCK, of=2_000)
    weighed.heard(W, 0, 0, 1)
    return weighed


def periods(weighed: Weighed, count: int, spared_a_block: int) -> int:
    """How many periods a side that speaks goes on, of at most so many, if its producer leaves out so many pairs with
    each block."""
    avoided = weighed.avoided[0]
    for period in range(count):
        for _ in range(W.period_blocks):
            avoided += spared_a_block
            weighed.heard(W, 0, avoided, 1)
            weighed.paid(W, resumes=False, values=0)
            weighed.takes(W, 100, SHAPES)
            if weighed.turn(W):
                return period
    return count


def test_it_goes_on_while_that_saves_more_than_it_costs() -> None:
    assert periods(speaking(), 40, spared_a_block=20_000) == 40


def test_it_is_hushed_soon_if_not_and_waits_longer_each_time() -> None:
    weighed = speaking()
    assert W.periods_least - 1 <= periods(weighed, 40, spared_a_block=1_000) <= W.periods_least + 1
    assert not weighed.speaks
    first = weighed.pause
    weighed.periods = first
    assert look(weighed, useless=BLOCK, of=2_000) or look(weighed, useless=BLOCK * 20, of=2_000, rows=BLOCK * 20)
    periods(weighed, 40, spared_a_block=1_000)
    assert weighed.pause > first


def test_what_is_made_later_was_not_spared() -> None:
    weighed = speaking()
    weighed.heard(W, 0, 10_000, 1)
    before = weighed.saved
    weighed.heard(W, 0, 2_000, 1)
    assert weighed.saved == pytest.approx(before - W.row_us * 8_000)


def test_that_the_other_side_is_empty_may_be_said_seldom() -> None:
    weighed = Weighed()
    assert sum(weighed.may_say_empty(W, blocks, 1) for blocks in range(1_000)) <= 1 + 1_000 // W.empty_blocks + 1


def test_the_share_of_what_is_told_for_the_sake_of_our_consumer() -> None:
    demand = Demand((Shape((), None, -1, (True, True), None, authority=False),), 1, [])
    assert demand.passed_on == 0
    one = np.ones(1, np.uint64)
    for value, why in ((1, NO_PARTNER), (2, NO_PARTNER), (3, NOT_WANTED), (2, NOT_WANTED)):
        demand.say(0, entries_of(one * np.uint64(value)), why, one)
    assert demand.passed_on == pytest.approx(2 / 3)
