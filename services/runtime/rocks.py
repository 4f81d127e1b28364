"""A join node partition's RocksDB: segments, memo, plan and outbox, changed by one WriteBatch per step.

Keys: `m` memo, `p` plan, `s` + side + id segment, `o` + number outbox entry.

Invariant: what is on disk is the state after some whole step, with every send of that step either in the outbox or already acknowledged.
Memory holds a bounded number of bytes of segments; the rest is read back when a probe needs it.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rocksdict import AccessType, Options, Rdict, WriteBatch

from schemas.errors import MachineError
from schemas.rows import decode_rows, encode_rows
from topology.node import Effects, Memo
from topology.state import Run, Segment

log = logging.getLogger("joinmesh.rocks")
_MEMO, _PLAN, _INCARNATION = b"m", b"p", b"i"
_segments = msgspec.msgpack.Encoder()
CACHE_BYTES = 256 << 20


class OutboxEntry(msgspec.Struct, frozen=True, array_like=True):
    topic: str
    partition: int
    value: bytes


class _StoredSegment(msgspec.Struct, frozen=True, array_like=True):
    slice: int
    rows: int
    bytes: int
    min_start: int
    max_end: int
    max_start: int


class Cache:
    """Segments in memory, least recently used first out, over all stores of a process."""

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self.limit, self.used = limit, 0
        self._runs: OrderedDict[tuple[int, int, int], tuple[Run, int]] = OrderedDict()

    def get(self, key: tuple[int, int, int]) -> Run | None:
        found = self._runs.get(key)
        if found is None:
            return None
        self._runs.move_to_end(key)
        return found[0]

    def put(self, key: tuple[int, int, int], run: Run, size: int) -> None:
        self.drop(key)
        self._runs[key] = (run, size)
        self.used += size
        while self.used > self.limit and len(self._runs) > 1:
            _, (_, freed) = self._runs.popitem(last=False)
            self.used -= freed

    def drop(self, key: tuple[int, int, int]) -> None:
        found = self._runs.pop(key, None)
        if found is not None:
            self.used -= found[1]

    def forget(self, partition: int) -> None:
        for key in [k for k in self._runs if k[0] == partition]:
            self.drop(key)


class NodeDatabase:
    def __init__(self, directory: Path, partition: int, cache: Cache) -> None:
        self.partition, self.cache = partition, cache
        directory.mkdir(parents=True, exist_ok=True)
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_write_buffer_size(32 << 20)
        options.set_max_background_jobs(2)
        options.set_keep_log_file_num(2)
        try:
            self._db = Rdict(str(directory), options=options, access_type=AccessType.read_write())
        except Exception as error:
            raise MachineError(f"state in {directory} cannot be opened: {error}; is another worker using it, or the disk full?") from None
        self._acknowledged: list[bytes] = []  # outbox keys to trim with the next batch
        found = self._db.get(_INCARNATION)
        self.incarnation = int(found or b"0") + 1
        self._db.put(_INCARNATION, str(self.incarnation).encode())
        self._windows: tuple[dict[str, int], ...] = ()
        self._next_outbox = 0

    def memo(self) -> Memo | None:
        found = self._db.get(_MEMO)
        return msgspec.msgpack.decode(found, type=Memo) if found else None

    def plan(self) -> bytes | None:
        found = self._db.get(_PLAN)
        return bytes(found) if found else None

    def restore(self, windows: tuple[dict[str, int], ...]) -> tuple[list[Segment], list[Segment]]:
        """What each side holds; and the outbox's next number."""
        self._windows = windows
        sides: tuple[list[Segment], list[Segment]] = ([], [])
        for key, value in self._scan(b"s"):
            side, id = key[1], int.from_bytes(key[2:], "big")
            meta, _ = _split(value)
            sides[side].append(Segment(id, meta.slice, meta.rows, meta.bytes, meta.min_start, meta.max_end, meta.max_start))
        return sides

    def outbox(self) -> list[tuple[bytes, OutboxEntry]]:
        """What was made durable but perhaps not sent, in order."""
        waiting = [(key, msgspec.msgpack.decode(value, type=OutboxEntry)) for key, value in self._scan(b"o")]
        if waiting:
            self._next_outbox = int.from_bytes(waiting[-1][0][1:], "big") + 1
        return waiting

    def acknowledged(self, key: bytes) -> None:
        self._acknowledged.append(key)

    def apply(
        self, effects: Effects, memo: Memo, sends: list[OutboxEntry], plan: bytes | None = None
    ) -> list[tuple[bytes, OutboxEntry]]:
        """Make a step durable; gives the outbox entries that may now be sent."""
        batch = WriteBatch(raw_mode=True)
        for side, segment, run in effects.puts:
            meta = _StoredSegment(
                segment.slice, segment.rows, segment.bytes, segment.min_start, segment.max_end, segment.max_start
            )
            head = _segments.encode(meta)
            batch.put(_segment_key(side, segment.id), len(head).to_bytes(2, "big") + head + encode_rows(run.rows).to_pybytes())
        for side, id in effects.drops:
            batch.delete(_segment_key(side, id))
        entries = []
        for send in sends:
            key = b"o" + self._next_outbox.to_bytes(8, "big")
            self._next_outbox += 1
            batch.put(key, msgspec.msgpack.encode(send))
            entries.append((key, send))
        done, self._acknowledged = self._acknowledged, []
        for key in done:
            batch.delete(key)
        if plan is not None:
            batch.put(_PLAN, plan)
        batch.put(_MEMO, msgspec.msgpack.encode(memo))
        self._db.write(batch)
        return entries

    def store(self, side: int) -> "RocksStore":
        return RocksStore(self, side)

    def load(self, side: int, id: int) -> Run:
        value = self._db.get(_segment_key(side, id))
        assert value is not None, f"segment {side}/{id} of partition {self.partition} is not stored"
        return Run.of(decode_rows(_split(value)[1]), self._windows[side], presorted=True)

    def close(self) -> None:
        self.cache.forget(self.partition)
        self._db.close()

    def _scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        iterator = self._db.iter()
        iterator.seek(prefix)
        while iterator.valid():
            key = bytes(iterator.key())
            if not key.startswith(prefix):
                return
            yield key, bytes(iterator.value())
            iterator.next()


