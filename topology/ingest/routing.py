"""From events to blocks for the join nodes: selection, hashing, which partition of which node gets them. No I/O.

Invariants
- On each channel (router, target partition) the blocks' positions follow one another without a gap. Before a
  position is committed every channel has been told of it, so a restart never leaves one.
- A router speaks only of the source partitions that are assigned to it: those whose next offset lies in its epoch.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from schemas.block import MAX_BLOCK_BYTES, NO_WATERMARK
from schemas.rows import Mask, Rows
from topology.ingest.blocks import Position, Send, Stamp
from topology.ingest.reading import ID, TIME, StreamReader
from topology.plan.heralds import Herald, herald_routes, part_hash
from topology.plan.plan import Plan, Route
from topology.query.conditions import Conditions
from topology.state.hashing import combine, hash_key
from topology.state.partitioning import partition_rows
from topology.state.window import HASH, OFFSET_BITS, WATERMARKS_PER_WINDOW, part_id, part_time


class Router:
    """Sends one source's rows to the join node that wants them."""

    is_herald = False

    def __init__(
        self,
        plan: Plan,
        route: Route,
        partitions: int,
        epoch: int,
        block_bytes: int = MAX_BLOCK_BYTES,
        herald: int | None = None,
    ) -> None:
        self.plan, self.route, self.partitions = plan, route, partitions
        self.epoch, self.block_bytes = epoch, block_bytes
        self._stamp = Stamp(route, epoch, herald)
        self.source = plan.query.source(route.alias)
        windows = [source.window_ms for source in plan.query.sources]
        self.watermark_step = max(1, min(windows) // WATERMARKS_PER_WINDOW)
        self.told: list[dict[int, int]] = [{} for _ in range(partitions)]  # target -> source partition -> next offset
        self.told_time: list[dict[int, int]] = [{} for _ in range(partitions)]
        self.dropped_null = self.dropped_selection = self.rows_out = 0
        alias = route.alias
        types = plan.query.types
        self._names = {part_id(alias): ID, part_time(alias): TIME}
        self._names |= {str(column): column.name for column in route.columns}
        self._selection = Conditions(route.selection)
        self._fields = {str(column): column.name for column in types if column.alias == alias}
        self._key = [str(column) for column in route.key]
        self._present = [column.name for column in route.non_null]

    def assign(self, partition: int, next: int) -> None:
        """A source partition is ours from offset `next` on; every channel has been told that much before."""
        for told in self.told:
            told[partition] = next

    def revoke(self, partition: int) -> None:
        for told, times in zip(self.told, self.told_time, strict=True):
            told.pop(partition, None)
            times.pop(partition, None)

    def end(self, ends: Mapping[int, int], reader: StreamReader) -> list[Send]:
        """Barriers: of these source partitions there is nothing more here behind these offsets; they are somebody
        else's now."""
        sends = []
        for target in range(self.partitions):
            told = self.told[target]
            positions = [Position(p, min(told.get(p, end), end), end, reader.watermark(p)) for p, end in ends.items()]
            sends.append(self._stamp.barrier(target, positions, reader.partitions))
        for partition in ends:
            self.revoke(partition)
        return sends

    def send(self, rows: Rows, reader: StreamReader) -> list[Send]:
        """Blocks for the rows of a batch; targets without rows hear of the time now and then."""
        sends: list[Send] = []
        rows = self._wanted(rows)
        parts = self._parts(rows) if len(rows) else {}
        self.rows_out += len(rows)
        reached = self._reached_times(reader)
        for target in range(self.partitions):
            if target in parts:
                sends.extend(self._blocks(target, parts[target], reader))
            elif self._stale(target, reached):
                sends.append(self._notice(target, reader))
        return sends

    def _parts(self, rows: Rows) -> dict[int, Rows]:
        """What each target gets of some rows."""
        hashes = hash_key([rows[name] for name in self._key])
        rows = rows.with_column(HASH, hashes)
        if len(rows) == 1:
            return {int(hashes[0]) % self.partitions: rows}
        return partition_rows(rows, self.partitions)

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
            first, time = told.get(partition), reader.watermark(partition)
            if first is None:
                continue
            if reading.next > first or time > times.get(partition, NO_WATERMARK):
                found.append(Position(partition, first, reading.next, time))
        return found

    def _reached_times(self, reader: StreamReader) -> list[tuple[int, int]]:
        """The time of each source partition that is assigned here."""
        told = self.told[0]
        return [(partition, reader.watermark(partition)) for partition in reader.readings if partition in told]

    def _stale(self, target: int, reached: Sequence[tuple[int, int]]) -> bool:
        times, step = self.told_time[target], self.watermark_step
        return any(time - times.get(partition, NO_WATERMARK) >= step for partition, time in reached)

    def _remember(self, target: int, positions: Sequence[Position]) -> None:
        for position in positions:
            self.told[target][position.partition] = position.next
            self.told_time[target][position.partition] = position.watermark

    def _notice(self, target: int, reader: StreamReader) -> Send:
        positions = self._positions(target, reader)
        self._remember(target, positions)
        return self._stamp.notice(target, positions, reader.partitions)

    def _blocks(self, target: int, rows: Rows, reader: StreamReader) -> list[Send]:
        sends = []
        size = rows.nbytes if len(rows) > 1 else 0
        if size > self.block_bytes:
            count = max(1, len(rows) * self.block_bytes // size)
            # Cut by (partition, offset): each piece but the last ends at its own last offset and leaves the time as it
            # was.
            rows = rows.take(np.argsort(rows.ints(part_id(self.route.alias))))
            while len(rows) > count:
                piece, rows = rows.slice(0, count), rows.slice(count, len(rows))
                positions = self._reached(target, piece)
                self._remember(target, positions)
                sends.append(self._to(target, positions, piece, reader))
        positions = self._positions(target, reader)
        self._remember(target, positions)
        return [*sends, self._to(target, positions, rows, reader)]

    def _reached(self, target: int, piece: Rows) -> list[Position]:
        ids = piece.ints(part_id(self.route.alias))
        partitions, last = ids >> OFFSET_BITS, ids & ((1 << OFFSET_BITS) - 1)
        found = []
        for partition in np.unique(partitions).tolist():
            end = int(last[partitions == partition].max()) + 1
            first = self.told[target].get(partition, end)
            found.append(Position(partition, min(first, end), end, self.told_time[target].get(partition, NO_WATERMARK)))
        return found

    def _to(self, target: int, positions: Sequence[Position], rows: Rows, reader: StreamReader) -> Send:
        return self._stamp.rows(target, positions, rows, reader.partitions)


class HeraldRouter(Router):
    """Tells a join that its rows have partners in a stream that they will meet further down: hashes of the columns that
    must be equal, and times."""

    is_herald = True

    def __init__(
        self,
        plan: Plan,
        route: Route,
        herald: Herald,
        partitions: int,
        epoch: int,
        block_bytes: int = MAX_BLOCK_BYTES,
    ) -> None:
        number = route.side - len(plan.node(route.node).inputs)
        super().__init__(plan, route, partitions, epoch, block_bytes, number)
        self.herald = herald

    def _to(self, target: int, positions: Sequence[Position], rows: Rows, reader: StreamReader) -> Send:
        """With the largest time of its rows, for a receiver that does not read them."""
        latest = int(rows.ints(part_time(self.route.alias)).max())
        return self._stamp.rows(target, positions, rows, reader.partitions, latest)

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


def routers_of(
    plan: Plan, partitions: int, epoch: int, heralds: bool, block_bytes: int = MAX_BLOCK_BYTES
) -> list[Router]:
    """Everything that ingest sends for a plan. Heralds before rows: so new rows find them, and the time that a node has
    reached moves on with the rows."""
    told = herald_routes(plan) if heralds else []
    found: list[Router] = [HeraldRouter(plan, r, h, partitions, epoch, block_bytes) for r, h in told]
    return [*found, *(Router(plan, route, partitions, epoch, block_bytes) for route in plan.routes)]
