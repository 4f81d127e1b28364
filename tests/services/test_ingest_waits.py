"""How long ingest gathers before a round: by what the last one cost."""

from services.ingest.waits import BLOCK_S, LINGER_MOST_S, PATIENCE_S, SPACING, Waits


def test_the_first_record_after_a_silence_is_not_kept_waiting() -> None:
    waits = Waits()
    assert waits.linger_s(5.0) == 0
    waits.worked(5.0, 5.001, 1, nothing=False)
    assert waits.linger_s(6.0) == 0


def test_rounds_take_their_share_of_the_time_and_no_more() -> None:
    waits = Waits()
    waits.worked(1.0, 1.0005, 1, nothing=False)
    assert abs(waits.linger_s(1.0005) - SPACING * 0.0005) < 1e-9
    waits.worked(2.0, 3.0, 1, nothing=False)
    assert abs(waits.linger_s(3.0) - LINGER_MOST_S) < 1e-9


def test_many_small_blocks_are_spaced() -> None:
    """A round of a few rows for every partition of every node is cheap here and dear for those who take them."""
    waits = Waits()
    waits.worked(1.0, 1.0001, 16, nothing=False)
    assert abs(waits.linger_s(1.0001) - 16 * BLOCK_S) < 1e-9


def test_nobody_spins_while_records_wait_for_others() -> None:
    waits = Waits()
    waits.worked(1.0, 1.0001, 0, nothing=True)
    assert abs(waits.linger_s(1.0001) - LINGER_MOST_S) < 1e-9


def test_patience_ends_when_something_else_is_due() -> None:
    waits = Waits()
    assert waits.patience_s(1.0, 1.02) < 0.021
    assert waits.patience_s(1.0, 9.0) == PATIENCE_S
    assert waits.patience_s(1.0, 0.5) == 0
