"""Which heralds a join heeds: those that spare more than they cost, decided by counts within the step.

While the first window fills, one herald is heeded and all others are collected and asked about a sample of the
composites; then the one that spares most beyond its cost is *elected*, and the others are let be; all of them as soon
as it is clear that even in full windows none would pay. After that one at a time is tried that promises to pay by what
it refused before, and one that does not pay is let be, and tried again later and later.

Invariant: decisions follow from counts and constants, never from a clock, so a node that is rebuilt from its input
takes the same ones at the same places. They change what is made when, never what is made in the end.
"""

from dataclasses import dataclass

import msgspec

from schemas.block import NO_WATERMARK
from topology.state.meeting import NEVER


@dataclass(frozen=True)
class Weights:
    """What heralds cost and spare, in microseconds of CPU as `make bench-jit` measured it, and how long to
    wait and see."""

    block_us: float = 300  # a herald's block, a row of it
    row_us: float = 1.0
    makes_us: float = 1_500  # more for a block that makes something: to find it, and to send it on by itself
    test_us: float = 0.1  # to ask about a composite
    spared_us: float = 0.7  # a composite that is not made, sent, stored and purged
    refuses: float = 0.9  # the share of composites that a herald is expected to refuse before it was tried
    weighed_blocks: int = 8  # of the node, between two looks after the election
    # of every block, after which one is elected at the latest, though the window is not over; one that is heeded
    # later begins with a gap
    elected_looks: int = 512
    # composites of a step that all heralds are asked about, and how many of these are enough to prefer another before
    # the window is over
    sample: int = 256
    samples_least: int = 1_000
    # of the window, before it is known what full windows would bring; and by which factor that may be wrong
    filled_least: float = 1 / 2
    hoped: float = 1.5
    margin: float = 1.3  # how many times its cost one must promise to spare before it is heeded
    preferred: float = 0.2  # of all that was found another must spare more
    effect_looks: int = 2  # for which one that is heeded is left to show its effect before another is tried
    judged_looks: int = 6  # in which it cost something before it is judged
    gain_least: float = 1.0  # how many times its cost it must spare
    kept: float = 15 / 16  # of sums, from look to look: a row of a sparse stream asks for much at once, and seldom
    pause_most: int = 1 << 12  # looks


EAGER = Weights(
    weighed_blocks=1,
    effect_looks=0,
    judged_looks=0,
    spared_us=1e9,
)  # for tests: all are heeded as soon as they can be
RESTLESS = Weights(  # for tests: heeds one after the other and lets them be every few blocks
    weighed_blocks=2,
    elected_looks=3,
    samples_least=2,
    effect_looks=1,
    judged_looks=1,
    gain_least=1e12,
    pause_most=2,
    spared_us=1e9,
)


