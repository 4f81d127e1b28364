"""A join node's partition as a state machine: `step(message) -> Effects`, the same for the same state and message.

Per step: drop what was seen before, probe the other side's state with the new rows, insert them into their own side's, then
apply the sender's watermark and purge. A pair is made by whichever of its rows is processed later, so exactly once.

Invariants
- Effects carry their order: segments and memo are durable before a send leaves, and a send leaves before it is trimmed.
- A block that is not what the plan says is refused before anything changes (`admission`).
- A block of ingest is deduplicated by source offset, one of a node by its sequence. A node's sequence is
  (offset in the input topic << 20 | count), so a node rebuilt from its input topic repeats the same sequences.
- Output watermark = min of the two sides' watermarks: a later output contains at least one later row.
- A block cut into several keeps the old watermark in all but the last.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pyarrow.compute as pc

from schemas.block import MAX_BLOCK_BYTES, NO_WATERMARK, Block, Header, Kind
from schemas.errors import BlockError, StateError
from schemas.rows import I64, Column, Mask, Rows
from topology.admission import Admission
from topology.feedback import ARRIVED, PARTITIONS_MOST, Feedback, FeedbackMemo, is_feedback
from topology.feedback_blocks import check_feedback, restore_tables
from topology.frames import Conditions
from topology.hashing import hash_key, is_exact
from topology.plan import Input, Plan
from topology.state import MemoryStore, Run, Segment, SegmentStore, WindowState, count_matches, matches
from topology.window import ALWAYS_WINDOW_MS, HASH, OFFSET_BITS, OFFSET_MASK, part_id, part_time, validity

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
    tables: dict[str, bytes] = field(default_factory=dict)  # of feedback, whole, those that changed


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


class JoinNode:
    """One partition of one join node."""

    def __init__(
        self,
        plan: Plan,
        node: str,
        partition: int,
        partitions: int,
        *,
        epoch: int = 1,
        incarnation: int = 1,
        stores: tuple[SegmentStore, SegmentStore] | None = None,
        memo: Memo | None = None,
        feedback: bool | str = False,
    ) -> None:
        self.plan, self.node = plan, plan.node(node)
        self.partition, self.partitions, self.incarnation = partition, partitions, incarnation
        self.memo = memo if memo is not None else Memo()
        self.memo.epoch = epoch
        windows = {source.alias: source.window_ms for source in plan.query.sources}
        self._all_windows = {a: windows[a] for a in self.node.aliases}
        self.windows = tuple({a: windows[a] for a in side.aliases} for side in self.node.inputs)
        self.is_static = tuple(plan.query.is_static(side.aliases) for side in self.node.inputs)  # sides of tables alone: their rows never end
        self._recorders = tuple(_Recorder(s, i) for i, s in enumerate(stores or (MemoryStore(), MemoryStore())))
        self.states = tuple(WindowState(w, r) for w, r in zip(self.windows, self._recorders, strict=True))
        self._admission = tuple(Admission(plan, side, partition, partitions) for side in self.node.inputs)
        self.window = min(windows.values())
        self.watermark_step = max(1, self.window // WATERMARKS_PER_WINDOW)
        self._residual = Conditions(self.node.residuals)
        inputs = self.node.inputs
        self._joined = tuple(_parts(side) + [str(c) for c in side.columns] for side in inputs)  # all but the hash
        self.carried = [n for side in inputs for n in _parts(side) + [str(c) for c in side.columns if c in self.node.columns]]
        self._target: Input | None = None
        if self.node.target != "out":
            self._target = plan.node(self.node.target).inputs[self.node.target_side]
        self.feedback: Feedback | None = None
        if feedback and partitions <= PARTITIONS_MOST and len(plan.nodes) > 1:
            self.memo.feedback = self.memo.feedback or FeedbackMemo()
            self.feedback = Feedback(self, self.memo.feedback, auto=feedback == "auto")

    def restore(self, segments: tuple[list[Segment], list[Segment]], tables: dict[str, bytes] | None = None) -> None:
        for state, found in zip(self.states, segments, strict=True):
            state.restore(found)
        if self.feedback is not None and tables:
            restore_tables(self.feedback, tables)

    def step(self, offset: int, block: Block) -> Effects:
        """Take the block at `offset` of the input topic; a `BlockError` leaves the state as it was."""
        header, memo = block.header, self.memo
        if header.side not in (0, 1):
            raise BlockError(f"for side {header.side}, there are 0 and 1")
        about_demand = is_feedback(header, self.node.target)
        if about_demand and self.feedback is not None:
            check_feedback(self.feedback, block)
        else:
            self._admission[header.side].check(block, memo.epoch)
        side, effects = header.side, Effects()
        memo.offsets["in"] = offset + 1
        memo.blocks_in += 1
        memo.sequence = (offset + 1) << SEQUENCE_BITS
        rows = self._unseen(header, block.rows)
        if rows is None:
            return effects
        output, before = None, self.watermark
        if about_demand and self.feedback is not None:
            output = self.feedback.hear(block, offset, effects)
        else:
            if len(rows):
                memo.rows_in[side] += len(rows)
                output = self._take(side, rows, offset, header, effects)
            self._advance(header, side)
        for one in (0, 1):
            memo.rows_purged += self.states[one].purge(self._horizon(one))
        self._emit(output, before, effects)
        if self.feedback is not None:
            self.feedback.finish(effects)
        for recorder in self._recorders:
            recorder.collect(effects)
        return effects

    def _take(self, side: int, rows: Rows, offset: int, header: Header, effects: Effects) -> Rows | None:
        """Rows of one side: probe, then insert."""
        if self.feedback is None:
            run = Run.of(rows, self.windows[side])
            output = self._join(side, run)
            self._insert(side, run)
            return output
        run = Run.of(rows.with_column(ARRIVED, np.full(len(rows), offset, np.int64)), self.windows[side])
        self.feedback.arrive(side, run, effects)
        output = self._join(side, self.feedback.probing(side, run))
        self._insert(side, run)
        self.feedback.detect(side, run, header.sender_partition)
        self.feedback.weigh(side, run, header, effects)
        return output

    @property
    def watermark(self) -> int:
        """No later output starts before this."""
        held = min(self.memo.watermarks)
        return held if self.feedback is None else min(held, self.feedback.hold)

    def _horizon(self, side: int) -> int:
        """Rows of a side that end before this nobody needs."""
        return self.memo.watermarks[1 - side] if self.feedback is None else self.feedback.horizon(side)

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
            if header.sequence <= last.get(header.sender_partition, -1):
                memo.rows_repeated += 0 if rows is None else len(rows)
                return None
            last[header.sender_partition] = header.sequence
            return rows if rows is not None else _NOTHING
        seen = memo.seen_offsets.setdefault(header.sender, {})
        if rows is None:
            rows = _NOTHING
        for position in header.positions:
            known = seen.get(position.partition)
            if known is not None:
                if position.first > known:
                    raise StateError(
                        f"{self.plan.query.name}.{self.node.id} partition {self.partition}: rows of {header.sender} partition "
                        f"{position.partition}, offsets {known} to {position.first - 1}, never arrived; stop the mesh, delete "
                        "this node's state directory and start again: it is rebuilt from the input topic"
                    )
                if position.first < known and len(rows):
                    ids = rows.ints(part_id(header.sender))
                    new = (ids >> OFFSET_BITS != position.partition) | ((ids & OFFSET_MASK) >= known)
                    if not new.all():
                        memo.rows_repeated += len(rows) - int(new.sum())
                        rows = rows.filter(new)
            seen[position.partition] = max(known or 0, position.next)
        return rows

    def _join(self, side: int, probe: Run) -> Rows | None:
        """Every composite of `probe` with the other side's state that is wanted."""
        pairs, _ = self._pairs(side, probe)
        if pairs is not None and self.feedback is not None and not self.feedback.suspended.is_empty:
            pairs = pairs.filter(self.feedback.allowed(pairs, validity(pairs, self._all_windows)[1]))
        return pairs.select(self.carried) if pairs is not None and len(pairs) else None

    def join_again(self, side: int, stored: Run) -> tuple[Rows | None, I64]:
        """Composites of rows that are stored already, and the moment when the later row of each came."""
        return self._pairs(side, stored, moments=True)

    def candidates(self, side: int, probe: Run) -> int:
        """How many pairs of these rows the key alone would allow; cheap, because none is made."""
        reachable = self.states[1 - side].reachable(int(probe.starts.min()), int(probe.ends.max())) if len(probe) else ()
        return sum(count_matches(probe, run) for run in reachable)

    def _pairs(self, side: int, probe: Run, moments: bool = False) -> tuple[Rows | None, I64]:
        """Every pair of `probe` with the other side's state, key equality and residuals verified."""
        other, carried = self.states[1 - side], self._joined[1 - side]
        probed: list[I64] = []
        stored: list[Rows] = []
        came: list[I64] = []
        if not len(probe):
            return None, _NO_MOMENTS
        for run in other.reachable(int(probe.starts.min()), int(probe.ends.max())):
            waits = None if self.feedback is None or moments else self.feedback.hidden(1 - side, run)
            for i, j in matches(probe, run):
                if waits is not None:
                    free = ~waits[j]
                    self.feedback.memo.pairs_avoided += len(i) - int(free.sum())  # type: ignore[union-attr]
                    i, j = i[free], j[free]
                probed.append(i)
                stored.append(run.rows.select(carried).take(j))
                if moments:
                    came.append(np.maximum(probe.rows.ints(ARRIVED)[i], run.rows.ints(ARRIVED)[j]))
        if not probed:
            return None, _NO_MOMENTS
        mine = probe.rows.select(self._joined[side]).take(np.concatenate(probed))
        pairs = Rows({**mine.columns, **Rows.concat(stored).columns}, len(mine))
        since = np.concatenate(came) if moments else _NO_MOMENTS
        keys = [(pairs[str(a)], pairs[str(b)]) for a, b in zip(self.node.left.key, self.node.right.key, strict=True)]
        masks = [] if is_exact([a for a, _ in keys]) else [np.logical_and.reduce([_equal(a, b) for a, b in keys])]
        if masks:
            pairs = pairs.filter(masks[0])
        if self._residual and len(pairs):
            masks.append(self._residual.mask(pairs))
            pairs = pairs.filter(masks[-1])
        for mask in masks if moments else ():
            since = since[mask]
        return (pairs, since) if len(pairs) else (None, _NO_MOMENTS)

    def _insert(self, side: int, run: Run) -> None:
        horizon = self._horizon(side)
        if int(run.ends.min()) < horizon:  # no later row of the other side can meet these
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

    def send_to(self, partition: int, kind: Kind, rows: Rows) -> Send:
        """To a partition of the consumer, about demand."""
        return self._send(partition, kind, self.watermark, rows)

    def send_back(self, side: int, partition: int, kind: Kind, watermark: int, rows: Rows | None) -> Send:
        """To a partition of the producer of a side."""
        return Send(self.node.inputs[side].name, partition, Block(self._header(kind, side, watermark), rows), back=True)

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
            avoided=0 if self.memo.feedback is None else self.memo.feedback.pairs_avoided,
        )