class RocksStore:
    """One side's segments: in the cache, or read back from the database.

    A put is visible here at once and durable with the step's batch; until then it lives in the cache, which never evicts within a step
    what the step has put (`pending`).
    """

    def __init__(self, database: NodeDatabase, side: int) -> None:
        self.database, self.side = database, side
        self.pending: dict[int, Run] = {}

    def get(self, id: int) -> Run:
        run = self.pending.get(id)
        if run is None:
            run = self.database.cache.get(self._key(id))
        if run is None:
            run = self.database.load(self.side, id)
            self.database.cache.put(self._key(id), run, _size(run))
        return run

    def put(self, segment: Segment, run: Run) -> None:
        self.pending[segment.id] = run

    def drop(self, id: int) -> None:
        self.pending.pop(id, None)
        self.database.cache.drop(self._key(id))

    def settle(self) -> None:
        """The step is durable: what it put may be evicted from now on."""
        for id, run in self.pending.items():
            self.database.cache.put(self._key(id), run, _size(run))
        self.pending.clear()

    def _key(self, id: int) -> tuple[int, int, int]:
        return (self.database.partition, self.side, id)


def _size(run: Run) -> int:
    return run.rows.nbytes + 16 * len(run)


def _segment_key(side: int, id: int) -> bytes:
    return b"s" + bytes([side]) + id.to_bytes(8, "big")


def _split(value: bytes) -> tuple[_StoredSegment, bytes]:
    size = int.from_bytes(value[:2], "big")
    return msgspec.msgpack.decode(value[2 : 2 + size], type=_StoredSegment), value[2 + size :]