class HeraldMemo(msgspec.Struct):
    """One herald: what was done so far, and whether it is heeded."""

    rows: int = 0  # of those blocks that were read
    blocks: int = 0
    skipped: int = 0  # blocks that were not
    tested: int = 0  # composites that were found
    refused: int = 0  # of these, that no row of it fitted then
    made: int = 0  # composites that were made when a row of it came
    makes: int = 0  # blocks that made any
    asked: int = 0  # composites of the sample, before the election
    unfit: int = 0  # of these, that no row of it fitted
    changes: int = 0
    since: int = NEVER  # from which moment composites must fit it
    until: int = NEVER  # and until which
    gap: int = (
        NO_WATERMARK  # rows of it that end by this time may be missing; composites that start by it need not fit it
    )
    drained: int = NO_WATERMARK  # once it is let be: the end of the last row that it may still be needed for
    collects: bool = True  # whether its rows are kept
    begun: int | None = None  # the time when it was first weighed since it is heeded
    is_full: bool = False  # whether a window has passed since: what it spares and costs counts from there
    looks: int = 0  # since the last change
    judged: int = 0  # of these, in which it cost something
    pause: int = 0  # looks that it is let be at least
    came: float = 0.0  # blocks of late, read or not
    cost: float = 0.0  # of these, if they were read
    spared: float = 0.0  # while it is heeded
    spent: float = 0.0
    seen: list[int] = msgspec.field(default_factory=lambda: [0] * 7)  # the counts at the last look

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

    def look(self, w: Weights, kept: float) -> None:
        """Count what happened since the last look, and what its blocks cost or would have."""
        now = [self.rows, self.blocks, self.skipped, self.tested, self.refused, self.made, self.makes]
        rows, blocks, skipped, tested, refused, made, makes = (
            new - old for new, old in zip(now, self.seen, strict=True)
        )
        self.seen, self.looks = now, self.looks + 1
        self.came = self.came * kept + blocks + skipped
        self.cost = (
            self.cost * kept
            + w.block_us * (blocks + skipped)
            + w.row_us * (rows + skipped * self.rows // max(1, self.blocks))
        )
        if self.heeded:
            self.judged += blocks > 0
            self.spared = self.spared * w.kept + w.spared_us * (refused - made)
            self.spent = (
                self.spent * w.kept + w.block_us * blocks + w.row_us * rows + w.makes_us * makes + w.test_us * tested
            )

    def promises(self, w: Weights, composites: float) -> float:
        """What it would spare of so many composites, beyond what it costs: it makes what it does not refuse."""
        makes = min(self.came, composites * (1 - self.refused_so_far(w)))
        return composites * (w.spared_us * self.refuses(w) - w.margin * w.test_us) - w.margin * (
            self.cost + w.makes_us * makes
        )

    def refused_so_far(self, w: Weights) -> float:
        """The share of composites that it refused for good, by the sample and by its own time."""
        asked = self.asked + self.tested
        return max(0, self.unfit + self.refused - self.made) / asked if asked else w.refuses

    def refuses(self, w: Weights) -> float:
        """The share that it is expected to refuse: less and less what it was so far, as time goes by."""
        return self.refused_so_far(w) + (w.refuses - self.refused_so_far(w)) * min(1.0, self.looks / w.pause_most)

    def heed(self, now: int) -> None:
        self.since, self.until, self.collects, self.begun, self.is_full = now, NEVER, True, None, False
        self.looks, self.changes = 0, self.changes + 1
        self.forget()

    def forget(self) -> None:
        """Judge it by what comes from now on."""
        self.judged, self.spared, self.spent = 0, 0.0, 0.0

    def let_be(self, w: Weights, now: int, latest: int) -> None:
        self.until, self.drained, self.looks, self.changes = now, latest, 0, self.changes + 1
        self.pause = min(w.pause_most, max(4 * w.judged_looks, 4 * self.pause))


class HeraldsMemo(msgspec.Struct):
    """All heralds of a join."""

    each: list[HeraldMemo] = msgspec.field(default_factory=list)
    elected: bool = False
    begun: int | None = None  # when the first rows started
    looks: int = 0
    found: int = 0  # composites of new rows, made or not
    seen: list[int] = msgspec.field(
        default_factory=lambda: [0, 0, 0]
    )  # composites made, found and left out at the last look
    made_of_late: float = 0.0  # sums over looks; until the election, of all of them
    found_of_late: float = 0.0

    def filled(self, look: "Look") -> float:
        """The share of the first window that has passed."""
        return 0.0 if self.begun is None else min(1.0, (look.time - self.begun) / max(1, look.window))


@dataclass(frozen=True)
class Look:
    """What a join has done and where it is."""

    made: int  # composites so far
    now: int  # the next moment
    earliest: int  # the start of the oldest row stored
    latest: int  # the end of the longest-lived
    time: int  # the watermark
    window: int
    silenced: bool  # its consumer wants nothing for now
    avoided: int  # composites left out for its consumer so far


def weigh(w: Weights, memo: HeraldsMemo, look: Look) -> None:
    """Take a look, and decide. While the join makes nothing anyway, nothing is decided any more; what it would make
    counts for the election."""
    if memo.elected and look.silenced:
        return
    now = [look.made, memo.found, look.avoided]
    made, found, avoided = (new - old for new, old in zip(now, memo.seen, strict=True))
    memo.seen, memo.looks, kept = now, memo.looks + 1, w.kept if memo.elected else 1.0
    memo.made_of_late, memo.found_of_late = (
        memo.made_of_late * kept + made,
        memo.found_of_late * kept + found + avoided * look.silenced,
    )
    if memo.begun is None and look.time != NO_WATERMARK:
        memo.begun = look.earliest
    for herald in memo.each:
        herald.look(w, kept)
    if memo.elected:
        _judge(w, memo, look)
        _try(w, memo, look.now)
    else:
        _prefer(w, memo, look)


def _prefer(w: Weights, memo: HeraldsMemo, look: Look) -> None:
    """Before the election: heed the one that spares most, and none as soon as it is known that even in full windows
    none would pay."""
    filled = memo.filled(look)
    composites = (
        memo.found_of_late * 2 / max(filled, w.filled_least)
    )  # as many as there would have been if windows had been full from the beginning
    worth = [herald.promises(w, composites) for herald in memo.each]
    best = max(range(len(worth)), key=worth.__getitem__)
    hopeless = filled >= w.filled_least and all(herald.promises(w, w.hoped * composites) <= 0 for herald in memo.each)
    over = memo.looks >= w.elected_looks or filled >= 1 or hopeless
    current = next((k for k, h in enumerate(memo.each) if h.heeded), None)
    enough = over or memo.each[best].asked >= w.samples_least
    better = current is None or (enough and worth[best] - worth[current] > w.preferred * w.spared_us * composites)
    if best != current and better and worth[best] > 0 and memo.each[best].since == NEVER:
        memo.each[best].heed(look.now)
        if current is not None:
            memo.each[current].let_be(w, look.now, look.latest)
            memo.each[current].pause = w.judged_looks
    if over:
        memo.elected = True
        for herald, gain in zip(memo.each, worth, strict=True):
            if herald.heeded and gain <= 0:
                herald.let_be(w, look.now, look.latest)
            elif not herald.heeded:
                herald.looks, herald.pause = 0, max(herald.pause, w.judged_looks)
            herald.collects &= herald.since != NEVER


def _judge(w: Weights, memo: HeraldsMemo, look: Look) -> None:
    """One that is heeded is judged when the windows have filled: before, it has hardly anything to refuse."""
    for herald in memo.each:
        if not herald.heeded:
            continue
        if herald.begun is None:
            herald.begun = look.time
        elif not herald.is_full and look.time - herald.begun >= look.window:
            herald.is_full = True
            herald.forget()
        elif herald.is_full and herald.judged >= w.judged_looks and herald.spared < w.gain_least * herald.spent:
            herald.let_be(w, look.now, look.latest)


def _try(w: Weights, memo: HeraldsMemo, now: int) -> None:
    """Heed one more, if it would pay; not before the last one had its effect."""
    if any(herald.heeded and herald.looks < w.effect_looks for herald in memo.each):
        return
    gains = [h.promises(w, memo.made_of_late) if h.since == NEVER and h.looks >= h.pause else 0.0 for h in memo.each]
    if max(gains) > 0:
        memo.each[gains.index(max(gains))].heed(now)
