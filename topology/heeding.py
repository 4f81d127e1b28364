"""Which heralds a join heeds: those that spare more than they cost, decided by counts within the step.

While the first window fills, one herald is heeded and all others are collected and asked about a sample of the composites; then the one that spares most beyond its cost is *elected*, and the others are let be.
After that one at a time is tried that would pay if it refused most of what the join still makes, and one that does not pay is let be, and tried again later and later.

Invariant: decisions follow from counts and constants, never from a clock, so a node that is rebuilt from its input takes the same ones at the same places. They change what is made when, never what is made in the end.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from schemas.block import NO_WATERMARK
from topology.meeting import NEVER

BLOCK_US, ROW_US, TEST_US = 800, 3.5, 0.2  # a herald's block and the smaller ones it leads to, a row of it, to ask it about a composite
SPARED_US = 1.5  # a composite that is not made, sent, stored and purged: less than half of it is time, the rest is what it holds of memory
REFUSES = 0.9  # the share of composites that a herald is expected to refuse before it was tried
WEIGHED_BLOCKS = 8  # of the node, between two looks
ELECTED_LOOKS = 64  # after which one is elected at the latest, though the window is not over; one that is heeded later begins with a gap
SAMPLE, SAMPLES_LEAST = 256, 1_000  # composites of a step that all heralds are asked about, and how many of these are enough to prefer another before the window is over
PREFERRED = 0.1  # of all that was found another must spare more, before the election
EFFECT_LOOKS = 2  # for which one that is heeded is left to show its effect before another is tried
JUDGED_LOOKS = 6  # in which it cost something before it is judged
GAIN_LEAST = 1.0  # how many times its cost it must spare
KEPT = 15 / 16  # of sums, from look to look: a row of a sparse stream asks for much at once, and seldom
PAUSE_MOST = 1 << 12  # looks
EAGER: dict[str, Any] = {"WEIGHED_BLOCKS": 1, "EFFECT_LOOKS": 0, "SPARED_US": 1e9}  # for tests: all are heeded at once
RESTLESS: dict[str, Any] = {  # for tests: heeds one after the other and lets them be every few blocks
    "WEIGHED_BLOCKS": 2, "ELECTED_LOOKS": 3, "SAMPLES_LEAST": 2, "EFFECT_LOOKS": 1, "JUDGED_LOOKS": 1, "GAIN_LEAST": 1e12, "PAUSE_MOST": 2, "SPARED_US": 1e9,
}  # fmt: skip


class HeraldMemo(msgspec.Struct):
    """One herald: what was done so far, and whether it is heeded."""

    rows: int = 0  # of those blocks that were read
    blocks: int = 0
    skipped: int = 0  # blocks that were not
    tested: int = 0  # composites that were found
    refused: int = 0  # of these, that no row of it fitted then
    made: int = 0  # composites that were made when a row of it came
    asked: int = 0  # composites of the sample, before the election
    unfit: int = 0  # of these, that no row of it fitted
    changes: int = 0
    since: int = NEVER  # from which moment composites must fit it
    until: int = NEVER  # and until which
    gap: int = NO_WATERMARK  # rows of it that end by this time may be missing; composites that start by it need not fit it
    drained: int = NO_WATERMARK  # once it is let be: the end of the last row that it may still be needed for
    collects: bool = True  # whether its rows are kept
    begun: int | None = None  # the time when it was first weighed since it is heeded: it is judged a window later
    looks: int = 0  # since the last change
    judged: int = 0  # of these, in which it cost something
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

    def look(self, silenced: bool) -> tuple[int, int]:
        """Count what happened since the last look; gives how many blocks came, and about how many rows. While the join makes nothing anyway, a herald costs next to nothing."""
        now = [self.rows, self.blocks, self.skipped, self.tested, self.refused, self.made]
        rows, blocks, skipped, tested, refused, made = (new - old for new, old in zip(now, self.seen, strict=True))
        self.seen, self.looks = now, self.looks + 1
        if self.heeded and not silenced:
            self.judged += blocks > 0
            self.spared = self.spared * KEPT + SPARED_US * (refused - made)
            self.spent = self.spent * KEPT + BLOCK_US * blocks + ROW_US * rows + TEST_US * tested
        return blocks + skipped, rows + skipped * self.rows // max(1, self.blocks)

    @property
    def refuses(self) -> float:
        """The share of composites that it is expected to refuse: what the sample said, and less and less of that as time goes by."""
        said = self.unfit / self.asked if self.asked else REFUSES
        return said + (REFUSES - said) * min(1.0, self.looks / PAUSE_MOST)

    def heed(self, now: int) -> None:
        self.since, self.until, self.collects, self.begun = now, NEVER, True, None
        self.looks, self.judged, self.spared, self.spent, self.changes = 0, 0, 0.0, 0.0, self.changes + 1

    def let_be(self, now: int, latest: int) -> None:
        self.until, self.drained, self.looks, self.changes = now, latest, 0, self.changes + 1
        self.pause = min(PAUSE_MOST, max(4 * JUDGED_LOOKS, 4 * self.pause))


class HeraldsMemo(msgspec.Struct):
    """All heralds of a join."""

    each: list[HeraldMemo] = msgspec.field(default_factory=list)
    elected: bool = False
    begun: int | None = None  # the time at the first look
    looks: int = 0
    found: int = 0  # composites of new rows, made or not
    seen: list[int] = msgspec.field(default_factory=lambda: [0, 0])  # composites made and found at the last look


@dataclass(frozen=True)
class Look:
    """What a join has done and where it is."""

    made: int  # composites so far
    now: int  # the next moment
    latest: int  # the end of the longest-lived row stored
    time: int  # the watermark
    window: int
    silenced: bool  # its consumer wants nothing for now


def weigh(memo: HeraldsMemo, look: Look) -> None:
    """Take a look, and decide."""
    made, found = look.made - memo.seen[0], memo.found - memo.seen[1]
    memo.seen, memo.looks = [look.made, memo.found], memo.looks + 1
    if memo.begun is None and look.time != NO_WATERMARK:
        memo.begun = look.time
    costs = []
    for herald in memo.each:
        blocks, rows = herald.look(look.silenced)
        costs.append(BLOCK_US * blocks + ROW_US * rows + TEST_US * max(found, made))
    if not memo.elected:
        _prefer(memo, costs, found, look)
    elif not look.silenced:
        _judge(memo, look)
        _try(memo, costs, made, look.now)


def _prefer(memo: HeraldsMemo, costs: list[float], found: int, look: Look) -> None:
    """Before the election: heed the one that would have spared most of what was found since the last look."""
    over = memo.looks >= ELECTED_LOOKS or (memo.begun is not None and look.time - memo.begun >= look.window)
    worth = [SPARED_US * found * h.unfit / max(1, h.asked) - cost for h, cost in zip(memo.each, costs, strict=True)]
    best = max(range(len(worth)), key=worth.__getitem__)
    current = next((k for k, h in enumerate(memo.each) if h.heeded), None)
    enough = over or memo.each[best].asked >= SAMPLES_LEAST
    better = over or current is None or worth[best] - worth[current] > PREFERRED * SPARED_US * found
    if best != current and enough and better and worth[best] > 0 and memo.each[best].since == NEVER:
        memo.each[best].heed(look.now)
        if current is not None:
            memo.each[current].let_be(look.now, look.latest)
            memo.each[current].pause = 0
    if over:
        memo.elected = True
        for herald in memo.each:
            herald.collects &= herald.since != NEVER


def _judge(memo: HeraldsMemo, look: Look) -> None:
    """One that is heeded is judged when the windows have filled: before, it has hardly anything to refuse."""
    for herald in memo.each:
        if herald.heeded:
            herald.begun = look.time if herald.begun is None else herald.begun
            if look.time - herald.begun >= look.window and herald.judged >= JUDGED_LOOKS and herald.spared < GAIN_LEAST * herald.spent:
                herald.let_be(look.now, look.latest)


def _try(memo: HeraldsMemo, costs: list[float], made: int, now: int) -> None:
    """Heed one more, if it would pay; not before the last one had its effect."""
    if any(herald.heeded and herald.looks < EFFECT_LOOKS for herald in memo.each):
        return
    gains = [SPARED_US * h.refuses * made - cost if h.since == NEVER and h.looks >= h.pause else 0.0 for h, cost in zip(memo.each, costs, strict=True)]
    if max(gains) > 0:
        memo.each[gains.index(max(gains))].heed(now)
