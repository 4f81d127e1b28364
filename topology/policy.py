"""Whether feedback pays on one input of a node: what it saves and costs is counted, weighed and decided within the step.

While a side *speaks*, its producer says with every block how many pairs it has left out so far, and the node counts what that took: blocks about demand,
values, rows looked at. While it is *hushed*, every sixteenth block of rows is looked at as if it spoke: how many rows have no partner, and how many values not seen
before they show. After some blocks the two sums decide. A side that was hushed waits longer each time before it may speak again.

Invariant: decisions follow from counts and constants, never from a clock, so a node that is rebuilt from its input takes the same ones at the same
places. The constants are what the benchmarks measured; only their ratios matter.
"""

from typing import Any

import msgspec
import numpy as np

from schemas.rows import U64
from topology.suspended import among

BLOCK_US, VALUE_US, ROW_US, LOOK_US = 1500, 10, 2, 0.1  # a block about demand, a value in it, a composite from making to purging, a row looked at
SAMPLE = 16  # of the blocks of a hushed side, one is looked at
PERIOD = 32  # blocks of rows between decisions
PERIODS_LEAST = 4  # before a side that began to speak is judged: at first everything is news
PAUSE_MOST = 256  # periods
VALUES_MOST = 1024  # remembered, of one in eight
RESTLESS: dict[str, Any] = {"PERIOD": 2, "SAMPLE": 1, "PERIODS_LEAST": 1, "PAUSE_MOST": 2, "BLOCK_US": 1}  # for tests: changes its mind every few blocks


class Weighed(msgspec.Struct):
    """One side's sums, in microseconds of the machine; part of the node's memo."""

    speaks: bool = False
    blocks: int = 0
    saved: float = 0.0
    spent: float = 0.0
    periods: int = 0  # since the last change
    pause: int = 1  # periods that it stays hushed at least
    avoided: dict[int, int] = msgspec.field(default_factory=dict)  # producer partition -> pairs it had left out when last heard
    seen: bytes = b""  # hashes of values without a partner, sorted
    changes: int = 0

    def heard(self, partition: int, avoided: int, of: int) -> None:
        """A producer partition has left out so many pairs for all `of` partitions of ours."""
        before = self.avoided.get(partition, avoided)
        self.avoided[partition] = avoided
        if self.speaks:
            self.saved += ROW_US * max(0, avoided - before) / of

    def paid(self, blocks: int = 0, values: int = 0, rows: int = 0) -> None:
        if self.speaks:
            self.spent += BLOCK_US * blocks + VALUE_US * values + LOOK_US * rows

    @property
    def looks(self) -> bool:
        """Whether this block of a hushed side is looked at."""
        return self.blocks % SAMPLE == 0

    def looked(self, useless: int, values: U64) -> None:
        """A block of a hushed side has so many rows without a use, which show these values."""
        few = np.unique(values[values % np.uint64(8) == 0])
        known = np.frombuffer(self.seen, np.uint64)
        fresh = few[~among(few, known)]
        if len(fresh):
            together = np.sort(np.concatenate([known, fresh]))
            self.seen = (together if len(together) <= VALUES_MOST else fresh[:VALUES_MOST]).tobytes()
        told = 8 * len(fresh)
        self.saved += SAMPLE * ROW_US * max(0, useless - told)
        self.spent += SAMPLE * (BLOCK_US * min(1, told) + VALUE_US * told)

    def turn(self) -> bool:
        """At the end of a block of rows: whether the side changes now from speaking to hushed or back."""
        self.blocks += 1
        if self.blocks % PERIOD:
            return False
        self.periods += 1
        ready = self.periods >= (PERIODS_LEAST if self.speaks else self.pause)
        worse = self.saved < self.spent if self.speaks else self.saved > 2 * self.spent and self.saved > 0
        if self.speaks:
            self.saved, self.spent = self.saved * 0.75, self.spent * 0.75
        else:
            self.saved = self.spent = 0.0
        if not (ready and worse):
            return False
        if self.speaks:
            self.pause = min(PAUSE_MOST, self.pause * 4)
        self.speaks, self.periods, self.saved, self.spent, self.seen = not self.speaks, 0, 0.0, 0.0, b""
        self.changes += 1
        return True
