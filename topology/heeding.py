"""Which heralds a join heeds: those that spare more than they cost, decided by counts within the step.

At first heralds are collected and none is heeded. Then, one at a time, the cheapest is heeded that would pay if it refused most of what the join still makes. After a while what it refused for good is weighed against
what it cost; one that does not pay is let be, and tried again later and later. So a sparse stream is heeded first, because it costs next to nothing, and one that would only refuse what others refuse already is not
heeded at all.

Invariant: decisions follow from counts and constants, never from a clock, so a node that is rebuilt from its input takes the same ones at the same places. They change what is made when, never what is made in the end.
"""


import msgspec

from schemas.block import NO_WATERMARK
from topology.meeting import NEVER

BLOCK_US, ROW_US, TEST_US = 700, 5.0, 0.2  # a herald's block, a row of it, to ask it about a composite
SPARED_US = 3.0  # a composite that is not made, sent, stored and purged: about a third is time, the rest what it holds of memory
REFUSES = 0.9  # the share of composites that a herald is expected to refuse before it was tried
WEIGHED_BLOCKS = 16  # of the node, between two looks
COLLECTED_LOOKS = 8  # for which heralds are collected that are not heeded yet; one that is heeded later begins with a gap
EFFECT_LOOKS = 2  # for which one that is heeded is left to show its effect before another is tried
JUDGED_LOOKS = 8  # in which it could refuse something before it is judged
GAIN_LEAST = 1.0  # how many times its cost it must spare
PAUSE_MOST = 1 << 12  # looks
RESTLESS = {  # for tests: heeds one after the other and lets them be every few blocks
    "WEIGHED_BLOCKS": 2, "COLLECTED_LOOKS": 2, "EFFECT_LOOKS": 1, "JUDGED_LOOKS": 1, "GAIN_LEAST": 1e12, "PAUSE_MOST": 2, "SPARED_US": 1e9,
}  # fmt: skip


class HeraldMemo(msgspec.Struct):
    """One herald: what was done so far, and whether it is heeded."""

    rows: int = 0  # of those blocks that were read
    blocks: int = 0
    skipped: int = 0  # blocks that were not
    tested: int = 0  # composites that were found
    refused: int = 0  # of these, that no row of it fitted then
    made: int = 0  # composites that were made when a row of it came
    changes: int = 0
    since: int = NEVER  # from which moment composites must fit it
    until: int = NEVER  # and until which
    gap: int = NO_WATERMARK  # rows of it that end by this time may be missing; composites that start by it need not fit it
    drained: int = NO_WATERMARK  # once it is let be: the end of the last row that it may still be needed for
    collects: bool = True  # whether its rows are kept
    looks: int = 0  # since the last change
    judged: int = 0  # of these, in which it could refuse something
    pause: int = 0  # looks that it is let be at least
    spared: float = 0.0
    spent: float = 0.0
    seen: list[int] = msgspec.field(default_factory=lambda: [0] * 6)  # the counts at the last look

    @property
    def heeded(self) -> bool:
        return self.since != NEVER and self.until == NEVER

    @property
    def is_plain(self) -> bool:
        """Whether all composites must fit it, whenever their rows came."""
        return self.since == 0 and self.until == NEVER and self.gap == NO_WATERMARK

    def hear(self, rows: int) -> None:
        self.rows, self.blocks = self.rows + rows, self.blocks + 1

    def skip(self, end: int) -> None:
        self.skipped += 1
        self.gap = max(self.gap, end)

    def test(self, asked: int, refused: int) -> None:
        self.tested, self.refused = self.tested + asked, self.refused + refused

    def purge(self, horizon: int, window: int) -> int:
        """The join needs its own rows from a horizon on; gives that of the herald's."""
        if self.until != NEVER and horizon > self.drained:  # composites that must fit it are gone
            self.since = self.until = NEVER
            self.collects = False
        return horizon - window if self.collects else NEVER

    def look(self) -> tuple[int, int]:
        """Count what happened since the last look; gives how many blocks came, and about how many rows."""
        now = [self.rows, self.blocks, self.skipped, self.tested, self.refused, self.made]
        rows, blocks, skipped, tested, refused, made = (new - old for new, old in zip(now, self.seen, strict=True))
        self.seen, self.looks = now, self.looks + 1
        if self.heeded:
            self.judged += tested > 0
            self.spared = self.spared * 0.75 + SPARED_US * (refused - made)
            self.spent = self.spent * 0.75 + BLOCK_US * blocks + ROW_US * rows + TEST_US * tested
        elif not self.changes and self.looks >= COLLECTED_LOOKS:
            self.collects = False
        return blocks + skipped, rows + skipped * self.rows // max(1, self.blocks)

    def heed(self, now: int) -> None:
        self.since, self.until, self.collects = now, NEVER, True
        self.looks, self.judged, self.spared, self.spent, self.changes = 0, 0, 0.0, 0.0, self.changes + 1

    def let_be(self, now: int, latest: int) -> None:
        self.until, self.drained, self.looks, self.changes = now, latest, 0, self.changes + 1
        self.pause = min(PAUSE_MOST, max(4 * JUDGED_LOOKS, 4 * self.pause))


class HeraldsMemo(msgspec.Struct):
    """All heralds of a join."""

    each: list[HeraldMemo] = msgspec.field(default_factory=list)
    made: int = 0  # composites the join had made at the last look


def weigh(memo: HeraldsMemo, made: int, now: int, latest: int) -> None:
    """Take a look. `made` are the join's composites so far, `now` is the next moment, `latest` the end of the longest-lived row stored."""
    fresh, memo.made = made - memo.made, made
    best: tuple[float, HeraldMemo] | None = None
    for herald in memo.each:
        blocks, rows = herald.look()
        if herald.heeded:
            if herald.judged >= JUDGED_LOOKS and herald.spared < GAIN_LEAST * herald.spent:
                herald.let_be(now, latest)
            continue
        cost = BLOCK_US * blocks + ROW_US * rows + TEST_US * fresh
        if herald.since == NEVER and herald.looks >= herald.pause and SPARED_US * REFUSES * fresh > cost and (best is None or cost < best[0]):
            best = cost, herald
    if best is not None and all(herald.looks >= EFFECT_LOOKS for herald in memo.each if herald.heeded):
        best[1].heed(now)
