"""One partition of one join node, whatever the kind of join: what is seen once, numbered, timed, stored and sent.

`step(message) -> Effects` is the same for the same state and message. Per step: refuse what does not belong here, drop
what was seen before, let the kind of join do its work (`JoinNode`: two inputs, `MultiJoin`: more), purge, emit.

Invariants
- Effects carry their order: segments and memo are durable before a send leaves, and a send leaves before it is trimmed.
- A block that is not what the plan says is refused before anything changes (`admission`).
- A block of ingest is deduplicated by source offset, one of a node by its sequence. A node's sequence is
  (offset in the input topic << 20 | count), so a node rebuilt from its input topic repeats the same sequences.
- Output watermark = min of the sides' watermarks: a later output contains at least one later row.
- A block cut into several keeps the old watermark in all but the last.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from schemas.block import MAX_BLOCK_BYTES, NO_WATERMARK, Block, Header, Kind
from schemas.errors import BlockError, StateError
from schemas.mesh import Routing
from schemas.rows import I64, U64, Rows
from topology.join.admission import Admission, HeraldAdmission
from topology.join.routing import PathsMemo
from topology.message.bundle import unseen_of
from topology.plan.heralds import heralds_of
from topology.plan.plan import Input, Plan
from topology.restraint.heralding.heeding import HeraldsMemo
from topology.restraint.heralding.heralding import Heralding, Told, Wanted
from topology.restraint.suspension.border import OF_PRODUCER, check_feedback, is_feedback, restore_tables
from topology.restraint.suspension.feedback import PARTITIONS_MOST, Feedback
from topology.restraint.suspension.memo import FeedbackMemo
from topology.state.hashing import hash_key
from topology.state.meeting import ARRIVED
from topology.state.window import HASH, OFFSET_BITS, OFFSET_MASK, part_id, part_time
from topology.state.window_state import MemoryStore, Run, Segment, SegmentStore, WindowState

SEQUENCE_BITS = 20
WATERMARKS_PER_WINDOW = 12  # how often a target that gets no rows is told the time


class Memo(msgspec.Struct):
    """What a node partition must remember beside its segments. Written with every step."""

    epoch: int = 0
    offsets: dict[str, int] = msgspec.field(default_factory=dict)  # next offset of each topic kind (in, control, …)
    seen_offsets: dict[str, dict[int, int]] = msgspec.field(default_factory=dict)  # alias -> source partition -> next
    incarnations: dict[str, dict[int, int]] = msgspec.field(default_factory=dict)  # node -> partition -> newest
    seen_sequences: dict[str, dict[int, int]] = msgspec.field(default_factory=dict)  # node -> partition -> last
    times: dict[str, dict[int, int]] = msgspec.field(default_factory=dict)  # sender -> its partition -> watermark
    senders: dict[str, int] = msgspec.field(default_factory=dict)  # sender -> how many partitions it has
    watermarks: list[int] = msgspec.field(default_factory=lambda: [NO_WATERMARK, NO_WATERMARK])
    told: dict[int, int] = msgspec.field(default_factory=dict)  # target partition -> watermark it was sent
    sequence: int = 0
    rows_in: list[int] = msgspec.field(default_factory=lambda: [0, 0])
    rows_out: int = 0
    rows_repeated: int = 0
    blocks_fenced: int = 0
    rows_purged: int = 0
    blocks_in: int = 0
    feedback: FeedbackMemo | None = None  # when the query runs with feedback
    paths: PathsMemo | None = None  # of an M-Join
    heralds: HeraldsMemo | None = None  # where there are any


@dataclass(frozen=True)
class Send:
    target: str  # node id, or "out"
    partition: int
    block: Block
    back: bool = False  # to the node's feedback topic instead of its input


@dataclass
class Effects:
    """What a step wants done, in this order: store `puts` and `drops` and the memo, then `sends`."""

    puts: list[tuple[int, Segment, Run]] = field(default_factory=list)  # (side, segment, rows)
    drops: list[tuple[int, int]] = field(default_factory=list)  # (side, segment id)
    sends: list[Send] = field(default_factory=list)
    # of feedback: what changed in them, by name; None deletes what stood there
    tables: dict[str, bytes | None] = field(default_factory=dict)

    def add(self, then: "Effects") -> None:
        """What a later step wants done, too."""
        put = {(side, segment.id): (side, segment, run) for side, segment, run in self.puts}
        for place in then.drops:
            if put.pop(place, None) is None:  # else made and merged before it was ever written
                self.drops.append(place)
        self.puts = [*put.values(), *then.puts]
        self.sends += then.sends
        self.tables |= then.tables


class _Recorder:
    """A segment store that writes down what changes, so that a step's changes are one batch."""

    def __init__(self, store: SegmentStore, side: int) -> None:
        self.store, self.side = store, side
        self.puts: dict[int, tuple[Segment, Run]] = {}
        self.drops: list[int] = []

    def get(self, id: int) -> Run:
        return self.store.get(id)

    def put(self, segment: Segment, run: Run) -> None:
        self.puts[segment.id] = (segment, run)
        self.store.put(segment, run)

    def drop(self, id: int) -> None:
        if id in self.puts:
            del self.puts[id]  # made and merged within one step: it never needs to be written
        else:
            self.drops.append(id)
        self.store.drop(id)

    def collect(self, effects: Effects) -> None:
        effects.puts.extend((self.side, segment, run) for segment, run in self.puts.values())
        effects.drops.extend((self.side, id) for id in self.drops)
        self.puts, self.drops = {}, []