_NOTHING = Rows({}, 0)
_NO_MOMENTS = np.empty(0, np.int64)


def _parts(side: Input) -> list[str]:
    return [name(alias) for alias in side.aliases for name in (part_id, part_time)]


def _equal(left: Column, right: Column) -> Mask:
    """Whether the keys of candidate pairs are really equal; hashes of text and of several columns may collide."""
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return np.equal(left, right)
    return np.asarray(pc.equal(left, right).to_numpy(zero_copy_only=False), np.bool_)


def partition_rows(rows: Rows, partitions: int) -> dict[int, Rows]:
    """Rows by the partition their hash belongs to."""
    if partitions == 1:
        return {0: rows}
    where = (rows[HASH] % np.uint64(partitions)).astype(np.int64)
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


def describe_state(node: JoinNode) -> list[dict[str, Any]]:
    """What each side holds, for reports."""
    held = []
    for side, state, given in zip(node.node.inputs, node.states, node.windows, strict=True):
        segments, static = list(state.segments()), min(given.values()) == ALWAYS_WINDOW_MS
        held.append({
            "side": "left" if side is node.node.left else "right",
            "name": side.name,
            "rows": sum(s.rows for s in segments),
            "bytes": sum(s.bytes for s in segments),
            "segments": len(segments),
            "oldest_ms": None if static else min((s.min_start for s in segments), default=None),
            "newest_ms": None if static else max((s.max_start for s in segments), default=None),
            "window_ms": -1 if static else min(given.values()),
        })  # fmt: skip
    return held
