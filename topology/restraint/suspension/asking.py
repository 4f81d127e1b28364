"""The consumer's half of feedback (JIT: Process_Input, Identify_MNS): what it tells its producers not to make, and asks
for again.

- *arrive*: rows that match a suspended sub-tuple of another input ask for it again, before anything else.
- *detect*: rows without a partner are searched for minimal non-demanded sub-tuples, which are suspended at the
  producer.
- *answered*, *polled*: what producers say to it.

Invariant: as long as a producer may leave something out for our sake, it stands in a `Demand`; a partner is kept until
what it asked for has come (`hold`).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.block import Composites, FromNode, Header, Reached, Release, Resume, ResumeDone, Suspend
from schemas.rows import I64, U64, Mask, Rows
from topology.plan.shapes import Shape
from topology.restraint.detection import (
    are_few,
    missing,
    not_wanted,
    together,
    whole_without_partner,
    without_partner,
)
from topology.restraint.interface import FOREVER, Ground
from topology.restraint.suspension.demand import NO_PARTNER, NOT_WANTED, Demand, Ticket
from topology.restraint.suspension.memo import FeedbackMemo
from topology.restraint.suspension.policy import Weights
from topology.restraint.suspension.suspended import Suspended
from topology.restraint.suspension.wire import pack, unpack
from topology.restraint.tables import bits_of, entries_of
from topology.state.hashing import sample, shape_hash
from topology.state.window_state import Run

SAMPLE_ROWS = 2_000  # of a block that is looked at by a hushed side
Answer = tuple[int, int]  # consumer partition, its ticket


class Asking:
    """All inputs of a node that come from joins."""

    def __init__(
        self,
        ground: Ground,
        memo: FeedbackMemo,
        demands: Sequence[Demand | None],
        suspended: Suspended,
        weights: Weights,
        rows_least: int,
    ) -> None:
        self.ground, self.memo, self.demands, self.suspended = ground, memo, demands, suspended
        self.weights, self._rows_least = weights, rows_least
        # Per input: which of our own shapes are passed on to its producer, and as which of its.
        self.passed = [
            {}
            if demand is None
            else {
                i: k
                for i, table in enumerate(suspended.tables)
                for k, shape in enumerate(demand.shapes)
                if shape.columns == table.shape.columns and table.shape.sides[side] and any(shape.sides)
            }
            for side, demand in enumerate(demands)
        ]
        # Shapes of which both inputs speak: (input, shape) -> the same on the other one.
        self._mirrored = {
            (side, i): (shape.other, k)
            for side in range(len(demands))
            for i, shape in enumerate(self._shapes(side))
            for k, twin in enumerate(self._shapes(shape.other))
            if twin.columns == shape.opposite and twin.opposite == shape.columns
        }
        self._empty_shapes = [
            (side, i, shape.other)
            for side in range(len(demands))
            for i, shape in enumerate(self._shapes(side))
            if not shape.columns and shape.opposite is not None and not self._comes_often(shape.other)
        ]
        self.done: list[Answer] = []  # to be answered behind the rows of this step

    # -- what it knows

    @property
    def speaking(self) -> Iterator[tuple[int, Demand]]:
        """The inputs that come from joins."""
        return ((side, demand) for side, demand in enumerate(self.demands) if demand is not None)

    def _shapes(self, side: int) -> tuple[Shape, ...]:
        demand = self.demands[side] if side >= 0 else None
        return () if demand is None else demand.shapes

    @property
    def hold(self) -> int:
        """The clock stands still here while resumes are open."""
        return min((t.hold for tickets in self.memo.tickets for t in tickets), default=FOREVER)

    def reached(self, side: int) -> int:
        """Rows of an input that end before this are not wanted: not here, nor further down."""
        return min(self.ground.others_reached(side), self.suspended.kept_from)

    def speaks(self, side: int) -> bool:
        return self.memo.weighed is None or self.memo.weighed[side].speaks

    def _comes_often(self, side: int) -> bool:
        """Whether rows of an input are to be expected: of a stream, not of a table or a join."""
        return self.ground.node.inputs[side].is_source and not self.ground.is_static[side]

    # -- asking again

    def arrive(self, side: int, run: Run) -> None:
        """Ask again for what these rows are the first partners of."""
        for other, demand in self.speaking:
            if other == side or demand.is_empty:
                continue
            asked = []
            for i, shape in enumerate(demand.shapes):
                if shape.other == side and len(demand.tables[i]):
                    asked.append((i, np.unique(shape_hash(run.rows, shape.opposite_names))))
            # What our consumer asked for may need these too: it is answered when they have come.
            pending = list(dict.fromkeys(a for tickets in self.memo.tickets for t in tickets for a in t.answers))
            self.ask(other, asked, NO_PARTNER, pending, self.suspended.kept_from)

    def ask(self, side: int, asked: list[tuple[int, U64]], why: int, answers: list[Answer], kept_from: int) -> bool:
        """Resume values at a producer, and keep what `kept_from` kept until they have come; whether a ticket was opened
        for it."""
        demand = self.demands[side]
        assert demand is not None
        ticket = (self.ground.now + 1) << 20 | side  # one a step and input
        ended = [(i, demand.stop(i, hashes, why, ticket)) for i, hashes in asked]
        ended = [(i, e) for i, e in ended if len(e)]
        if not ended:
            return False
        told = int(np.bitwise_or.reduce(np.concatenate([e["told"] for _, e in ended])))
        demand.tickets.append(Ticket(ticket, told, min(self.ground.watermark, kept_from), answers))
        self.memo.values_resumed += sum(len(e) for _, e in ended)
        for p in bits_of(told):
            entries = [(i, e["hash"][e["told"] & np.uint64(1 << p) != 0]) for i, e in ended]
            # What was kept until now for the sake of our consumer is still wanted, though nothing may be suspended any
            # more.
            reached = min(self.reached(side), kept_from)
            self._tell(side, p, Resume, [(i, entries_of(h)) for i, h in entries if len(h)], reached, ticket)
        return True

    def asked_already(self, i: int, hashes: U64, answer: Answer) -> bool:
        """Whether values are on their way because another partition of our consumer asked for them: this one is
        answered when they have come, too."""
        found = False
        for side, demand in self.speaking:
            passed = self.passed[side]
            open_ = demand.open_for(passed[i], hashes) if i in passed else set()
            for ticket in demand.tickets:
                if ticket.id in open_:
                    ticket.answers.append(answer)
                    found = True
        return found

    def is_passed_on(self, i: int, hashes: U64) -> Mask:
        """Which values of a shape of ours some producer leaves out for our consumer's sake."""
        found = np.zeros(len(hashes), np.bool_)
        for side, demand in self.speaking:
            if i in self.passed[side]:
                found |= demand.is_told(self.passed[side][i], hashes)
        return found

    def resume_all(self, side: int) -> None:
        """All but the empty sub-tuple, which costs nothing while it lasts."""
        demand = self.demands[side]
        assert demand is not None
        asked = [(i, demand.hashes(i)) for i, shape in enumerate(demand.shapes) if shape.columns]
        self.ask(side, asked, NO_PARTNER | NOT_WANTED, [], self.suspended.kept_from)

    # -- suspending

    def detect(self, side: int, run: Run, sender_partition: int) -> None:
        """Suspend the minimal sub-tuples of these rows that have no partner (Identify_MNS), and again what waits here
        anyway."""
        if self.demands[side] is None or not self.speaks(side):
            return
        bloom = self.memo.weighed is not None and not self.memo.weighed[side].lattice
        for i, at, shown in without_partner(
            self._own(side, run), run.rows, self.ground.states, bloom, self._rows_least
        ):
            _, first = np.unique(shown, return_index=True)
            self._suspend(side, i, run.rows.take(at[first]), NO_PARTNER, None)
        for i, at, shown in self._not_wanted(side, run):
            _, first = np.unique(shown, return_index=True)
            self._suspend(side, i, run.rows.take(at[first]), NOT_WANTED, sender_partition)

    def _own(self, side: int, run: Run) -> list[tuple[int, Shape]]:
        """The shapes of an input that may be suspended for want of a partner now: not of one in a table that is still
        loading.

        And not everything for want of any row of a stream, if the values of these rows repeat: the next row of the
        stream would ask for everything that was left out in a window, though it has a use for one value.
        """
        found = [
            (i, s)
            for i, s in enumerate(self._shapes(side))
            if s.opposite is not None and not self.ground.is_loading(s.other)
        ]
        if any(not s.columns for _, s in found) and are_few(run.hashes, self._rows_least):
            found = [(i, s) for i, s in found if s.columns or not self._comes_often(s.other)]
        return found

    def detect_empty(self) -> None:
        """While another join has made nothing, or a table is empty, nothing is wanted, whether or not rows come: those
        before our producer need not be made either.

        It is said at most once in a window; with `auto`, at most so often that it can cost no more than a small share
        of the work.
        """
        for side, i, other in self._empty_shapes:
            demand = self.demands[side]
            assert demand is not None
            if len(demand.tables[i]) or not self.ground.states[other].is_empty or self.ground.is_loading(other):
                continue
            if self.memo.weighed is None or self.memo.weighed[side].may_say_empty(
                self.weights, self.ground.counts.blocks_in, self.ground.partitions
            ):
                self.say(side, i, entries_of(np.zeros(1, np.uint64)), NO_PARTNER, None)

    def _not_wanted(self, side: int, run: Run) -> Iterator[tuple[int, I64, U64]]:
        return not_wanted([(self.suspended.tables[i], mine) for i, mine in self.passed[side].items()], run)

    def _suspend(self, side: int, i: int, rows: Rows, why: int, only: int | None) -> None:
        """Tell the producer not to make these sub-tuples: one row of each, in order of their hashes."""
        shape = self._shapes(side)[i]
        entries = entries_of(shape_hash(rows, shape.names))
        if not any(shape.sides):
            producer = self.ground.plan.node(self.ground.node.inputs[side].name)
            entries["left"] = shape_hash(rows, shape.lead(producer.inputs)[1])
        self.say(side, i, entries, why, only)

    def say(self, side: int, i: int, entries: npt.NDArray[Any], why: int, only: int | None) -> None:
        """Note what the producer must not make; `speak` sends it."""
        demand = self.demands[side]
        assert demand is not None
        if why == NO_PARTNER and (side, i) in self._mirrored:
            other, twin = self._mirrored[side, i]
            across = self.demands[other]
            assert across is not None
            # Rows of the other input are on their way: wait and see.
            entries = entries[~across.is_open(twin, entries["hash"])]
        if not len(entries):
            return
        shape, count = demand.shapes[i], self.ground.partitions
        if only is not None:
            to = np.full(len(entries), 1 << only, np.uint64)
        elif shape.targets is not None:
            to = np.uint64(1) << (entries["hash"] % np.uint64(count))
        else:
            to = np.full(len(entries), (1 << count) - 1, np.uint64)
        self.memo.values_suspended += demand.say(i, entries, why, to)

    def speak(self) -> None:
        """Send what was to be said: all of some steps in one block, because it goes to every partition."""
        for side, demand in self.speaking:
            for p, news in demand.take_unsent():
                self._tell(
                    side, p, Suspend, [(i, entries_of(t["hash"], t["left"])) for i, t in news], self.reached(side)
                )

    def report(self) -> None:
        """Tell producers that leave something out how far the other inputs are."""
        for side, demand in self.speaking:
            now = self.reached(side)
            if now - self.memo.reported[side] >= self.ground.watermark_step and (told := demand.told_anyone()):
                self.memo.reported[side] = now
                for p in bits_of(told):
                    self._tell(side, p, Reached, [], now)

    def _tell(
        self, side: int, partition: int, kind: type[FromNode], entries: list[tuple[int, Any]], *said: int
    ) -> None:
        rows = pack(entries) if entries else None
        self.ground.voice.to_producer(side, partition, kind, rows, *said)
        self.memo.blocks_sent += 1
        if self.memo.weighed is not None:
            self.memo.weighed[side].paid(self.weights, kind is Resume, 0 if rows is None else len(rows))

    # -- what producers say

    def take(self, side: int, header: FromNode, rows: Rows) -> None:
        """A producer partition has sent what a ticket asked for, has forgotten values, or asks about some."""
        demand = self.demands[side]
        assert demand is not None
        if isinstance(header, Release):
            for i, entries in unpack(rows):
                demand.released(i, np.unique(entries["hash"]), header.partition)
        elif isinstance(header, ResumeDone):
            closed = demand.answered(header.ticket, header.partition)
            for answer in closed.answers if closed is not None else ():
                if not any(answer in t.answers for tickets in self.memo.tickets for t in tickets):
                    self.done.append(answer)
        else:
            self._polled(side, demand, rows, header.partition)

    def _polled(self, side: int, demand: Demand, rows: Rows, voter: int) -> None:
        """A producer partition heard from others what we may not want either: say so if that is right, whether or not
        such rows came here."""
        for i, entries in unpack(rows):
            shape = demand.shapes[i]
            if shape.opposite is not None and not self.ground.is_loading(shape.other):
                found = missing(shape, entries["hash"], self.ground.states[shape.other])
                self.say(side, i, entries[found], NO_PARTNER, voter)
            for own, passed in self.passed[side].items():
                if passed == i:
                    found = self.suspended.tables[own].covers(entries["hash"])
                    self.say(side, i, entries[found], NOT_WANTED, voter)

    # -- whether it pays

    def weigh(self, side: int, run: Run, header: Header) -> None:
        """With `auto`, at the end of a block of rows: does feedback on this input pay?"""
        demand = self.demands[side]
        if self.memo.weighed is None or demand is None or not isinstance(header, Composites):
            return
        w, weighed, counts = self.weights, self.memo.weighed[side], self.ground.counts
        news = weighed.heard(w, header.partition, header.spared, self.ground.partitions)
        if news:
            self.memo.spared_above += int(news * demand.passed_on * counts.rows_out / max(1, counts.rows_in[side]))
        filled = weighed.filled(w, self.ground.others_reached(side), self.ground.window)
        shapes = sum(shape.opposite is not None for shape in demand.shapes)
        if weighed.takes(w, len(run), shapes):
            few = run if len(run) <= SAMPLE_ROWS else run.take(sample(len(run), SAMPLE_ROWS))
            unwanted, own = list(self._not_wanted(side, few)), self._own(side, run)
            single = [
                *without_partner(own, few.rows, self.ground.states, bloom=True, rows_least=self._rows_least),
                *unwanted,
            ]
            whole = [*whole_without_partner(own, few.rows, self.ground.states), *unwanted]
            weighed.looked(w, len(few), shapes, [together(len(few), found) for found in (single, whole)], filled)
        if weighed.turn(w) and not weighed.speaks:
            self.resume_all(side)
