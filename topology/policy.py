"""Whether feedback pays on one input of a node: what it saves and costs is counted, weighed and decided within the step.

While a side *speaks*, its producer says with every block how many pairs it has left out so far, and the node counts what that took: blocks about demand,
values, rows looked at. While it is *hushed*, now and then a block of rows is looked at as if it spoke: how many rows have no partner, and how many values not seen
before they show, for each way of detection (single columns by Bloom filters, or the whole lattice). After some blocks the two sums decide. A side that began to speak is not judged before its word had time to be heard, and one that was hushed
waits longer each time before it may speak again.

Invariant: decisions follow from counts and constants, never from a clock, so a node that is rebuilt from its input takes the same ones at the same
places. The constants are what the benchmarks measured; only their ratios matter.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from schemas.rows import U64
from topology.suspended import among

BLOCK_US, VALUE_US, ROW_US = 3000, 10, 1.5  # a block about demand, a value in it, a composite from making to purging
DETECT_US, LOOK_US = 700, 0.1  # to look through a block for what has no partner, and each row of it
LOOK_BLOCKS, LOOK_ROWS = 16, 50_000  # a hushed side is looked at after so many blocks or rows
PERIOD_BLOCKS, PERIOD_ROWS = 32, 100_000  # between decisions
RARELY_MOST = 32
URGENT_US = 10_000  # a single look that shows so much to save decides at once
PERIODS_LEAST = 4  # before a side that was heard is judged: at first everything is news
PERIODS_UNHEARD = 64  # before one is judged that has said something and has had no effect at all
PAUSE_MOST = 256  # periods
VALUES_MOST = 1024  # remembered, of one in eight
RESTLESS: dict[str, Any] = {  # for tests: changes its mind every few blocks
    "PERIOD_BLOCKS": 2, "LOOK_BLOCKS": 1, "PERIODS_LEAST": 1, "PERIODS_UNHEARD": 2, "PAUSE_MOST": 2, "BLOCK_US": 0.1, "VALUE_US": 0.1, "DETECT_US": 0.1, "URGENT_US": 1,
}  # fmt: skip


class Look(msgspec.Struct):
    """What one way of detection would save and cost a hushed side, in microseconds of the machine."""

    saved: float = 0.0
    spent: float = 0.0
    seen: bytes = b""  # hashes of the values it found, sorted, of one in eight

    def add(self, share: float, blocks: int, useless: int, values: U64) -> None:
        """A block that stands for `blocks` blocks, and for `share` times its rows: so many without a use, which show these values."""
        few = np.unique(values[values % np.uint64(8) == 0])
        known = np.frombuffer(self.seen, np.uint64)
        fresh = few[~among(few, known)]
        if len(fresh):
            together = np.sort(np.concatenate([known, fresh]))
            self.seen = (together if len(together) <= VALUES_MOST else fresh[:VALUES_MOST]).tobytes()
        told = 8 * len(fresh)
        self.saved += share * ROW_US * max(0, useless - told)
        self.spent += blocks * BLOCK_US * min(1, told) + share * VALUE_US * told

    @property
    def pays(self) -> bool:
        return self.saved > 2 * self.spent


class Weighed(msgspec.Struct):
    """One side's sums; part of the node's memo."""

    speaks: bool = False
    lattice: bool = False  # how it detects: over the whole lattice, or single columns by Bloom filters
    blocks: int = 0  # since the last decision
    rows: int = 0
    unseen_blocks: int = LOOK_BLOCKS  # since the last look
    unseen_rows: int = 0
    rarely: int = 1  # how many times the usual distance is between looks: more after each that shows nothing to save
    looks: list[Look] = msgspec.field(default_factory=lambda: [Look(), Look()])  # of a hushed side: single columns, and whole keys
    saved: float = 0.0  # by a side that speaks
    spent: float = 0.0
    periods: int = 0  # since the last change
    heard_at: int = -1  # the period in which the producer first left something out
    told: bool = False  # whether it has said anything since it began to speak
    pause: int = 0  # periods that it stays hushed at least
    avoided: dict[int, int] = msgspec.field(default_factory=dict)  # producer partition -> pairs it had left out when last heard
    changes: int = 0

    def heard(self, partition: int, avoided: int, of: int) -> None:
        """A producer partition has left out so many pairs for all `of` partitions of ours."""
        news = avoided - self.avoided.get(partition, avoided)
        self.avoided[partition] = avoided
        if self.speaks and news > 0:
            self.saved += ROW_US * news / of
            if self.heard_at < 0:
                self.heard_at = self.periods

    def paid(self, values: int) -> None:
        """A block about demand with so many values was sent to the producer."""
        if self.speaks:
            self.told |= values > 0
            self.spent += BLOCK_US + VALUE_US * values

    def takes(self, rows: int, shapes: int) -> bool:
        """A block of so many rows has come, to be searched for so many shapes; whether it is to be looked at: by a hushed side, or for
        what the whole lattice would find."""
        self.blocks, self.rows = self.blocks + 1, self.rows + rows
        self.unseen_blocks, self.unseen_rows = self.unseen_blocks + 1, self.unseen_rows + rows
        single = DETECT_US + LOOK_US * rows
        whole = single * shapes
        if self.speaks:
            self.spent += whole if self.lattice else single
        self.looks[0].spent += single
        self.looks[1].spent += whole
        if self.speaks and self.lattice:
            return False
        return self.unseen_blocks >= LOOK_BLOCKS * self.rarely or self.unseen_rows >= LOOK_ROWS * self.rarely

    def looked(self, rows: int, found: Sequence[tuple[int, U64]]) -> None:
        """By each way of detection: of the rows of a block so many have no use, and they show these values."""
        for look, (useless, values) in zip(self.looks, found, strict=True):
            look.add(self.unseen_rows / max(1, rows), self.unseen_blocks, useless, values)
        self.unseen_blocks = self.unseen_rows = 0
        self.rarely = 1 if any(look.saved > look.spent for look in self.looks) else min(RARELY_MOST, 2 * self.rarely)

    def turn(self) -> bool:
        """At the end of a block of rows: whether the side changes now from speaking to hushed or back."""
        urgent = not self.speaks and any(look.pays and look.saved > URGENT_US for look in self.looks)
        if self.blocks < PERIOD_BLOCKS and self.rows < PERIOD_ROWS and not urgent:
            return False
        self.blocks = self.rows = 0
        self.periods += 1
        single, whole = self.looks
        if self.speaks:
            since = PERIODS_UNHEARD if self.told and self.heard_at < 0 else max(0, self.heard_at) + PERIODS_LEAST
            changes = self.periods >= since and self.saved < self.spent
            self.saved, self.spent = self.saved * 0.75, self.spent * 0.75
            self.lattice |= whole.pays and whole.saved > URGENT_US  # of what still comes although it speaks of single columns
            if changes:
                self.pause = min(PAUSE_MOST, self.pause * 4 or 1)
        else:
            changes = self.periods >= self.pause and (single.pays or whole.pays)
            self.lattice = whole.pays and whole.saved - whole.spent > single.saved - single.spent
        single.saved = single.spent = whole.saved = whole.spent = 0.0
        if changes:
            self.speaks, self.told, self.periods, self.heard_at, self.saved, self.spent = not self.speaks, False, 0, -1, 0.0, 0.0
            self.looks = [Look(), Look()]
            self.changes += 1
        return changes
