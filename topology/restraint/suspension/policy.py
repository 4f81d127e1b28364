"""Whether feedback pays on one input of a node: what it saves and costs is counted, weighed and decided within the
step.

While a side *speaks*, its producer says with every block how many pairs it has left out so far and not made since, and
the node counts what that took: blocks about demand, values, rows looked at. While it is *hushed*, now and then a block
of rows is looked at as if it spoke: how many rows have no partner, and how many values they show, for each way of
detection (single columns by Bloom filters, or the whole lattice). From the repeats among the values follows how many
there are in all, so one look is enough to begin; whether it was right is counted. A side that began to speak is not
judged before its word had time to be heard, and one that was hushed waits longer each time before it may speak again.
Where rows are so few that nothing could be saved, nothing is looked at.

Invariant: decisions follow from counts and constants, never from a clock, so a node that is rebuilt from its input
takes the same ones at the same places. The constants are what the benchmarks measured; only their ratios matter.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from schemas.block import NO_WATERMARK
from schemas.rows import U64
from topology.restraint.detection import kinds


@dataclass(frozen=True)
class Weights:
    """What feedback costs and saves, in microseconds of CPU as `make bench-jit` measured it, and how long to
    wait and see. Only ratios matter."""

    block_us: float = 2000  # a block about demand; a resume, its answer and what it makes
    resume_us: float = 8000
    value_us: float = 10  # a value in such a block, a composite from making to purging
    row_us: float = 1.3
    detect_us: float = 400  # to look through a block for what has no partner, and each row of it, for one shape
    look_us: float = 0.05
    keep_us: float = 800  # what both ends do for what is suspended while a block is made and taken
    look_blocks: int = 16  # a hushed side is looked at after so many blocks or rows
    look_rows: int = 50_000
    rarely_most: int = 32
    filled_least: float = 1 / 64
    # what a composite that is asked for after all costs, of what it saved to leave it out at first
    later: float = 1.0
    # for how many times the stretch between two looks a value is taken to serve, which is `LOOK_BLOCKS` at least
    ahead: int = 8
    news: float = 0.5  # of the blocks are answered with one about demand
    margin: float = 1.5  # how many times its cost it must promise to save before it speaks
    least_gain: float = 1.25  # and how many times it must save while it does
    period_blocks: int = 32  # between judgements of a side that speaks
    period_rows: int = 100_000
    periods_least: int = 4  # before a side that was heard is judged: at first everything is news
    periods_unheard: int = 64  # before one is judged that has said something and has had no effect at all
    pause_most: int = 256  # periods
    empty_blocks: int = 64  # of work for each time that an empty other side is told a producer partition


RESTLESS = Weights(  # for tests: changes its mind every few blocks
    period_blocks=2,
    look_blocks=1,
    rarely_most=1,
    periods_least=1,
    periods_unheard=2,
    pause_most=2,
    block_us=0.1,
    resume_us=0.1,
    value_us=0.1,
    detect_us=0.1,
    keep_us=0.1,
    filled_least=1.0,
    later=0.0,
)


class Weighed(msgspec.Struct):
    """One side's sums; part of the node's memo."""

    speaks: bool = False
    lattice: bool = False  # how it detects: over the whole lattice, or single columns by Bloom filters
    blocks: int = 0  # since the last period ended
    rows: int = 0
    unseen_blocks: int = 0  # since the last look
    unseen_rows: int = 0
    rarely: int = 1  # how many times the usual distance is between looks: more after each that promised nothing
    promises: list[float] = msgspec.field(
        default_factory=lambda: [0.0, 0.0]
    )  # what single columns and the lattice would save beyond their cost, by the last look
    saved: float = 0.0  # by a side that speaks
    spent: float = 0.0
    periods: int = 0  # since the last change
    heard_at: int = -1  # the period in which the producer first left something out
    told: bool = False  # whether it has said anything since it began to speak
    pause: int = 0  # periods that it stays hushed at least
    avoided: dict[int, int] = msgspec.field(
        default_factory=dict
    )  # producer partition -> pairs it had left out when last heard
    changes: int = 0
    empties: int = 0  # how often the producer was told that the other side is empty
    since: int | None = None  # how far the other sides were when first heard of: their windows fill from there

    def may_say_empty(self, w: Weights, blocks_in: int, partitions: int) -> bool:
        """Whether a node that has taken so many blocks may tell its producer that the other side is empty. It needs no
        look: it costs next to nothing."""
        allowed = self.empties * w.empty_blocks * partitions <= blocks_in
        self.empties += allowed
        return allowed

    def heard(self, w: Weights, partition: int, avoided: int, of: int) -> float:
        """A producer partition has left out so many pairs for all `of` partitions of ours; gives how many are news for
        this one."""
        news = (avoided - self.avoided.get(partition, avoided)) / of
        self.avoided[partition] = avoided
        if self.speaks:
            self.saved += w.row_us * news  # less than nothing if it made more of what it had left out than it left out
            if news > 0 and self.heard_at < 0:
                self.heard_at = self.periods
        return news

    def paid(self, w: Weights, resumes: bool, values: int) -> None:
        """A block about demand with so many values was sent to the producer."""
        if self.speaks:
            self.told |= values > 0
            self.spent += (w.resume_us if resumes else w.block_us) + w.value_us * values

    def takes(self, w: Weights, rows: int, shapes: int) -> bool:
        """A block of so many rows has come, to be searched for so many shapes; whether it is to be looked at: by a
        hushed side, or for what the whole lattice would find."""
        self.blocks, self.rows = self.blocks + 1, self.rows + rows
        self.unseen_blocks, self.unseen_rows = self.unseen_blocks + 1, self.unseen_rows + rows
        if self.speaks:
            self.spent += w.keep_us + _detection(w, 1, rows, shapes if self.lattice else 1)
        first = self.rarely == 1 and not self.changes  # the first look is taken as soon as it is worth it
        if (
            not first
            and self.unseen_blocks < w.look_blocks * self.rarely
            and self.unseen_rows < w.look_rows * self.rarely
        ):
            return False
        worth = w.row_us * self.unseen_rows > w.margin * self.unseen_blocks * (
            w.news * w.block_us + w.keep_us + w.detect_us
        )
        if not worth:
            self.unseen_blocks = self.unseen_rows = 0
        return worth and not (self.speaks and self.lattice)

    def filled(self, w: Weights, reached: int, window: int) -> float:
        """Which share of their window the other sides' rows span by now, if these have come so far."""
        if reached == NO_WATERMARK:
            return w.filled_least
        if self.since is None:
            self.since = reached
        return min(1.0, max(w.filled_least, (reached - self.since) / max(1, window)))

    def looked(self, w: Weights, rows: int, shapes: int, found: Sequence[tuple[int, U64]], filled: float = 1.0) -> None:
        """By each way of detection: of the rows looked at so many have no use, and they show these values; by then the
        other sides' windows were filled so far.

        Partners come by chance: if a share of the rows has none in a part of a window, that share to the power of
        window by part has none in a whole one. Those are left out for good; the others are asked for before they end,
        and making them later costs as much as it saved. Where no value has a partner yet, one is taken to have one.
        """
        share = self.unseen_rows / max(1, rows)
        ahead = w.ahead * max(1.0, w.look_blocks / self.unseen_blocks)
        for way, (useless, values) in enumerate(found):
            different = kinds(len(values), len(np.unique(values)))
            lasting = (useless / max(1, rows) / (1 + 1 / max(1.0, different))) ** (1 / filled)
            all_useless = share * useless * max(0.0, lasting - w.later * (1 - lasting))
            told = min(different, ahead * all_useless)
            saved = w.row_us * (ahead * all_useless - told)
            detection = _detection(
                w, self.unseen_blocks, self.unseen_rows - all_useless, shapes if way else 1
            )  # in the rows that would still come
            spent = w.value_us * told + ahead * (self.unseen_blocks * (w.news * w.block_us + w.keep_us) + detection)
            self.promises[way] = max(0.0, saved - w.margin * spent)
        self.rarely = 1 if any(self.promises) else min(w.rarely_most, 2 * self.rarely)
        self.unseen_blocks = self.unseen_rows = 0

    def turn(self, w: Weights) -> bool:
        """At the end of a block of rows: whether the side changes now from speaking to hushed or back."""
        single, whole = self.promises
        self.promises = [0.0, 0.0]
        over = self.blocks >= w.period_blocks or self.rows >= w.period_rows
        if over:
            self.blocks = self.rows = 0
            self.periods += 1
        if self.speaks:
            self.lattice |= whole > 0  # of what still comes although it speaks of single columns
            since = w.periods_unheard if self.told and self.heard_at < 0 else max(0, self.heard_at) + w.periods_least
            changes = over and self.periods >= since and self.saved < w.least_gain * self.spent
            if over:
                self.saved, self.spent = self.saved * 0.75, self.spent * 0.75
            if changes:
                self.pause = min(w.pause_most, self.pause * 4 or 1)
        else:
            changes = self.periods >= self.pause and max(single, whole) > 0
            self.lattice = whole > single
        if changes:
            self.speaks, self.told, self.periods, self.heard_at, self.saved, self.spent = (
                not self.speaks,
                False,
                0,
                -1,
                0.0,
                0.0,
            )
            self.rarely = 1
            self.changes += 1
        return changes


def _detection(w: Weights, blocks: int, rows: float, shapes: int) -> float:
    return (w.detect_us * blocks + w.look_us * rows) * shapes
