"""Reading a static table: what its topic holds up to the cut, the last record of each key (JIT, section V, figure 9b).

A record with a value is a row; one without deletes the key that its record key names. Nothing leaves before the cut is
reached, because until then a later record may replace an earlier one; then the rows go out at once and the partition's
watermark is `COMPLETE`.

Invariants
- Which rows count is a function of the records before the cut: per partition, for each key the last one, unless that
  deletes it. Records behind the cut are never read.
- A partition's `Reading` stands where it began until the table is loaded, and at the cut from then on. So a restart
  either loads it again from the beginning or not at all.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from schemas.block import NO_WATERMARK
from schemas.mesh import FieldType, Stream
from schemas.rows import I64, Column, Rows, as_arrow
from topology.ingest.decode import Broken
from topology.ingest.reading import ID, Read, Reading, StreamReader
from topology.state.window import ALWAYS_MS, COMPLETE

FOLD_ROWS = 100_000  # replaced rows are dropped when so many have come since the last time, or as many as there are
_OFFSET = ID
_WHOLE_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)\Z", re.ASCII)


@dataclass
class _Held:
    """What was read of one partition: rows in pieces, and which keys were deleted since they were last folded."""

    pieces: list[Rows] = field(default_factory=list)
    deleted: list[tuple[int, int | str]] = field(default_factory=list)  # (offset, key)
    waiting: int = 0  # rows and deletions that were not folded yet


class TableReader(StreamReader):
    """Reads the partitions of one table up to its cut."""

    def __init__(self, stream: Stream, partitions: int, cut: Mapping[int, int]) -> None:
        super().__init__(stream, partitions)
        assert stream.table is not None
        self.key, self.cut = stream.table, cut
        self._held: dict[int, _Held] = {}

    def is_loaded(self, partition: int) -> bool:
        reading = self.readings.get(partition)
        return reading is not None and reading.next >= self.cut[partition]

    def watermark(self, partition: int) -> int:
        return COMPLETE if self.is_loaded(partition) else NO_WATERMARK

    def read(
        self,
        partition: int,
        offsets: Sequence[int],
        values: Sequence[bytes | None],
        keys: Mapping[int, bytes | None] | None = None,
    ) -> Read:
        """Take records before the cut. `keys` has the record keys of those without a value. The rows come from
        `load`."""
        held, keys = self._held.setdefault(partition, _Held()), keys or {}
        self.readings.setdefault(partition, Reading(offsets[0]))
        there = [i for i, value in enumerate(values) if value is not None]
        decoded = self._decoder.decode([values[i] for i in there])
        broken = [Broken(there[b.index], b.reason) for b in decoded.broken]
        where = there if decoded.kept is None else [there[i] for i in decoded.kept]
        held.pieces.append(decoded.rows.with_column(_OFFSET, np.asarray([offsets[i] for i in where], np.int64)))
        for i in (i for i, value in enumerate(values) if value is None):
            try:
                held.deleted.append((offsets[i], self._deleted_key(keys.get(offsets[i]))))
            except ValueError as error:
                broken.append(Broken(i, str(error)))
        held.waiting += len(values)
        if held.waiting > max(FOLD_ROWS, len(held.pieces[0])):
            self._fold(held)
        aside = [(offsets[b.index], b) for b in sorted(broken, key=lambda b: b.index)]
        return Read(self._nothing(), [], aside)

    def load(self, partition: int) -> Rows:
        """The cut is reached: the rows that count. From now on the partition is complete."""
        held = self._held.pop(partition, _Held())
        rows = self._fold(held)
        self.readings[partition].next = self.cut[partition]
        return self._with_ids(rows, partition, rows.ints(_OFFSET))

    def forget(self, partition: int) -> None:
        super().forget(partition)
        self._held.pop(partition, None)

    def _times(self, rows: Rows) -> Column:
        return np.full(len(rows), ALWAYS_MS, np.int64)

    def _nothing(self) -> Rows:
        return self._with_ids(self._decoder.decode([]).rows, 0, np.empty(0, np.int64))

    def _deleted_key(self, key: bytes | None) -> int | str:
        if key is None:
            raise ValueError(
                "a record without a value deletes a key of the table, but this one has no record key either"
            )
        try:
            text = key.decode()
        except UnicodeDecodeError:
            raise ValueError(
                "a record without a value deletes a key of the table, but its record key is not UTF-8"
            ) from None
        if self.stream.fields[self.key] is FieldType.STRING:
            return text
        if len(text) > 20 or not _WHOLE_NUMBER.match(text) or not -(2**63) <= int(text) < 2**63:
            raise ValueError("a record without a value deletes a key of the table, but its record key is not an int64")
        return int(text)

    def _fold(self, held: _Held) -> Rows:
        """Drop what was replaced or deleted since."""
        pieces = held.pieces or [self._decoder.decode([]).rows.with_column(_OFFSET, np.empty(0, np.int64))]
        rows = Rows.concat(pieces)
        places, gone = [place for place, _ in held.deleted], [key for _, key in held.deleted]
        offsets = np.concatenate([rows.ints(_OFFSET), np.asarray(places, np.int64)])
        codes = _codes(rows[self.key], gone)
        newest_first = np.argsort(-offsets)
        _, first = np.unique(codes[newest_first], return_index=True)
        last = newest_first[first]
        rows = rows.take(np.sort(last[last < len(rows)]))
        held.pieces, held.deleted, held.waiting = [rows], [], 0
        return rows


def _codes(keys: Column, more: list[int | str]) -> I64:
    """One number a key: the same for equal keys and for no others."""
    if isinstance(keys, np.ndarray):
        return np.concatenate([keys, np.asarray(more, np.int64)])
    every = pa.concat_arrays([as_arrow(keys), pa.array(more, keys.type)])
    return np.asarray(every.dictionary_encode().indices.to_numpy(zero_copy_only=False), np.int64)


def behind_cut(table: str, partition: int, count: int) -> str:
    """What is said of records that are not read."""
    return (
        f"table {table} partition {partition}: {count:,} records came after the mesh first started and are not joined; "
        "a table is static: restart under a new mesh name to read it again"
    )
