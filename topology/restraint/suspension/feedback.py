"""Just-in-time processing at one join node: as a consumer it says what it has no partner for, as a producer it leaves
out what nobody wants.

Follows JIT (Process_Input, Identify_MNS, Suspend_Production, Resume_Production, Propagate_Feedback) over asynchronous
channels:

- *arrive*: rows that match a suspended sub-tuple of the other side ask for it again, before anything else.
- *detect*: rows without a partner are searched for minimal non-demanded sub-tuples, which are suspended at the
  producer.
- *suspended*, *resumed*: a producer takes its consumer's word, passes it on to its own producers, and on resume makes
  what it owes. It answers `resume-done` when its producers have answered too.
- *expire*: what no consumer can want any more is forgotten at both ends (`release`).

Invariant: results are those without feedback. Each pair is made once, at the first moment nobody has it suspended; a
partner is kept until what it asked for has come (`hold`); a producer keeps what it may owe until its consumer's other
side has passed it (`kept_from`).
"""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from schemas.block import NO_WATERMARK, Block, Header, Kind
from schemas.rows import I64, U64, Mask, Rows
from topology.plan.shapes import Shape, shape_hash, shapes_of
from topology.restraint.loading import is_loading, latest_end
from topology.restraint.suspension.border import OF_PRODUCER, changed_tables, is_feedback
from topology.restraint.suspension.demand import NO_PARTNER, NOT_WANTED, Demand, Ticket
from topology.restraint.suspension.detection import (
    are_few,
    missing,
    not_wanted,
    together,
    whole_without_partner,
    without_partner,
)
from topology.restraint.suspension.memo import FeedbackMemo
from topology.restraint.suspension.owed import owed_pairs
from topology.restraint.suspension.policy import Weighed
from topology.restraint.suspension.suspended import NOTHING_KEPT, Suspended, bits_of
from topology.state.hashing import sample
from topology.state.lookup import TICKET, entries_of, hidden_rows, pack, unpack, waiting_rows
from topology.state.window import COMPLETE
from topology.state.window_state import Run

if TYPE_CHECKING:
    from topology.join.partition import Effects, Partition

SAMPLE_ROWS = 2_000  # of a block that is looked at by a hushed side
KEPT_WINDOWS = 4  # how long a value stays suspended behind its last row: most come again
PARTITIONS_MOST = 64  # sets of partitions are words


