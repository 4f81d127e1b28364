"""Just-in-time processing at one join node: as a producer it leaves out what nobody wants, as a consumer it says
what it has no partner for (`asking`).

Follows JIT (Suspend_Production, Resume_Production, Propagate_Feedback) over asynchronous channels: a producer takes its
consumer's word, passes it on to its own producers, and on resume lets go what it held. It answers `ResumeDone` when its
producers have answered too. What no consumer can want any more is forgotten at both ends (`Release`).

Invariant: results are those without feedback. A pair is held while a value that it shows is suspended; a producer keeps
what it may owe until its consumer's other inputs have passed it (`kept_from`).
"""

from collections.abc import Generator, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.block import (
    NO_WATERMARK,
    OF_CONSUMER,
    OF_PRODUCER,
    Block,
    FromNode,
    Header,
    Poll,
    Release,
    Resume,
    ResumeDone,
    Suspend,
)
from schemas.rows import I64, U64, Mask, Rows
from topology.plan.shapes import Shape, shapes_of
from topology.restraint.interface import Freed, FreeFrom, Ground, Restraint
from topology.restraint.suspension.asking import Asking
from topology.restraint.suspension.border import changed_tables, check_feedback, restore_tables
from topology.restraint.suspension.demand import NOT_WANTED, Demand
from topology.restraint.suspension.memo import FeedbackMemo
from topology.restraint.suspension.policy import Weighed, Weights
from topology.restraint.suspension.suspended import Suspended
from topology.restraint.suspension.wire import pack, unpack
from topology.restraint.tables import ShapeTable, bits_of, entries_of
from topology.restraint.waiting import hidden_rows, waiting_rows
from topology.state.hashing import shape_hash
from topology.state.lookup import among, rows_with
from topology.state.meeting import NEVER
from topology.state.pairs import Pairs
from topology.state.window import COMPLETE
from topology.state.window_state import Run

KEPT_WINDOWS = 4  # how long a value stays suspended behind its last row: most come again
PARTITIONS_MOST = 64  # sets of partitions are words