class Partition:
    """What every kind of join does alike."""

    def __init__(
        self,
        plan: Plan,
        node: str,
        partition: int,
        partitions: int,
        *,
        epoch: int = 1,
        incarnation: int = 1,
        stores: Sequence[SegmentStore] | None = None,
        memo: Memo | None = None,
        feedback: bool | str = False,
        heralds: bool = False,
        routing: Routing = "fixed",
    ) -> None:
        self.plan, self.node = plan, plan.node(node)
        self.partition, self.partitions, self.incarnation = partition, partitions, incarnation
        inputs, told = self.node.inputs, heralds_of(plan, self.node) if heralds else ()
        sides = len(inputs) + len(told)
        self.memo = memo if memo is not None else Memo()
        self.memo.epoch = epoch
        self.memo.watermarks += [NO_WATERMARK] * (sides - len(self.memo.watermarks))
        self.memo.rows_in += [0] * (len(inputs) - len(self.memo.rows_in))
        windows = {source.alias: source.window_ms for source in plan.query.sources}
        self.windows = tuple({a: windows[a] for a in side.aliases} for side in inputs)
        self.is_static = tuple(
            plan.query.is_static(side.aliases) for side in inputs
        )  # sides of tables alone: their rows never end
        self._recorders = tuple(_Recorder(s, i) for i, s in enumerate(stores or [MemoryStore() for _ in range(sides)]))
        self.states = tuple(
            WindowState(w, r, key=tuple(map(str, side.key)))
            for w, r, side in zip(self.windows, self._recorders, inputs, strict=False)
        )
        self.heralding: Heralding | None = None
        if told:
            self.memo.heralds = self.memo.heralds or HeraldsMemo()
            self.heralding = Heralding(self, self._recorders[len(inputs) :], self.memo.heralds)
        self._admission = (
            *(Admission(plan, side, partition, partitions) for side in inputs),
            *(HeraldAdmission(plan, herald, partition, partitions) for herald in told),
        )
        self.window = min(windows.values())
        self.watermark_step = max(1, self.window // WATERMARKS_PER_WINDOW)
        self._joined = tuple(_parts(side) + [str(c) for c in side.columns] for side in inputs)  # all but the hash
        self.carried = [
            n for side in inputs for n in _parts(side) + [str(c) for c in side.columns if c in self.node.columns]
        ]
        self._target: Input | None = None
        if self.node.target != "out":
            self._target = plan.node(self.node.target).inputs[self.node.target_side]
        self.feedback: Feedback | None = None
        if feedback and partitions <= PARTITIONS_MOST and len(plan.nodes) > 1:
            self.memo.feedback = self.memo.feedback or FeedbackMemo()
            self.feedback = Feedback(self, self.memo.feedback, auto=feedback == "auto")
        self._prepare(feedback, routing)

    def _prepare(self, feedback: bool | str, routing: Routing) -> None:
        """What one kind of join has beside this; the last part of making it."""
        raise NotImplementedError

    @property
    def stored_windows(self) -> tuple[Mapping[str, int], ...]:
        """Of everything that has segments: the inputs, then the heralds."""
        return (*self.windows, *(told.windows for told in self.told))

    @property
    def told(self) -> Sequence[Told]:
        """The heralds and what has come of each."""
        return () if self.heralding is None else self.heralding.told

    def restore(self, segments: Sequence[list[Segment]], tables: Mapping[str, bytes | None] | None = None) -> None:
        for state, found in zip((*self.states, *(told.state for told in self.told)), segments, strict=True):
            state.restore(found)
        if tables:
            self._restore_tables(tables)

    def step(self, offset: int, block: Block) -> Effects:
        """Take the block at `offset` of the input topic; a `BlockError` leaves the state as it was."""
        header, memo = block.header, self.memo
        self._admit(block)
        effects = Effects()
        memo.offsets["in"] = offset + 1
        memo.blocks_in += 1
        memo.sequence = (offset + 1) << SEQUENCE_BITS
        rows = self._unseen(header, block.rows)
        if rows is None:
            return effects
        before = self.watermark
        output = None
        if self.reads(header):
            output = self._work(offset, block, rows, effects)
        elif self._pass_over(header, before):
            return effects
        horizons = [self._horizon(side) for side in range(len(self.states))]
        for state, horizon in zip(self.states, horizons, strict=True):
            memo.rows_purged += state.purge(horizon)
        if self.heralding is not None:
            self.heralding.purge(min(horizons))
        self._emit(output, before, effects)
        self._finish(effects)
        if self.heralding is not None:
            self.heralding.weigh(offset)
        for recorder in self._recorders:
            recorder.collect(effects)
        return effects

    def _admit(self, block: Block) -> None:
        """Refuse what does not belong here."""
        header, last = block.header, len(self._admission) - 1
        heard = self.feedback is not None and is_feedback(header, self.node.target)
        if not (heard and header.kind not in OF_PRODUCER) and not 0 <= header.side <= last:
            raise BlockError(f"for side {header.side}, there are {', '.join(map(str, range(last)))} and {last}")
        if heard:
            check_feedback(self.feedback, block)  # type: ignore[arg-type]
        else:
            self._admission[header.side].check(block, self.memo.epoch)

    def _work(self, offset: int, block: Block, rows: Rows, effects: Effects) -> Rows | None:
        """Take rows that are new, and the sender's time, or what is said about demand; gives the composites that are
        made."""
        if self.feedback is not None and is_feedback(block.header, self.node.target):
            return self.feedback.hear(block, offset, effects)
        output = None
        if block.header.side >= len(self.states):
            output = self._hear_of(block.header, rows, offset)
        elif len(rows):
            self.memo.rows_in[block.header.side] += len(rows)
            output = self._take(offset, block.header, rows, effects)
        self._advance(block.header, block.header.side)
        return output

    @property
    def makes_nothing(self) -> bool:
        """Whether our consumer wants nothing at all for now: what it asks for later is found then."""
        return self.feedback is not None and any(
            not table.shape.columns and table.count_active for table in self.feedback.suspended.tables
        )

    def reads(self, header: Header) -> bool:
        """Whether the rows of a block are to be read; of a herald that is let be, its header is enough."""
        if self.heralding is None or is_feedback(
            header, self.node.target
        ):  # a consumer's word is about a side of its own, whose number may be that of a herald here
            return True
        return not len(self.states) <= header.side < len(self._admission) or self.heralding.reads(
            header.side - len(self.states)
        )

    def _pass_over(self, header: Header, before: int) -> bool:
        """A block of a herald that is let be: its time alone. Whether that is all that is to be done."""
        assert self.heralding is not None
        if header.kind == "rows":
            self.heralding.skip(header.side - len(self.states), header.watermark)
        self._advance(header, header.side)
        return self.watermark == before and not self.heralding.is_weighed_now

    def _hear_of(self, header: Header, rows: Rows, offset: int) -> Rows | None:
        """Rows of a heralded stream: what they are the first to fit is made now, unless a consumer has it suspended."""
        assert self.heralding is not None
        number = header.side - len(self.states)
        made = list(self.heralding.take(number, rows, offset)) if len(rows) else []
        if self.feedback is not None and not self.feedback.suspended.is_empty:
            made = [pairs.filter(self.feedback.free(pairs)) for pairs in made]
        made = [pairs.select(self.carried) for pairs in made if len(pairs)]
        return Rows.concat(made) if made else None

    def _take(self, offset: int, header: Header, rows: Rows, effects: Effects) -> Rows | None:
        """Rows of one side: probe, then insert."""
        raise NotImplementedError

    def _finish(self, effects: Effects) -> None:
        """The end of a step, behind its rows."""
        if self.feedback is not None:
            self.feedback.finish(effects)

    def _restore_tables(self, tables: Mapping[str, bytes | None]) -> None:
        """Take over what a step wrote as tables."""
        if self.feedback is not None:
            restore_tables(self.feedback, tables)

    def feedback_counts(self) -> dict[str, int] | None:
        """For reports; None where feedback is off."""
        return None if self.feedback is None else self.feedback.counts()

    @property
    def watermark(self) -> int:
        """No later output starts before this."""
        held = min(self.memo.watermarks)
        return held if self.feedback is None else min(held, self.feedback.hold)

    def _horizon(self, side: int) -> int:
        """Rows of a side that end before this nobody needs."""
        return self.others_reached(side) if self.feedback is None else self.feedback.horizon(side)

    def others_reached(self, side: int) -> int:
        """Whatever comes on any other side begins here or later."""
        return min(time for other, time in enumerate(self.memo.watermarks) if other != side)

    def join_again(self, side: int, stored: Run) -> tuple[Rows | None, I64]:
        """Composites of rows that are stored already, and the moment when the last of what each needs came; `NEVER` if
        some herald did not yet."""
        raise NotImplementedError

    def make_for(self, told: Told, heralds: Run, wanted: Wanted) -> Iterator[Rows]:
        """Composites of stored rows that show what some rows of a heralded stream have, one for each value; those that
        are wanted."""
        raise NotImplementedError

    def candidates(self, side: int, probe: Run) -> int:
        """About how many composites these rows would make; cheap, because none is made."""
        raise NotImplementedError

    def arriving(self, offset: int, side: int, rows: Rows) -> Run:
        """New rows of a side, ready to be stored: with the moment they came, where composites of them may wait."""
        if self.heralding is not None or (self.feedback is not None and self.feedback.suspended.tables):
            rows = rows.with_column(ARRIVED, np.full(len(rows), offset, np.int64))
        return Run.of(rows, self.windows[side])

    def send_to(self, partition: int, kind: Kind, rows: Rows) -> Send:
        """To a partition of the consumer, about demand."""
        return self._send(partition, kind, self.watermark, rows)

    def send_back(self, side: int, partition: int, kind: Kind, watermark: int, rows: Rows | None) -> Send:
        """To a partition of the producer of a side."""
        return Send(self.node.inputs[side].name, partition, Block(self._header(kind, side, watermark), rows), back=True)

    def _unseen(self, header: Header, rows: Rows | None) -> Rows | None:
        """The rows not seen before; None if the whole block is a repeat."""
        memo = self.memo
        if not header.positions:
            newest = memo.incarnations.setdefault(header.sender, {})
            if header.incarnation < newest.get(header.sender_partition, 0):
                memo.blocks_fenced += 1  # a worker that was taken for dead woke up; its successor sends the same rows
                return None
            newest[header.sender_partition] = header.incarnation
            last = memo.seen_sequences.setdefault(header.sender, {})
            rows = rows if rows is not None else _NOTHING
            new = unseen_of(header, rows, last.get(header.sender_partition, -1))
            memo.rows_repeated += len(rows) - (0 if new is None else len(new))
            if new is not None:
                last[header.sender_partition] = header.sequence
            return new
        seen = memo.seen_offsets.setdefault(header.sender, {})
        if rows is None:
            rows = _NOTHING
        for position in header.positions:
            known = seen.get(position.partition)
            if known is not None:
                if position.first > known:
                    raise StateError(
                        f"{self.plan.query.name}.{self.node.id} partition {self.partition}: rows of {header.sender}"
                        f" partition {position.partition}, offsets {known} to {position.first - 1}, never arrived; stop"
                        " the mesh, delete this node's state directory and start again: it is rebuilt from the input"
                        " topic"
                    )
                if position.first < known and len(rows):
                    ids = rows.ints(part_id(header.sender))
                    unseen = (ids >> OFFSET_BITS != position.partition) | ((ids & OFFSET_MASK) >= known)
                    if not unseen.all():
                        memo.rows_repeated += len(rows) - int(unseen.sum())
                        rows = rows.filter(unseen)
            seen[position.partition] = max(known or 0, position.next)
        return rows

    def _insert(self, side: int, run: Run) -> None:
        horizon = self._horizon(side)
        if int(run.ends.min()) < horizon:  # no later row of another side can meet these
            run = run.take(np.flatnonzero(run.ends >= horizon))
        self.states[side].insert(run)

    def _advance(self, header: Header, side: int) -> None:
        memo = self.memo
        times = memo.times.setdefault(header.sender, {})
        reached = (
            [(p.partition, p.watermark) for p in header.positions]
            if header.positions
            else [(header.sender_partition, header.watermark)]
        )
        for partition, time in reached:
            times[partition] = max(times.get(partition, NO_WATERMARK), time)
        memo.senders[header.sender] = header.sender_partitions
        if len(times) >= header.sender_partitions:
            memo.watermarks[side] = max(memo.watermarks[side], min(times.values()))

    def _emit(self, output: Rows | None, before: int, effects: Effects) -> None:
        now = self.watermark
        if output is None and now == before:
            return
        told = self.memo.told
        for partition, rows in self._partitioned(output).items():
            if self.node.target != "out":
                told[partition] = now
            pieces = cut(rows)
            for k, piece in enumerate(pieces):
                effects.sends.append(self._send(partition, "rows", now if k == len(pieces) - 1 else before, piece))
            self.memo.rows_out += len(rows)
        if self.node.target == "out":
            return
        for partition in range(self.partitions):
            if now - told.get(partition, NO_WATERMARK) >= self.watermark_step:
                told[partition] = now
                effects.sends.append(self._send(partition, "watermark", now, None))

    def _partitioned(self, output: Rows | None) -> dict[int, Rows]:
        if output is None:
            return {}
        if self._target is None:
            return {self.partition: output}
        hashes = hash_key([output[str(column)] for column in self._target.key])
        return partition_rows(output.with_column(HASH, hashes), self.partitions)

    def _send(self, partition: int, kind: Kind, watermark: int, rows: Rows | None) -> Send:
        header = self._header(kind, self.node.target_side, watermark)
        return Send(self.node.target, partition, Block(header, rows))

    def _header(self, kind: Kind, side: int, watermark: int) -> Header:
        self.memo.sequence += 1
        return Header(
            kind=kind,
            sender=self.node.id,
            sender_partition=self.partition,
            sender_partitions=self.partitions,
            incarnation=self.incarnation,
            sequence=self.memo.sequence,
            epoch=self.memo.epoch,
            side=side,
            watermark=watermark,
            avoided=0 if self.memo.feedback is None else self.memo.feedback.spared,
        )


_NOTHING = Rows({}, 0)


def _parts(side: Input) -> list[str]:
    return [name(alias) for alias in side.aliases for name in (part_id, part_time)]


def partition_rows(rows: Rows, partitions: int, hashes: U64 | None = None) -> dict[int, Rows]:
    """Rows by the partition that hashes say, those of their key unless others are given."""
    if partitions == 1:
        return {0: rows}
    where = ((rows[HASH] if hashes is None else hashes) % np.uint64(partitions)).astype(np.int64)
    order = np.argsort(where, kind="stable")
    bounds = np.searchsorted(where[order], np.arange(partitions + 1)).tolist()
    rows = rows.take(order)
    return {p: rows.slice(bounds[p], bounds[p + 1]) for p in range(partitions) if bounds[p + 1] > bounds[p]}


def cut(rows: Rows, limit: int = MAX_BLOCK_BYTES) -> list[Rows]:
    """Pieces of at most about `limit` bytes; in a fixed order of rows, so that a repeat is cut the same way."""
    size = rows.nbytes
    if size <= limit or len(rows) == 1:
        return [rows]
    ids = [rows.ints(name) for name in sorted(rows.columns) if name.startswith("#") and name != HASH]
    rows = rows.take(np.lexsort(ids))
    count = max(1, len(rows) * limit // size)
    return [rows.slice(k, k + count) for k in range(0, len(rows), count)]