class Feedback:
    def __init__(self, join: "Partition", memo: FeedbackMemo, auto: bool = False) -> None:
        self.join, self.memo = join, memo
        more = len(join.node.inputs) - len(memo.tickets)
        memo.tickets += [[] for _ in range(more)]
        memo.told += [NO_WATERMARK] * more
        if auto and memo.weighed is None:
            memo.weighed = [Weighed() for _ in join.node.inputs]
        shapes = shapes_of(join.plan)
        self.suspended = Suspended.of(shapes.get(join.node.id, ()), join.partitions, memo.reached)
        self.demands: list[Demand | None] = [
            None if side.is_source else Demand(shapes[side.name], join.partitions, memo.tickets[i])
            for i, side in enumerate(join.node.inputs)
        ]
        # Per side: which of our own shapes are passed on to its producer, and as which of its.
        self._passed = [
            {}
            if demand is None
            else {
                i: k
                for i, table in enumerate(self.suspended.tables)
                for k, shape in enumerate(demand.shapes)
                if shape.columns == table.shape.columns and table.shape.sides[side] and any(shape.sides)
            }
            for side, demand in enumerate(self.demands)
        ]
        # Shapes of which both sides speak: (side, shape) -> the same on the other side.
        self._mirrored = {
            (side, i): (shape.other, k)
            for side in range(len(self.demands))
            for i, shape in enumerate(self._shapes(side))
            for k, twin in enumerate(self._shapes(shape.other))
            if twin.columns == shape.opposite and twin.opposite == shape.columns
        }
        self._empty_shapes = [
            (side, i, s.other)
            for side in range(len(self.demands))
            for i, s in enumerate(self._shapes(side))
            if not s.columns and s.opposite is not None and not self._comes_often(s.other)
        ]
        self.consumer = join.node.target if join.node.target != "out" else None
        self._done: list[
            tuple[int, int]
        ] = []  # (consumer partition, its ticket) to be answered behind the rows of this step

    # -- what the node asks

    def finish(self, effects: "Effects") -> None:
        """The end of a step, behind its rows: what is forgotten, how far we are, which resumes are done."""
        self._detect_empty()
        if not self._changed and not self._done and not self._has_any:
            return
        self._expire(effects)
        if self.join.memo.blocks_in % self.join.partitions == 0:
            self._speak(effects)
        self._report(effects)
        effects.sends += [
            self.join.send_to(partition, "resume-done", pack([], ticket)) for partition, ticket in self._done
        ]
        self._done.clear()
        self._count(effects)
        effects.tables = changed_tables(self)

    @property
    def _changed(self) -> bool:
        """Whether a table is to be written."""
        return any(t.changed for t in self.suspended.tables) or any(d is not None and d.changed for d in self.demands)

    @property
    def _has_any(self) -> bool:
        """Whether anything is suspended, here or above, or was of late."""
        return bool(self.suspended.used) or any(d is not None and not d.is_empty for d in self.demands)

    def _count(self, effects: "Effects") -> None:
        """What this step said about demand: for reports, and for the policy of the side it is about."""
        for send in effects.sends:
            header = send.block.header
            if is_feedback(header, self.consumer or "") or send.back:
                values = 0 if send.block.rows is None else len(send.block.rows)
                self.memo.blocks_sent += 1
                if send.back and self.memo.weighed is not None:
                    self.memo.weighed[header.side].paid(header.kind, values)

    def weigh(self, side: int, run: Run, header: Header, effects: "Effects") -> None:
        """With `auto`, at the end of a block of rows: does feedback on this side pay?"""
        demand = self.demands[side]
        if self.memo.weighed is None or demand is None:
            return
        weighed = self.memo.weighed[side]
        news = weighed.heard(header.sender_partition, header.avoided, self.join.partitions)
        if news:
            self.memo.spared_above += int(
                news * demand.passed_on * self.join.memo.rows_out / max(1, self.join.memo.rows_in[side])
            )
        filled = weighed.filled(self.join.others_reached(side), self.join.window)
        shapes = sum(shape.opposite is not None for shape in demand.shapes)
        if weighed.takes(len(run), shapes):
            few = run if len(run) <= SAMPLE_ROWS else run.take(sample(len(run), SAMPLE_ROWS))
            unwanted, own = list(self._not_wanted(side, few)), self._own(side, run)
            single = [*without_partner(own, few.rows, self.join.states, bloom=True), *unwanted]
            whole = [*whole_without_partner(own, few.rows, self.join.states), *unwanted]
            weighed.looked(len(few), shapes, [together(len(few), found) for found in (single, whole)], filled)
        if weighed.turn() and not weighed.speaks:
            self._resume_all(side, effects)

    def _resume_all(self, side: int, effects: "Effects") -> None:
        """All but the empty sub-tuple, which costs nothing while it lasts."""
        demand = self.demands[side]
        assert demand is not None
        asked = [(i, demand.hashes(i)) for i, shape in enumerate(demand.shapes) if shape.columns]
        self._ask(side, asked, NO_PARTNER | NOT_WANTED, [], self.suspended.kept_from, effects)

    def _speaks(self, side: int) -> bool:
        return self.memo.weighed is None or self.memo.weighed[side].speaks

    @property
    def hold(self) -> int:
        """The clock stands still here while resumes are open."""
        return min((t.hold for tickets in self.memo.tickets for t in tickets), default=2**62)

    def horizon(self, side: int) -> int:
        """Rows of a side that end before this are not needed."""
        return min(self._reached(side), self.hold)

    def probing(self, side: int, run: Run) -> Run:
        """The rows that may make pairs at all; the others wait."""
        waits = waiting_rows(self.suspended.tables, side, run)
        if not waits.any():
            return run
        self.memo.rows_diverted += int(waits.sum())
        self.memo.pairs_avoided += self.join.candidates(side, run.take(np.flatnonzero(waits)))
        return run.take(np.flatnonzero(~waits))

    def hidden(self, side: int, run: Run, at: I64) -> Mask | None:
        """Which of the rows at these places of a stored run wait, so that no pair of theirs need be built; None if none
        does."""
        return hidden_rows(self.suspended.tables, side, run, at)

    def allowed(self, pairs: Rows, ends: I64) -> Mask:
        """Which pairs nobody has suspended, of rows that do not wait: what is left are sub-tuples that only both rows
        show together (type II)."""
        keep = np.ones(len(pairs), np.bool_)
        for table in self.suspended.tables:
            if table.count_active and not any(table.shape.sides):
                shown = shape_hash(pairs, table.shape.names)
                covered = table.covers(shown)
                if covered.any():
                    keep &= ~covered
                    table.waits(shown[covered], ends[covered])
        self.memo.pairs_avoided += len(keep) - int(keep.sum())
        return keep

    def free(self, pairs: Rows) -> Mask:
        """Which pairs nobody has suspended, of any rows."""
        keep = np.ones(len(pairs), np.bool_)
        for table in self.suspended.tables:
            if table.count_active:
                keep &= ~table.covers(shape_hash(pairs, table.shape.names))
        self.memo.pairs_avoided += len(keep) - int(keep.sum())
        return keep

    # -- as a consumer

    def arrive(self, side: int, run: Run, effects: "Effects") -> None:
        """Ask again for what these rows are the first partners of."""
        for other, demand in enumerate(self.demands):
            if demand is None or other == side or demand.is_empty:
                continue
            asked = []
            for i, shape in enumerate(demand.shapes):
                if shape.other == side and len(demand.tables[i]):
                    shown = np.unique(shape_hash(run.rows, shape.opposite_names))
                    asked.append((i, shown))
            # What our consumer asked for may need these too: it is answered when they have come.
            pending = list(dict.fromkeys(a for tickets in self.memo.tickets for t in tickets for a in t.answers))
            self._ask(other, asked, NO_PARTNER, pending, self.suspended.kept_from, effects)

    def _ask(
        self,
        side: int,
        asked: list[tuple[int, U64]],
        why: int,
        answers: list[tuple[int, int]],
        kept_from: int,
        effects: "Effects",
    ) -> bool:
        """Resume values at a producer, and keep what `kept_from` kept until they have come; whether a ticket was opened
        for it."""
        demand = self.demands[side]
        assert demand is not None
        ticket = self.join.memo.sequence | side  # one a step and side; the low bits are not in use yet
        ended = [(i, demand.stop(i, hashes, why, ticket)) for i, hashes in asked]
        ended = [(i, e) for i, e in ended if len(e)]
        if not ended:
            return False
        told = int(np.bitwise_or.reduce(np.concatenate([e["told"] for _, e in ended])))
        demand.tickets.append(Ticket(ticket, told, min(self.join.watermark, kept_from), answers))
        self.memo.values_resumed += sum(len(e) for _, e in ended)
        for p in bits_of(told):
            entries = [(i, e["hash"][e["told"] & np.uint64(1 << p) != 0]) for i, e in ended]
            self._tell(
                side, p, "resume", [(i, entries_of(h)) for i, h in entries if len(h)], ticket, effects, kept_from
            )
        return True

    def detect(self, side: int, run: Run, sender_partition: int) -> None:
        """Suspend the minimal sub-tuples of these rows that have no partner (Identify_MNS), and again what waits here
        anyway."""
        if self.demands[side] is None or not self._speaks(side):
            return
        bloom = self.memo.weighed is not None and not self.memo.weighed[side].lattice
        for i, at, shown in without_partner(self._own(side, run), run.rows, self.join.states, bloom):
            _, first = np.unique(shown, return_index=True)
            self._suspend(side, i, run.rows.take(at[first]), NO_PARTNER, None)
        for i, at, shown in self._not_wanted(side, run):
            _, first = np.unique(shown, return_index=True)
            self._suspend(side, i, run.rows.take(at[first]), NOT_WANTED, sender_partition)

    def _shapes(self, side: int) -> tuple[Shape, ...]:
        demand = self.demands[side] if side >= 0 else None
        return () if demand is None else demand.shapes

    def _own(self, side: int, run: Run) -> list[tuple[int, Shape]]:
        """The shapes of a side that may be suspended for want of a partner now: not of one in a table that is still
        loading.

        And not everything for want of any row of a stream, if the values of these rows repeat: the next row of the
        stream would ask for everything that was left out in a window, though it has a use for one value.
        """
        found = [
            (i, s)
            for i, s in enumerate(self._shapes(side))
            if s.opposite is not None and not is_loading(self.join, s.other)
        ]
        if any(not s.columns for _, s in found) and are_few(run.hashes):
            found = [(i, s) for i, s in found if s.columns or not self._comes_often(s.other)]
        return found

    def _comes_often(self, side: int) -> bool:
        """Whether rows of a side are to be expected: of a stream, not of a table or a join."""
        return self.join.node.inputs[side].is_source and not self.join.is_static[side]

    def _detect_empty(self) -> None:
        """While another join has made nothing, or a table is empty, nothing is wanted, whether or not rows come: those
        before our producer need not be made either.

        It is said at most once in a window; with `auto`, at most so often that it can cost no more than a small share
        of the work.
        """
        for side, i, other in self._empty_shapes:
            demand = self.demands[side]
            assert demand is not None
            if len(demand.tables[i]) or not self.join.states[other].is_empty or is_loading(self.join, other):
                continue
            if self.memo.weighed is None or self.memo.weighed[side].may_say_empty(
                self.join.memo.blocks_in, self.join.partitions
            ):
                self._say(side, i, entries_of(np.zeros(1, np.uint64)), NO_PARTNER, None)

    def _not_wanted(self, side: int, run: Run) -> Iterator[tuple[int, I64, U64]]:
        return not_wanted([(self.suspended.tables[i], mine) for i, mine in self._passed[side].items()], run)

    def _suspend(self, side: int, i: int, rows: Rows, why: int, only: int | None) -> None:
        """Tell the producer not to make these sub-tuples: one row of each, in order of their hashes."""
        demand = self.demands[side]
        assert demand is not None
        shape = demand.shapes[i]
        entries = entries_of(shape_hash(rows, shape.names))
        if not any(shape.sides):
            producer = self.join.plan.node(self.join.node.inputs[side].name)
            entries["left"] = shape_hash(rows, shape.lead(producer.inputs)[1])
        self._say(side, i, entries, why, only)

    def _say(self, side: int, i: int, entries: npt.NDArray[Any], why: int, only: int | None) -> None:
        """Note what the producer must not make; `_speak` sends it."""
        demand = self.demands[side]
        assert demand is not None
        if why == NO_PARTNER and (side, i) in self._mirrored:
            other, twin = self._mirrored[side, i]
            across = self.demands[other]
            assert across is not None
            entries = entries[
                ~across.is_open(twin, entries["hash"])
            ]  # rows of the other side are on their way: wait and see
        if not len(entries):
            return
        shape, count = demand.shapes[i], self.join.partitions
        if only is not None:
            to = np.full(len(entries), 1 << only, np.uint64)
        elif shape.targets is not None:
            to = np.uint64(1) << (entries["hash"] % np.uint64(count))
        else:
            to = np.full(len(entries), (1 << count) - 1, np.uint64)
        news = demand.say(i, entries, why, to)
        self.memo.values_suspended += news

    def _speak(self, effects: "Effects") -> None:
        """Send what was to be said: all of some steps in one block, because it goes to every partition."""
        for side, demand in enumerate(self.demands):
            for p, news in demand.take_unsent() if demand is not None else ():
                self._tell(side, p, "suspend", [(i, entries_of(t["hash"], t["left"])) for i, t in news], 0, effects)
        for i, table in enumerate(self.suspended.tables):
            polled = table.poll()
            for p in range(self.join.partitions):
                asked = polled[polled["votes"] & np.uint64(1 << p) == 0]
                if len(asked):
                    effects.sends.append(self.join.send_to(p, "poll", pack([(i, asked)], 0)))

    def _answered(self, block: Block) -> None:
        """A producer partition has sent what a ticket asked for, or has forgotten values."""
        header = block.header
        demand = self.demands[header.side]
        assert demand is not None
        assert block.rows is not None
        if header.kind == "release":
            for i, entries in unpack(block.rows):
                demand.released(i, np.unique(entries["hash"]), header.sender_partition)
            return
        for ticket in block.rows.ints(TICKET).tolist():
            closed = demand.answered(ticket, header.sender_partition)
            for answer in closed.answers if closed is not None else ():
                if not any(answer in t.answers for tickets in self.memo.tickets for t in tickets):
                    self._done.append(answer)

    def _polled(self, block: Block) -> None:
        """A producer partition heard from others what we may not want either: say so if that is right, whether or not
        such rows came here."""
        side, voter = block.header.side, block.header.sender_partition
        demand = self.demands[side]
        assert demand is not None
        assert block.rows is not None
        for i, entries in unpack(block.rows):
            shape = demand.shapes[i]
            if shape.opposite is not None and not is_loading(self.join, shape.other):
                found = missing(shape, entries["hash"], self.join.states[shape.other])
                self._say(side, i, entries[found], NO_PARTNER, voter)
            for own, passed in self._passed[side].items():
                if passed == i:
                    found = self.suspended.tables[own].covers(entries["hash"])
                    self._say(side, i, entries[found], NOT_WANTED, voter)

    def _report(self, effects: "Effects") -> None:
        """Tell producers that leave something out how far the other side is."""
        for side, demand in enumerate(self.demands):
            if demand is None:
                continue
            now = self._reached(side)
            if now - self.memo.told[side] >= self.join.watermark_step and (told := demand.told_anyone()):
                self.memo.told[side] = now
                for p in bits_of(told):
                    self._tell(side, p, "watermark", [], 0, effects)

    def _reached(self, side: int) -> int:
        """Rows of a side that end before this are not wanted: not here, nor further down."""
        return min(self.join.others_reached(side), self.suspended.kept_from)

    # -- as a producer

    def hear(self, block: Block, now: int, effects: "Effects") -> Rows | None:
        """Take a consumer partition's word or a producer's answer; gives the pairs that are owed."""
        header = block.header
        if header.kind == "poll":
            self._polled(block)
            return None
        if header.kind in OF_PRODUCER:
            self._answered(block)
            return None
        self.memo.reached[header.sender_partition] = header.watermark
        if header.kind == "suspend" and block.rows is not None:
            for i, entries in unpack(block.rows):
                self._suspended(i, entries, header.sender_partition, now)
        elif header.kind == "resume" and block.rows is not None:
            return self._resumed(block.rows, header.sender_partition, now, effects)
        return None

    def _suspended(self, i: int, entries: npt.NDArray[Any], voter: int, now: int) -> None:
        table = self.suspended.tables[i]
        begun = table.vote(entries, voter, now, latest_end(self.join, table.shape))
        for side, passed in enumerate(self._passed):
            if i in passed and len(begun) and (self._speaks(side) or not table.shape.columns):
                self._say(side, passed[i], entries_of(begun), NOT_WANTED, None)

    def _resumed(self, rows: Rows, voter: int, now: int, effects: "Effects") -> Rows | None:
        ticket, kept_from = (
            int(rows.ints(TICKET)[0]),
            self.suspended.kept_from,
        )  # before the votes go: rows that were kept for them are still needed
        ended, waiting = [], False
        for i, entries in unpack(rows):
            table = self.suspended.tables[i]
            waiting |= self._asked_already(i, entries["hash"], (voter, ticket))
            ended.append((i, table, table.retract(entries["hash"], voter, now, latest_end(self.join, table.shape))))
        for side, demand in enumerate(self.demands):
            if demand is not None:
                asked = [
                    (self._passed[side][i], e["hash"].copy()) for i, _, e in ended if i in self._passed[side] and len(e)
                ]
                waiting |= self._ask(side, asked, NOT_WANTED, [(voter, ticket)], kept_from, effects)
        if not waiting:
            self._done.append((voter, ticket))
        owed = list(owed_pairs(self.join, self.suspended, [(t, e) for _, t, e in ended if len(e)], now, kept_from))
        self.memo.pairs_resumed += sum(map(len, owed))
        return Rows.concat(owed) if owed else None

    def _asked_already(self, i: int, hashes: U64, answer: tuple[int, int]) -> bool:
        """Whether values are on their way because another partition of our consumer asked for them: this one is
        answered when they have come, too."""
        found = False
        for passed, demand in zip(self._passed, self.demands, strict=True):
            open_ = demand.open_for(passed[i], hashes) if demand is not None and i in passed else set()
            for ticket in demand.tickets if demand is not None else ():
                if ticket.id in open_:
                    ticket.answers.append(answer)
                    found = True
        return found

    def _expire(self, effects: "Effects") -> None:
        """Forget what no row can matter to any more, and say so."""
        kept_from = self.suspended.kept_from
        # Nothing is suspended, or nothing of it can be resumed (a static table): then values serve as long as rows show
        # them.
        horizon = min(self.hold, *self.join.memo.watermarks) if kept_from >= COMPLETE else min(self.hold, kept_from)
        # However far the consumer's other side is, a value serves as long as rows come here that show it.
        unseen = min(horizon, *self.join.memo.watermarks) - KEPT_WINDOWS * self.join.window
        if max(horizon - self.memo.expired[0], unseen - self.memo.expired[1]) < self.join.watermark_step:
            return
        self.memo.expired = [horizon, unseen]
        gone: dict[int, list[tuple[int, npt.NDArray[Any]]]] = {}
        for i, table in enumerate(self.suspended.tables):
            if not table.is_used:
                continue
            found = table.forget(horizon, unseen, partial(self._is_passed_on, i))
            for p in bits_of(int(np.bitwise_or.reduce(found["votes"])) if len(found) else 0):
                gone.setdefault(p, []).append((i, found[found["votes"] & np.uint64(1 << p) != 0]))
        for p, entries in gone.items():
            effects.sends.append(self.join.send_to(p, "release", pack(entries, 0)))

    def _is_passed_on(self, i: int, hashes: U64) -> Mask:
        """Which values of a shape some producer leaves out for our consumer's sake."""
        found = np.zeros(len(hashes), np.bool_)
        for passed, demand in zip(self._passed, self.demands, strict=True):
            if demand is not None and i in passed:
                found |= demand.is_told(passed[i], hashes)
        return found

    def _tell(
        self,
        side: int,
        partition: int,
        kind: Kind,
        entries: list[tuple[int, Any]],
        ticket: int,
        effects: "Effects",
        kept_from: int = NOTHING_KEPT,
    ) -> None:
        rows = pack(entries, ticket) if entries else None
        # With a resume: what was kept until now for the sake of our consumer is still wanted, though nothing may be
        # suspended any more.
        effects.sends.append(self.join.send_back(side, partition, kind, min(self._reached(side), kept_from), rows))

    def counts(self) -> dict[str, int]:
        return self.memo.counts(
            here=sum(t.count_active for t in self.suspended.tables),
            above=sum(d.count_told for d in self.demands if d is not None),
            speaking=sum(d is not None and self._speaks(side) for side, d in enumerate(self.demands)),
        )