class Suspension(Restraint):
    takes = (*OF_CONSUMER, *OF_PRODUCER)

    def __init__(
        self, ground: Ground, memo: FeedbackMemo, auto: bool, weights: Weights | None = None, rows_least: int = 4
    ) -> None:
        self.ground, self.memo = ground, memo
        inputs = ground.node.inputs
        memo.tickets += [[] for _ in range(len(inputs) - len(memo.tickets))]
        memo.reported += [NO_WATERMARK] * (len(inputs) - len(memo.reported))
        if auto and memo.weighed is None:
            memo.weighed = [Weighed() for _ in inputs]
        shapes = shapes_of(ground.plan)
        self.suspended = Suspended.of(shapes.get(ground.node.id, ()), ground.partitions, memo.reached)
        self.demands: list[Demand | None] = [
            None if side.is_source else Demand(shapes[side.name], ground.partitions, memo.tickets[i])
            for i, side in enumerate(inputs)
        ]
        self.asking = Asking(ground, memo, self.demands, self.suspended, weights or Weights(), rows_least)
        self.side_of = {edge.name: side for side, edge in enumerate(inputs)}
        self.keeps_moments = bool(self.suspended.tables)

    # -- what is held

    @property
    def silences(self) -> bool:  # type: ignore[override]
        return any(not table.shape.columns and table.count_active for table in self.suspended.tables)

    @property
    def avoided(self) -> int:  # type: ignore[override]
        return self.memo.pairs_avoided

    @property
    def hold(self) -> int:  # type: ignore[override]
        return self.asking.hold

    def arrive(self, side: int, run: Run) -> None:
        self.asking.arrive(side, run)

    def probing(self, side: int, run: Run) -> Run:
        """Rows that show a suspended value wait."""
        waits = waiting_rows(self.suspended.tables, side, run)
        if not waits.any():
            return run
        self.memo.rows_diverted += int(waits.sum())
        self.memo.pairs_avoided += self.ground.estimate(side, run.take(np.flatnonzero(waits)))
        return run.take(np.flatnonzero(~waits))

    def hidden(self, side: int, run: Run, at: I64) -> Mask | None:
        """Rows that wait, so that no pair of theirs need be built."""
        waits = hidden_rows(self.suspended.tables, side, run, at)
        if waits is not None:
            self.memo.pairs_avoided += int(waits.sum())
        return waits

    def allowed(self, pairs: Pairs) -> Mask | None:
        """Of rows that do not wait: what is left are sub-tuples that only both rows show together (type II)."""
        keep: Mask | None = None
        for table in self.suspended.tables:
            if table.count_active and not any(table.shape.sides):
                shown = pairs.shown(table.shape.names)
                covered = table.covers(shown)
                if covered.any():
                    keep = ~covered if keep is None else keep & ~covered
                    table.waits(shown[covered], pairs.ends[covered])
        if keep is not None:
            self.memo.pairs_avoided += len(keep) - int(keep.sum())
        return keep

    def stored(self, side: int, run: Run, header: Header) -> None:
        self.asking.detect(side, run, header.partition if isinstance(header, FromNode) else 0)
        self.asking.weigh(side, run, header)

    def free_from(self, pairs: Rows, starts: I64, ends: I64, came: I64) -> FreeFrom | None:  # noqa: ARG002
        shown = [(t, shape_hash(pairs, t.shape.names)) for t in self.suspended.used]
        return partial(_free_from, shown) if shown else None

    # -- what is said to it

    def check(self, block: Block) -> None:
        check_feedback(self, block)

    def take(self, block: Block, rows: Rows) -> Generator[Freed, int, None]:
        """Take a consumer partition's word or a producer's answer; gives the pairs that are owed."""
        header = block.header
        assert isinstance(header, FromNode)
        if isinstance(header, OF_PRODUCER):
            self.asking.take(self.side_of[header.node], header, rows)
            return
        assert isinstance(header, OF_CONSUMER)
        self.memo.reached[header.partition] = header.reached
        if isinstance(header, Suspend):
            for i, entries in unpack(rows):
                self._suspended(i, entries, header.partition)
        elif isinstance(header, Resume):
            yield from self._resumed(rows, header.partition, header.ticket)

    def _suspended(self, i: int, entries: npt.NDArray[Any], voter: int) -> None:
        table = self.suspended.tables[i]
        # From the next moment on: what others let go at this one is made already.
        begun = table.vote(entries, voter, self.ground.now + 1, latest_end(self.ground, table.shape))
        for side, passed in enumerate(self.asking.passed):
            if i in passed and len(begun) and (self.asking.speaks(side) or not table.shape.columns):
                self.asking.say(side, passed[i], entries_of(begun), NOT_WANTED, None)

    def _resumed(self, rows: Rows, voter: int, ticket: int) -> Generator[Freed, int, None]:
        kept_from = self.suspended.kept_from  # before the votes go: rows that were kept for them are still needed
        ended, waiting = [], False
        for i, entries in unpack(rows):
            table = self.suspended.tables[i]
            waiting |= self.asking.asked_already(i, entries["hash"], (voter, ticket))
            last = latest_end(self.ground, table.shape)
            ended.append((i, table, table.retract(entries["hash"], voter, self.ground.now, last)))
        for side, _ in self.asking.speaking:
            passed = self.asking.passed[side]
            asked = [(passed[i], e["hash"].copy()) for i, _, e in ended if i in passed and len(e)]
            waiting |= self.asking.ask(side, asked, NOT_WANTED, [(voter, ticket)], kept_from)
        if not waiting:
            self.asking.done.append((voter, ticket))
        earlier: list[tuple[Shape, U64]] = []
        for _, table, entries in ended:
            if len(entries):
                self.memo.pairs_resumed += yield self._owed(table.shape, entries, tuple(earlier), kept_from)
                earlier.append((table.shape, entries["hash"]))

    def _owed(
        self, shape: Shape, entries: npt.NDArray[Any], earlier: tuple[tuple[Shape, U64], ...], kept_from: int
    ) -> Freed:
        """Pairs that show an entry which just ended, of rows that a consumer may still want (Resume_Production)."""
        # A row of one input shows it, or only several together do. The empty sub-tuple: every row of the first.
        lead, names = shape.lead(self.ground.node.inputs)
        hashes = np.unique(entries["hash"] if any(shape.sides) else entries["left"])

        def rows(above: int, upto: int) -> Run | None:
            return rows_with(self.ground.states[lead], names, hashes, kept_from, above, upto)

        def shows(pairs: Rows) -> Mask:
            keep = among(shape_hash(pairs, shape.names), entries["hash"])
            for other, done in earlier:
                keep &= ~among(shape_hash(pairs, other.names), done)
            return keep

        return Freed(lead, rows, shows=shows)

    # -- the end of a step

    def horizon(self, side: int, horizon: int) -> int:
        return min(horizon, self.asking.reached(side), self.hold)

    def finish(self) -> None:
        """What is forgotten, how far we are, which resumes are done."""
        asking = self.asking
        asking.detect_empty()
        if not self._changed and not asking.done and not self._has_any:
            return
        self._expire()
        if self.ground.counts.blocks_in % self.ground.partitions == 0:
            asking.speak()
            self._poll()
        asking.report()
        for partition, ticket in asking.done:
            self._to_consumer(partition, ResumeDone, None, ticket)
        asking.done.clear()

    @property
    def _changed(self) -> bool:
        """Whether a table is to be written."""
        return any(t.changed for t in self.suspended.tables) or any(d.changed for _, d in self.asking.speaking)

    @property
    def _has_any(self) -> bool:
        """Whether anything is suspended, here or above, or was of late."""
        return bool(self.suspended.used) or any(not d.is_empty for _, d in self.asking.speaking)

    def _poll(self) -> None:
        for i, table in enumerate(self.suspended.tables):
            polled = table.poll()
            for p in range(self.ground.partitions):
                asked = polled[polled["votes"] & np.uint64(1 << p) == 0]
                if len(asked):
                    self._to_consumer(p, Poll, pack([(i, asked)]))

    def _expire(self) -> None:
        """Forget what no row can matter to any more, and say so."""
        kept_from, times = self.suspended.kept_from, self.ground.times
        # Nothing is suspended, or nothing of it can be resumed (a static table): then values serve as long as rows show
        # them.
        horizon = min(self.hold, *times) if kept_from >= COMPLETE else min(self.hold, kept_from)
        # However far the consumer's other inputs are, a value serves as long as rows come here that show it.
        unseen = min(horizon, *times) - KEPT_WINDOWS * self.ground.window
        if max(horizon - self.memo.expired[0], unseen - self.memo.expired[1]) < self.ground.watermark_step:
            return
        self.memo.expired = [horizon, unseen]
        gone: dict[int, list[tuple[int, npt.NDArray[Any]]]] = {}
        for i, table in enumerate(self.suspended.tables):
            if not table.is_used:
                continue
            found = table.forget(horizon, unseen, partial(self.asking.is_passed_on, i))
            for p in bits_of(int(np.bitwise_or.reduce(found["votes"])) if len(found) else 0):
                gone.setdefault(p, []).append((i, found[found["votes"] & np.uint64(1 << p) != 0]))
        for p, entries in gone.items():
            self._to_consumer(p, Release, pack(entries))

    def _to_consumer(self, partition: int, kind: type[FromNode], rows: Rows | None, *said: int) -> None:
        self.ground.voice.to_consumer(partition, kind, rows, *said)
        self.memo.blocks_sent += 1

    # -- what outlives the process, and what people are told

    def changed(self) -> dict[str, bytes | None]:
        return changed_tables(self)

    def restore(self, stored: Mapping[str, bytes]) -> None:
        restore_tables(self, stored)

    def counts(self) -> dict[str, Any]:
        speaking = [(side, demand) for side, demand in self.asking.speaking]
        return self.memo.counts(
            here=sum(t.count_active for t in self.suspended.tables),
            above=sum(demand.count_told for _, demand in speaking),
            speaking=sum(self.asking.speaks(side) for side, _ in speaking),
        )


def _free_from(shown: list[tuple[ShapeTable, U64]], moments: I64) -> I64:
    """The first moments at which nothing covers pairs whose sub-tuples have these hashes."""
    while True:
        before = moments
        for table, hashes in shown:
            moments = table.free_at(hashes, moments)
        if (moments == before).all():
            break
    for table, hashes in shown:
        moments = np.where(table.covers(hashes), NEVER, moments)
    return moments


def latest_end(ground: Ground, shape: Shape) -> int:
    """The end of the longest-lived row that a suspended value may be about.

    Rows of a table count only for what they show themselves: a producer's values are not kept for the sake of rows that
    never end. Opposite a complete table rows are not stored, so there it is the end of a row that comes now.
    """
    ends = [NO_WATERMARK]
    for side, state in enumerate(ground.states):
        beside_tables = all(static for other, static in enumerate(ground.is_static) if other != side)
        if not ground.is_static[side] or beside_tables or shape.sides[side]:
            ends += [segment.max_end for segment in state.segments()]
        if beside_tables and not ground.is_static[side]:
            ends.append(ground.times[side] + min(ground.windows[side].values()))
    return max(ends)
