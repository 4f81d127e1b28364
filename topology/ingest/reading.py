"""From decoded events to blocks for the join nodes: lateness, selection, hashing, routing. No I/O.

Invariants
- Lateness is a function of the log: reading a partition in offset order, an event is late iff its time is below
  (largest earlier time of that partition) - lateness. A partition's watermark is (largest time) - lateness.
- `idle` raises a silent partition's watermark to a floor; what then comes below the floor is late with reason `idle`.
  The floor is part of the partition's durable `Reading`, written before the raised watermark leaves.
- On each channel (alias, target partition) the blocks' positions follow one another without a gap. Before a
  position is committed every channel has been told of it, so a restart never leaves one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from schemas.block import MAX_BLOCK_BYTES, NO_WATERMARK, Block, Events, Heralds, Position
from schemas.mesh import Stream
from schemas.rows import I64, Column, Mask, Rows
from topology.ingest.decode import Broken, Decoder
from topology.message.effects import Send
from topology.plan.heralds import Herald, herald_routes, part_hash
from topology.plan.plan import Plan, Route
from topology.query.conditions import Conditions
from topology.restraint.interface import WATERMARKS_PER_WINDOW
from topology.state.hashing import combine, hash_key
from topology.state.partitioning import partition_rows
from topology.state.window import HASH, OFFSET_BITS, part_id, part_time

_ID, _TIME = "#", "@"  # id and time columns before they belong to an alias


class Reading(msgspec.Struct):
    """What must survive a restart about one source partition. Travels as the metadata of its offset commit."""

    next: int
    max_time: int = NO_WATERMARK
    floor: int = NO_WATERMARK

    def watermark(self, lateness_ms: int) -> int:
        own = self.max_time - lateness_ms if self.max_time != NO_WATERMARK else NO_WATERMARK
        return max(own, self.floor)


@dataclass(frozen=True)
class Late:
    partition: int
    offset: int
    time: int
    reason: str  # "late" or "idle"
    watermark: int


@dataclass
class Read:
    """One batch of one partition, read."""

    rows: Rows
    late: list[Late] = field(default_factory=list)
    broken: list[tuple[int, Broken]] = field(default_factory=list)  # (offset, what)


class StreamReader:
    """Reads the partitions of one stream."""

    def __init__(self, stream: Stream, partitions: int) -> None:
        self.stream, self.partitions = stream, partitions
        self.readings: dict[int, Reading] = {}
        self._decoder = Decoder(stream)

    def watermark(self, partition: int) -> int:
        reading = self.readings.get(partition)
        return reading.watermark(self.stream.lateness_ms) if reading else NO_WATERMARK

    def forget(self, partition: int) -> None:
        """The partition is somebody else's now."""
        self.readings.pop(partition, None)

    def read(
        self,
        partition: int,
        offsets: Sequence[int],
        values: Sequence[bytes | None],
        keys: Mapping[int, bytes | None] | None = None,  # noqa: ARG002
    ) -> Read:
        """Decode a run of records of one partition, in offset order, and set late ones aside. Only tables look at
        record keys."""
        reading = self.readings.setdefault(partition, Reading(offsets[0]))
        decoded = self._decoder.decode(values)
        broken = [(offsets[b.index], b) for b in decoded.broken]
        where = np.asarray(offsets if decoded.kept is None else [offsets[i] for i in decoded.kept], np.int64)
        reading.next = offsets[-1] + 1
        rows = decoded.rows
        if len(rows) == 0:
            return Read(self._with_ids(rows, partition, where), [], broken)
        times = rows.ints(self.stream.event_time)
        earlier = np.maximum.accumulate(np.concatenate(([reading.max_time], times)))
        reading.max_time = int(earlier[-1])
        bound = earlier[:-1] - self.stream.lateness_ms
        late = times < np.maximum(bound, reading.floor)
        rows = self._with_ids(rows, partition, where)
        if not late.any():
            return Read(rows, [], broken)
        aside = [
            Late(
                partition,
                int(where[i]),
                int(times[i]),
                "late" if times[i] < bound[i] else "idle",
                int(max(bound[i], reading.floor)),
            )
            for i in np.flatnonzero(late)
        ]
        return Read(rows.filter(~late), aside, broken)

    def _with_ids(self, rows: Rows, partition: int, offsets: I64) -> Rows:
        return Rows({**rows.columns, _ID: offsets | (partition << OFFSET_BITS), _TIME: self._times(rows)}, len(rows))

    def _times(self, rows: Rows) -> Column:
        return rows[self.stream.event_time]


