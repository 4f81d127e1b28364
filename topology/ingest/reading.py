"""From records to events of a stream: what each partition has read, its time, and which events are late.

Invariants
- Lateness is a function of the log: reading a partition in offset order, an event is late iff its time is below
  (largest earlier time of that partition) - lateness. A partition's watermark is (largest time) - lateness.
- `idle` raises a silent partition's watermark to a floor; what then comes below the floor is late with reason `idle`.
  The floor is part of the partition's durable `Reading`, written before the raised watermark leaves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from schemas.block import NO_WATERMARK
from schemas.mesh import Stream
from schemas.rows import I64, Column, Rows
from topology.ingest.decode import FEW, Broken, Decoder
from topology.state.window import OFFSET_BITS

ID, TIME = "#", "@"  # id and time columns before they belong to an alias


class Reading(msgspec.Struct, omit_defaults=True):
    """What must survive a restart about one source partition. Travels as the metadata of its offset commit.

    `epochs` says per query where each plan epoch begins that still matters here: the one that `next` falls into, later
    ones, and earlier ones whose barrier is not known to be delivered. A query that is not there is still in the first
    of its epochs that is known.
    """

    next: int
    max_time: int = NO_WATERMARK
    floor: int = NO_WATERMARK
    epochs: dict[str, dict[int, int]] = {}  # query -> epoch -> first offset

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
        kept = offsets if decoded.kept is None else [offsets[i] for i in decoded.kept]
        reading.next = offsets[-1] + 1
        rows = decoded.rows
        if len(rows) == 0:
            return Read(self._with_ids(rows, partition, np.empty(0, np.int64)), [], broken)
        times = rows.ints(self.stream.event_time)
        if len(rows) <= FEW and self._on_time(times.tolist(), reading):
            first = partition << OFFSET_BITS
            ids = np.array([first | offset for offset in kept], np.int64)
            return Read(Rows({**rows.columns, ID: ids, TIME: times}, len(rows)), [], broken)
        where = np.asarray(kept, np.int64)
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

    def _on_time(self, times: list[int], reading: Reading) -> bool:
        """Take the times of a few events if none of them is late; else leave everything as it was."""
        latest, lateness, floor = reading.max_time, self.stream.lateness_ms, reading.floor
        for time in times:
            if time < latest - lateness or time < floor:
                return False
            latest = max(latest, time)
        reading.max_time = latest
        return True

    def _with_ids(self, rows: Rows, partition: int, offsets: I64) -> Rows:
        return Rows({**rows.columns, ID: offsets | (partition << OFFSET_BITS), TIME: self._times(rows)}, len(rows))

    def _times(self, rows: Rows) -> Column:
        return rows[self.stream.event_time]
