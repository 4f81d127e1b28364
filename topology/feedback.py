"""Just-in-time processing at one join node: as a consumer it says what it has no partner for, as a producer it leaves out what nobody wants.

Follows JIT (Process_Input, Identify_MNS, Suspend_Production, Resume_Production, Propagate_Feedback) over asynchronous channels:

- *arrive*: rows that match a suspended sub-tuple of the other side ask for it again, before anything else.
- *detect*: rows without a partner are searched for minimal non-demanded sub-tuples, which are suspended at the producer.
- *suspended*, *resumed*: a producer takes its consumer's word, passes it on to its own producers, and on resume makes what it owes. It answers
  `resume-done` when its producers have answered too.
- *expire*: what no consumer can want any more is forgotten at both ends (`release`).

Invariant: results are those without feedback. Each pair is made once, at the first moment nobody has it suspended; a partner is kept until what it asked for
has come (`hold`); a producer keeps what it may owe until its consumer's other side has passed it (`kept_from`).
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.block import NO_WATERMARK, Block, Header, Kind
from schemas.rows import I64, U64, Mask, Rows
from topology.demand import NO_PARTNER, NOT_WANTED, Demand, Ticket
from topology.detection import missing, not_wanted, together, whole_without_partner, without_partner
from topology.feedback_blocks import OF_CONSUMER, OF_PRODUCER, changed_tables
from topology.policy import Weighed
from topology.shapes import Shape, shape_hash, shapes_of
from topology.state import Run
from topology.static import latest_end, may_speak
from topology.subtuples import (
    TICKET,
    entries_of,
    hidden_rows,
    pack,
    rows_with,
    unpack,
    waiting_rows,
)
from topology.suspended import Suspended, among, bits_of
from topology.window import COMPLETE

if TYPE_CHECKING:
    from topology.node import JoinNode
    from topology.partition import Effects

ARRIVED = "#:came"  # at which moment (offset of the input topic) a stored row came
SAMPLE_ROWS = 2_000  # of a block that is looked at by a hushed side
KEPT_WINDOWS = 4  # how long a value stays suspended behind its last row: most come again
PARTITIONS_MOST = 64  # sets of partitions are words


class FeedbackMemo(msgspec.Struct):
    """What is remembered beside the tables."""

    reached: dict[int, int] = msgspec.field(default_factory=dict)  # consumer partition -> watermark of its other side
    tickets: list[list[Ticket]] = msgspec.field(default_factory=lambda: [[], []])
    told: list[int] = msgspec.field(default_factory=lambda: [NO_WATERMARK, NO_WATERMARK])  # watermark each producer was told
    pairs_avoided: int = 0
    rows_diverted: int = 0
    values_suspended: int = 0
    values_resumed: int = 0
    pairs_resumed: int = 0
    blocks_sent: int = 0  # about demand, to producers and to the consumer
    bytes_sent: int = 0  # of these; counted by the host, which encodes them
    weighed: list[Weighed] | None = None  # per side, with `auto`

    def counts(self, here: int, above: int = 0, speaking: int = 0) -> dict[str, int]:
        """For reports: what is suspended now, and what was done since the beginning."""
        return {
            "suspended_here": here, "suspended_above": above, "rows_diverted": self.rows_diverted, "pairs_avoided": self.pairs_avoided,
            "pairs_resumed": self.pairs_resumed, "values_suspended": self.values_suspended, "values_resumed": self.values_resumed,
            "blocks_sent": self.blocks_sent, "bytes_sent": self.bytes_sent, "sides_speaking": speaking,
        }  # fmt: skip


class Feedback:
    def __init__(self, join: "JoinNode", memo: FeedbackMemo, auto: bool = False) -> None:
        self.join, self.memo = join, memo
        if auto and memo.weighed is None:
            memo.weighed = [Weighed(), Weighed()]
        shapes = shapes_of(join.plan)
        self.suspended = Suspended.of(shapes.get(join.node.id, ()), join.partitions, memo.reached)
        self.demands: list[Demand | None] = [
            None if side.is_source else Demand(shapes[side.name], join.partitions, memo.tickets[i])
            for i, side in enumerate(join.node.inputs)
        ]
        # Per side: which of our own shapes are passed on to its producer, and as which of its.
        self._passed = [
            {} if demand is None else {
                i: k for i, table in enumerate(self.suspended.tables) for k, shape in enumerate(demand.shapes)
                if shape.columns == table.shape.columns and table.shape.sides[side] and any(shape.sides)
            }
            for side, demand in enumerate(self.demands)
        ]  # fmt: skip
        self.consumer = join.node.target if join.node.target != "out" else None
        self.changed: set[str] = set()
        self._done: list[tuple[int, int]] = []  # (consumer partition, its ticket) to be answered behind the rows of this step

    # -- what the node asks

    def finish(self, effects: "Effects") -> None:
        """The end of a step, behind its rows: what is forgotten, how far we are, which resumes are done."""
        if not self.changed and not self._done and not self._has_any:
            return
        self._expire(effects)
        if self.join.memo.blocks_in % self.join.partitions == 0:
            self._speak(effects)
        self._report(effects)
        effects.sends += [self.join.send_to(partition, "resume-done", pack([], ticket)) for partition, ticket in self._done]
        self._done.clear()
        self._count(effects)
        effects.tables = changed_tables(self)

    @property
    def _has_any(self) -> bool:
        """Whether anything is suspended, here or above, or was of late."""
        return any(len(t.entries) or len(t.intervals) for t in self.suspended.tables) or any(d is not None and not d.is_empty for d in self.demands)

    def _count(self, effects: "Effects") -> None:
        """What this step said about demand: for reports, and for the policy of the side it is about."""
        for send in effects.sends:
            header = send.block.header
            if is_feedback(header, self.consumer or "") or send.back:
                values = 0 if send.block.rows is None else len(send.block.rows)
                self.memo.blocks_sent += 1
                if send.back and self.memo.weighed is not None:
                    self.memo.weighed[header.side].paid(values)

    def weigh(self, side: int, run: Run, header: Header, effects: "Effects") -> None:
        """With `auto`, at the end of a block of rows: does feedback on this side pay?"""
        demand = self.demands[side]
        if self.memo.weighed is None or demand is None:
            return
        weighed = self.memo.weighed[side]
        weighed.heard(header.sender_partition, header.avoided, self.join.partitions)
        shapes = sum(shape.opposite is not None for shape in demand.shapes)
        if weighed.takes(len(run), shapes) and may_speak(self.join, side):
            few = run if len(run) <= SAMPLE_ROWS else run.take(np.arange(0, len(run), len(run) // SAMPLE_ROWS))
            unwanted = list(self._not_wanted(side, few))
            single = [*without_partner(demand.shapes, few.rows, self.join.states[1 - side], bloom=True), *unwanted]
            whole = [*whole_without_partner(demand.shapes, few.rows, self.join.states[1 - side]), *unwanted]
            weighed.looked(len(few), [together(len(few), found) for found in (single, whole)])
        if weighed.turn() and not weighed.speaks:
            self._resume_all(side, effects)

    def _resume_all(self, side: int, effects: "Effects") -> None:
        demand = self.demands[side]
        assert demand is not None
        asked = [(i, table["hash"].copy()) for i, table in enumerate(demand.tables)]
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
        waits, touched = waiting_rows(self.suspended.tables, side, run)
        self.changed |= {f"s{i}" for i in touched}
        if not waits.any():
            return run
        self.memo.rows_diverted += int(waits.sum())
        self.memo.pairs_avoided += self.join.candidates(side, run.take(np.flatnonzero(waits)))
        return run.take(np.flatnonzero(~waits))

    def hidden(self, side: int, run: Run) -> Mask | None:
        """Which stored rows wait, so that no pair of theirs need be built; None if none does."""
        return hidden_rows(self.suspended.tables, side, run)

    def allowed(self, pairs: Rows, ends: I64) -> Mask:
        """Which pairs nobody has suspended."""
        keep = np.ones(len(pairs), np.bool_)
        for i, table in enumerate(self.suspended.tables):
            if len(table.active):
                shown = shape_hash(pairs, table.shape.names)
                covered = table.covers(shown)
                if covered.any():
                    keep &= ~covered
                    table.waits(shown[covered], ends[covered])
                    self.changed.add(f"s{i}")
        self.memo.pairs_avoided += len(keep) - int(keep.sum())
        return keep

    # -- as a consumer

    def arrive(self, side: int, run: Run, effects: "Effects") -> None:
        """Ask again for what these rows are the first partners of."""
        demand = self.demands[1 - side]
        if demand is None or demand.is_empty:
            return
        asked = []
        for i, shape in enumerate(demand.shapes):
            if shape.opposite is not None and len(demand.tables[i]):
                shown = np.unique(shape_hash(run.rows, shape.opposite_names))
                asked.append((i, shown))
        # What our consumer asked for may need these too: it is answered when they have come.
        pending = list(dict.fromkeys(a for tickets in self.memo.tickets for t in tickets for a in t.answers))
        self._ask(1 - side, asked, NO_PARTNER, pending, self.suspended.kept_from, effects)

    def _ask(
        self, side: int, asked: list[tuple[int, U64]], why: int, answers: list[tuple[int, int]], kept_from: int, effects: "Effects"
    ) -> bool:
        """Resume values at a producer, and keep what `kept_from` kept until they have come; whether a ticket was opened for it."""
        demand = self.demands[side]
        assert demand is not None
        ticket = self.join.memo.sequence | side  # one a step and side; the low bits are not in use yet
        ended = [(i, demand.stop(i, hashes, why, ticket)) for i, hashes in asked]
        ended = [(i, e) for i, e in ended if len(e)]
        if not ended:
            return False
        told = int(np.bitwise_or.reduce(np.concatenate([e["told"] for _, e in ended])))
        demand.tickets.append(Ticket(ticket, told, min(self.join.watermark, kept_from), answers))
        self.changed.add(f"d{side}")
        self.memo.values_resumed += sum(len(e) for _, e in ended)
        for p in bits_of(told):
            entries = [(i, e["hash"][e["told"] & np.uint64(1 << p) != 0]) for i, e in ended]
            self._tell(side, p, "resume", [(i, entries_of(h)) for i, h in entries if len(h)], ticket, effects)
        return True

    def detect(self, side: int, run: Run, sender_partition: int) -> None:
        """Suspend the minimal sub-tuples of these rows that have no partner (Identify_MNS), and again what waits here anyway."""
        demand, across = self.demands[side], self.demands[1 - side]
        if demand is None or not self._speaks(side) or not may_speak(self.join, side):
            return
        bloom = self.memo.weighed is not None and not self.memo.weighed[side].lattice
        for i, at, shown in without_partner(demand.shapes, run.rows, self.join.states[1 - side], bloom):
            _, first = np.unique(shown, return_index=True)
            self._suspend(side, i, run.rows.take(at[first]), NO_PARTNER, across, None)
        for i, at, shown in self._not_wanted(side, run):
            _, first = np.unique(shown, return_index=True)
            self._suspend(side, i, run.rows.take(at[first]), NOT_WANTED, None, sender_partition)

    def _not_wanted(self, side: int, run: Run) -> Iterator[tuple[int, I64, U64]]:
        return not_wanted([(self.suspended.tables[i], mine) for i, mine in self._passed[side].items()], run)

    def _suspend(self, side: int, i: int, rows: Rows, why: int, across: Demand | None, only: int | None) -> None:
        """Tell the producer not to make these sub-tuples: one row of each, in order of their hashes."""
        demand = self.demands[side]
        assert demand is not None
        shape = demand.shapes[i]
        entries = entries_of(shape_hash(rows, shape.names))
        if not any(shape.sides):
            producer = self.join.plan.node(self.join.node.inputs[side].name)
            entries["left"] = shape_hash(rows, tuple(str(c) for c in shape.columns if c.alias in producer.left.aliases))
        self._say(side, i, entries, why, across, only)

    def _say(self, side: int, i: int, entries: npt.NDArray[Any], why: int, across: Demand | None, only: int | None) -> None:
        """Note what the producer must not make; `_speak` sends it."""
        demand = self.demands[side]
        assert demand is not None
        if across is not None and i < len(across.shapes):
            entries = entries[~across.is_open(i, entries["hash"])]  # rows of the other side are on their way: wait and see
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
        if news:
            self.changed.add(f"d{side}")
            self.memo.values_suspended += news

    def _speak(self, effects: "Effects") -> None:
        """Send what was to be said: all of some steps in one block, because it goes to every partition."""
        for side, demand in enumerate(self.demands):
            for p, news in demand.take_unsent() if demand is not None else ():
                self.changed.add(f"d{side}")
                self._tell(side, p, "suspend", [(i, _as_entries(t)) for i, t in news], 0, effects)
        for i, table in enumerate(self.suspended.tables):
            polled = table.poll()
            for p in range(self.join.partitions):
                asked = polled[polled["votes"] & np.uint64(1 << p) == 0]
                if len(asked):
                    self.changed.add(f"s{i}")
                    effects.sends.append(self.join.send_to(p, "poll", pack([(i, asked)], 0)))

    def _answered(self, block: Block) -> None:
        """A producer partition has sent what a ticket asked for, or has forgotten values."""
        header = block.header
        demand = self.demands[header.side]
        assert demand is not None
        assert block.rows is not None
        self.changed.add(f"d{header.side}")
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
        """A producer partition heard from others what we may not want either: say so if that is right, whether or not such rows came here."""
        side, voter = block.header.side, block.header.sender_partition
        demand, other, across = self.demands[side], self.join.states[1 - side], self.demands[1 - side]
        assert demand is not None
        assert block.rows is not None
        for i, entries in unpack(block.rows):
            shape = demand.shapes[i]
            if shape.opposite is not None and may_speak(self.join, side):
                found = missing(shape, entries["hash"], other)
                self._say(side, i, entries[found], NO_PARTNER, across, voter)
            for own, passed in self._passed[side].items():
                if passed == i:
                    found = self.suspended.tables[own].covers(entries["hash"])
                    self._say(side, i, entries[found], NOT_WANTED, None, voter)

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
        return min(self.join.memo.watermarks[1 - side], self.suspended.kept_from)

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
        self.changed.add(f"s{i}")
        for side in (0, 1):
            if i in self._passed[side] and len(begun) and self._speaks(side):
                self._say(side, self._passed[side][i], entries_of(begun), NOT_WANTED, None, None)

    def _resumed(self, rows: Rows, voter: int, now: int, effects: "Effects") -> Rows | None:
        ticket, kept_from = int(rows.ints(TICKET)[0]), self.suspended.kept_from  # before the votes go: rows that were kept for them are still needed
        ended = []
        for i, entries in unpack(rows):
            table = self.suspended.tables[i]
            ended.append((i, table, table.retract(np.unique(entries["hash"]), voter, now, latest_end(self.join, table.shape))))
            self.changed.add(f"s{i}")
        waiting = False
        for side, demand in enumerate(self.demands):
            if demand is not None:
                asked = [(self._passed[side][i], e["hash"].copy()) for i, _, e in ended if i in self._passed[side] and len(e)]
                waiting |= self._ask(side, asked, NOT_WANTED, [(voter, ticket)], kept_from, effects)
        if not waiting:
            self._done.append((voter, ticket))
        owed = list(self._owed([(t, e) for _, t, e in ended if len(e)], now, kept_from))
        self.memo.pairs_resumed += sum(map(len, owed))
        return Rows.concat(owed) if owed else None

    def _owed(self, ended: list[tuple[Any, npt.NDArray[Any]]], now: int, kept_from: int) -> Iterator[Rows]:
        """Pairs that show an entry which just ended and that were never free before; of rows that a consumer may still want."""
        earlier: list[tuple[Shape, U64]] = []
        for table, entries in ended:
            shape = table.shape
            # A row of one side shows it, or only both together do. The empty sub-tuple: every left row.
            lead = 0 if shape.sides[0] or not any(shape.sides) else 1
            hashes = np.unique(entries["hash"] if any(shape.sides) else entries["left"])
            found = rows_with(self.join.states[lead], self._lead_names(shape, lead), hashes)
            pairs, since = None, None
            if found is not None:
                pairs, since = self.join.join_again(lead, found.take(np.flatnonzero(found.ends >= kept_from)))
            if pairs is not None and since is not None:
                shown = {t.shape: shape_hash(pairs, t.shape.names) for t in self.suspended.tables}
                keep = among(shown[shape], entries["hash"])
                for other, done in earlier:
                    keep &= ~among(shown[other], done)
                for t in self.suspended.tables:
                    keep &= ~t.covers(shown[t.shape])
                pairs = pairs.filter(keep)
                pairs = pairs.filter(self.suspended.never_free([h[keep] for h in shown.values()], since[keep], now))
                if len(pairs):
                    yield pairs.select(self.join.carried)
            earlier.append((shape, entries["hash"]))

    def _lead_names(self, shape: Shape, lead: int) -> tuple[str, ...]:
        if any(shape.sides):
            return shape.names
        return tuple(str(c) for c in shape.columns if c.alias in self.join.node.inputs[lead].aliases)

    def _expire(self, effects: "Effects") -> None:
        """Forget what no row can matter to any more, and say so."""
        kept_from = self.suspended.kept_from
        # Nothing is suspended, or nothing of it can be resumed (a static table): then values serve as long as rows show them.
        horizon = min(self.hold, *self.join.memo.watermarks) if kept_from >= COMPLETE else min(self.hold, kept_from)
        # However far the consumer's other side is, a value serves as long as rows come here that show it.
        unseen = min(horizon, *self.join.memo.watermarks) - KEPT_WINDOWS * self.join.window
        gone: dict[int, list[tuple[int, npt.NDArray[Any]]]] = {}
        for i, table in enumerate(self.suspended.tables):
            if not len(table.entries) and not len(table.intervals):
                continue
            keep = np.zeros(len(table.entries), np.bool_)
            for side, demand in enumerate(self.demands):
                if demand is not None and i in self._passed[side] and len(keep):
                    keep |= demand.is_told(self._passed[side][i], table.entries["hash"])
            before = len(table.entries) + len(table.intervals)
            found = table.forget(horizon, unseen, keep)
            if len(table.entries) + len(table.intervals) < before:
                self.changed.add(f"s{i}")
            for p in bits_of(int(np.bitwise_or.reduce(found["votes"])) if len(found) else 0):
                gone.setdefault(p, []).append((i, found[found["votes"] & np.uint64(1 << p) != 0]))
        for p, entries in gone.items():
            effects.sends.append(self.join.send_to(p, "release", pack(entries, 0)))

    def _tell(self, side: int, partition: int, kind: Kind, entries: list[tuple[int, Any]], ticket: int, effects: "Effects") -> None:
        rows = pack(entries, ticket) if entries else None
        effects.sends.append(self.join.send_back(side, partition, kind, self._reached(side), rows))

    def counts(self) -> dict[str, int]:
        return self.memo.counts(
            here=sum(len(t.active) for t in self.suspended.tables),
            above=sum(int((t["told"] != 0).sum()) for d in self.demands if d is not None for t in d.tables),
            speaking=sum(d is not None and self._speaks(side) for side, d in enumerate(self.demands)),
        )


def is_feedback(header: Header, consumer: str) -> bool:
    """Whether a block of an input topic is about demand, and not rows or their time."""
    return header.kind in (*OF_CONSUMER, *OF_PRODUCER) or (header.kind == "watermark" and header.sender == consumer)


def _as_entries(told: npt.NDArray[Any]) -> npt.NDArray[Any]:
    entries = entries_of(told["hash"])
    entries["left"] = told["left"]
    return entries