class Router:
    """Sends one source's rows to the join node that wants them."""

    def __init__(self, plan: Plan, route: Route, partitions: int, epoch: int, incarnation: int) -> None:
        self.plan, self.route, self.partitions = plan, route, partitions
        self.epoch, self.incarnation = epoch, incarnation
        self.source = plan.query.source(route.alias)
        windows = [source.window_ms for source in plan.query.sources]
        self.watermark_step = max(1, min(windows) // WATERMARKS_PER_WINDOW)
        self.told: list[dict[int, int]] = [{} for _ in range(partitions)]  # target -> source partition -> next offset
        self.told_time: list[dict[int, int]] = [{} for _ in range(partitions)]
        self.dropped_null = self.dropped_selection = self.rows_out = 0
        alias = route.alias
        types = plan.query.types
        self._names = {part_id(alias): _ID, part_time(alias): _TIME}
        self._names |= {str(column): column.name for column in route.columns}
        self._selection = Conditions(route.selection)
        self._fields = {str(column): column.name for column in types if column.alias == alias}
        self._present = [column.name for column in route.non_null]

    def assign(self, partition: int, next: int) -> None:
        """A source partition is ours from offset `next` on; every channel has been told that much before."""
        for told in self.told:
            told[partition] = next

    def revoke(self, partition: int) -> None:
        for told, times in zip(self.told, self.told_time, strict=True):
            told.pop(partition, None)
            times.pop(partition, None)

    def send(self, rows: Rows, reader: StreamReader) -> list[Send]:
        """Blocks for the rows of a batch; targets without rows hear of the time now and then."""
        sends: list[Send] = []
        rows = self._wanted(rows)
        parts = self._parts(rows) if len(rows) else {}
        self.rows_out += len(rows)
        for target in range(self.partitions):
            if target in parts:
                sends.extend(self._blocks(target, parts[target], reader))
            elif self._stale(target, reader):
                sends.append(self._notice(target, reader))
        return sends

    def _parts(self, rows: Rows) -> dict[int, Rows]:
        """What each target gets of some rows."""
        return partition_rows(
            rows.with_column(HASH, hash_key([rows[str(column)] for column in self.route.key])), self.partitions
        )

    def tell_all(self, reader: StreamReader) -> list[Send]:
        """Notices so that every channel knows every position; due before a commit."""
        behind = (t for t in range(self.partitions) if self._positions(t, reader))
        return [self._notice(target, reader) for target in behind]

    def _wanted(self, rows: Rows) -> Rows:
        if len(rows):
            present = self._with_key(rows)
            if present is not None:
                self.dropped_null += len(rows) - int(present.sum())
                rows = rows.filter(present)
        if self._selection and len(rows):
            chosen = self._selection.mask(Rows({full: rows[name] for full, name in self._fields.items()}, len(rows)))
            self.dropped_selection += len(rows) - int(chosen.sum())
            rows = rows.filter(chosen)
        return Rows({name: rows[field] for name, field in self._names.items()}, len(rows))

    def _with_key(self, rows: Rows) -> Mask | None:
        """Which rows have a value in every column that an equality needs; None if all do."""
        masks: list[Mask] = []
        for name in self._present:
            column = rows[name]
            if not isinstance(column, np.ndarray):
                if column.null_count:
                    masks.append(column.is_valid().to_numpy(zero_copy_only=False))
            elif column.dtype == np.float64 and np.isnan(column).any():
                masks.append(~np.isnan(column))
        return np.logical_and.reduce(masks) if masks else None

    def _positions(self, target: int, reader: StreamReader) -> list[Position]:
        """What this channel has not been told yet."""
        found = []
        told, times = self.told[target], self.told_time[target]
        for partition, reading in reader.readings.items():
            first, time = told.get(partition, reading.next), reader.watermark(partition)
            if reading.next > first or time > times.get(partition, NO_WATERMARK):
                found.append(Position(partition, first, reading.next, time))
        return found

    def _stale(self, target: int, reader: StreamReader) -> bool:
        times = self.told_time[target]
        return any(reader.watermark(p) - times.get(p, NO_WATERMARK) >= self.watermark_step for p in reader.readings)

    def _remember(self, target: int, positions: Sequence[Position]) -> None:
        for position in positions:
            self.told[target][position.partition] = position.next
            self.told_time[target][position.partition] = position.watermark

    def _notice(self, target: int, reader: StreamReader) -> Send:
        positions = self._positions(target, reader)
        self._remember(target, positions)
        return self._to(target, "watermark", positions, None, reader)

    def _blocks(self, target: int, rows: Rows, reader: StreamReader) -> list[Send]:
        size = rows.nbytes
        count = max(1, len(rows) * MAX_BLOCK_BYTES // max(size, 1))
        sends = []
        if size > MAX_BLOCK_BYTES and len(rows) > 1:
            # Cut by (partition, offset): each piece but the last ends at its own last offset and leaves the time as it
            # was.
            rows = rows.take(np.argsort(rows.ints(part_id(self.route.alias))))
            while len(rows) > count:
                piece, rows = rows.slice(0, count), rows.slice(count, len(rows))
                positions = self._reached(target, piece)
                self._remember(target, positions)
                sends.append(self._to(target, "rows", positions, piece, reader))
        positions = self._positions(target, reader)
        self._remember(target, positions)
        return [*sends, self._to(target, "rows", positions, rows, reader)]

    def _reached(self, target: int, piece: Rows) -> list[Position]:
        ids = piece.ints(part_id(self.route.alias))
        partitions, last = ids >> OFFSET_BITS, ids & ((1 << OFFSET_BITS) - 1)
        found = []
        for partition in np.unique(partitions).tolist():
            end = int(last[partitions == partition].max()) + 1
            first = self.told[target].get(partition, end)
            found.append(Position(partition, min(first, end), end, self.told_time[target].get(partition, NO_WATERMARK)))
        return found

    def _to(
        self, target: int, kind: str, positions: Sequence[Position], rows: Rows | None, reader: StreamReader
    ) -> Send:
        header = Events(self.epoch, self.route.alias, reader.partitions, tuple(positions))
        return Send(self.route.node, target, Block(header, rows))


class HeraldRouter(Router):
    """Tells a join that its rows have partners in a stream that they will meet further down: hashes of the columns that
    must be equal, and times."""

    def __init__(self, plan: Plan, route: Route, herald: Herald, partitions: int, epoch: int, incarnation: int) -> None:
        super().__init__(plan, route, partitions, epoch, incarnation)
        self.herald = herald

    def _to(
        self, target: int, kind: str, positions: Sequence[Position], rows: Rows | None, reader: StreamReader
    ) -> Send:
        """With the largest time of its rows, for a receiver that does not read them."""
        alias, number = self.route.alias, self.route.side - len(self.plan.node(self.route.node).inputs)
        latest = NO_WATERMARK if rows is None or not len(rows) else int(rows.ints(part_time(alias)).max())
        header = Heralds(self.epoch, alias, reader.partitions, tuple(positions), number, latest)
        return Send(self.route.node, target, Block(header, rows))

    def _parts(self, rows: Rows) -> dict[int, Rows]:
        alias, parts = (
            self.route.alias,
            [hash_key([rows[str(column)] for column in part.theirs]) for part in self.herald.parts],
        )
        told = {part_id(alias): rows[part_id(alias)], part_time(alias): rows[part_time(alias)], HASH: combine(parts)}
        if len(parts) > 1:
            told |= {part_hash(k): hashes for k, hashes in enumerate(parts)}
        if self.herald.to is None:
            return dict.fromkeys(range(self.partitions), Rows(told, len(rows)))
        return partition_rows(
            Rows(told, len(rows)), self.partitions, hash_key([rows[str(column)] for column in self.herald.to])
        )


def routers_of(plan: Plan, partitions: int, epoch: int, incarnation: int, heralds: bool) -> list[Router]:
    """Everything that ingest sends for a plan. Heralds before rows: so new rows find them, and the time that a node has
    reached moves on with the rows."""
    found: list[Router] = (
        [HeraldRouter(plan, route, herald, partitions, epoch, incarnation) for route, herald in herald_routes(plan)]
        if heralds
        else []
    )
    return [*found, *(Router(plan, route, partitions, epoch, incarnation) for route in plan.routes)]
