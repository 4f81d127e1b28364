"""A join node partition's durable state: segments, memo, plan and outbox, changed by one atomic batch per step.

Keys: `m` + name field of the memo, `p` plan, `i` incarnation, `s` + name of the state + id segment, `t` + name piece of
a restraint's table, `o` + number outbox entry.

Invariant: what is stored is the state after some whole step, with every send of that step either in the outbox or
already acknowledged. What a batch writes is what changed: of the memo the fields that are not as they were last
written. Memory holds a bounded number of bytes of segments and of what lookups derive from them; the rest is read back
when a probe needs it. What holds the bytes is a `KeyValue`: RocksDB in a service (`rocks.py`), a dictionary in the
simulation.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from schemas.errors import StateError
from schemas.rows import decode_rows, encode_rows
from services.runtime.failpoints import failpoint
from topology.join.memo import Memo
from topology.message.effects import Effects
from topology.state.window_state import Run, Segment, StateName

_encoder = msgspec.msgpack.Encoder()

_MEMO, _PLAN, _INCARNATION, _TABLE = b"m", b"p", b"i", b"t"
_FIELDS = {name: _MEMO + name.encode() for name in Memo.__struct_fields__}
CACHE_BYTES = 256 << 20


class KeyValue(Protocol):
    """Ordered keys and values. A write is atomic: after any crash all of it is there, or nothing."""

    def get(self, key: bytes) -> bytes | None: ...
    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]: ...
    def write(self, puts: Sequence[tuple[bytes, bytes]], deletes: Sequence[bytes]) -> None: ...
    def close(self) -> None: ...


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
    min_end: int
    epoch: int


CacheKey = tuple[int, StateName, int]  # partition, state, segment


class Cache:
    """Segments in memory, least recently used first out, over all stores of a process.

    A run grows when lookups index it: it is measured again when the steps that touched it are durable.
    """

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self.limit, self.used = limit, 0
        self._runs: OrderedDict[CacheKey, tuple[Run, int]] = OrderedDict()
        self._touched: set[CacheKey] = set()  # since they were last measured

    def get(self, key: CacheKey) -> Run | None:
        found = self._runs.get(key)
        if found is None:
            return None
        self._runs.move_to_end(key)
        self._touched.add(key)
        return found[0]

    def put(self, key: CacheKey, run: Run) -> None:
        self.drop(key)
        self._runs[key] = (run, _size(run))
        self._touched.add(key)
        self.used += self._runs[key][1]
        self._evict()

    def measure(self) -> None:
        """Count what was added to the runs that were touched."""
        for key in self._touched & self._runs.keys():
            run, size = self._runs[key]
            self._runs[key] = (run, _size(run))  # stays in its place
            self.used += self._runs[key][1] - size
        self._touched.clear()
        self._evict()

    def _evict(self) -> None:
        while self.used > self.limit and len(self._runs) > 1:
            _, (_, freed) = self._runs.popitem(last=False)
            self.used -= freed

    def drop(self, key: CacheKey) -> None:
        found = self._runs.pop(key, None)
        if found is not None:
            self.used -= found[1]

    def forget(self, partition: int) -> None:
        for key in [k for k in self._runs if k[0] == partition]:
            self.drop(key)


class NodeStore:
    def __init__(self, engine: KeyValue, partition: int, cache: Cache, now_ms: int) -> None:
        self.engine, self.partition, self.cache = engine, partition, cache
        self._acknowledged: list[bytes] = []  # outbox keys to trim with the next batch
        found = engine.get(_INCARNATION)
        # Larger than any before it, here or on another worker's disk: receivers refuse blocks of an earlier one.
        self.incarnation = max(int(found or b"0") + 1, now_ms)
        engine.write([(_INCARNATION, str(self.incarnation).encode())], [])
        self._windows: Mapping[StateName, Mapping[str, int]] = {}
        self._states: dict[StateName, StateStore] = {}
        self._next_outbox = 0
        self._memo: dict[bytes, bytes] = {}  # its fields, as they were last written

    def memo(self) -> Memo | None:
        found = dict(self.engine.scan(_MEMO))
        if _MEMO in found:
            raise StateError(
                f"the state of partition {self.partition} was written by an earlier joinmesh, and blocks of that"
                " version may be under way: go back to it, stop its producers, wait until `joinmesh status` shows no"
                " lag, then upgrade and start under a new mesh name"
            )
        if not found:
            return None
        self._memo = found
        fields = [(f, found.get(_FIELDS[f.name])) for f in msgspec.structs.fields(Memo)]
        return Memo(**{f.name: msgspec.msgpack.decode(data, type=f.type) for f, data in fields if data is not None})

    def plan(self) -> bytes | None:
        return self.engine.get(_PLAN)

    def restore(self, windows: Mapping[StateName, Mapping[str, int]]) -> dict[StateName, list[Segment]]:
        """What each state holds."""
        self._windows = windows
        names = {str(name): name for name in windows}
        found: dict[StateName, list[Segment]] = {name: [] for name in windows}
        for key, value in self.engine.scan(b"s"):
            name = key[1:-9].decode()
            if name not in names:
                raise StateError(
                    f"partition {self.partition} holds a state of {name}, which this plan does not have; delete its"
                    " directory: it is rebuilt from the input topic"
                )
            meta, _ = _split(value)
            found[names[name]].append(Segment(int.from_bytes(key[-8:], "big"), *msgspec.structs.astuple(meta)))
        return found

    def tables(self) -> dict[str, bytes]:
        """What feedback keeps, by name."""
        return {key[len(_TABLE) :].decode(): value for key, value in self.engine.scan(_TABLE)}

    def outbox(self) -> list[tuple[bytes, OutboxEntry]]:
        """What was made durable but perhaps not sent, in order."""
        waiting = [(key, msgspec.msgpack.decode(value, type=OutboxEntry)) for key, value in self.engine.scan(b"o")]
        if waiting:
            self._next_outbox = int.from_bytes(waiting[-1][0][1:], "big") + 1
        return waiting

    def acknowledged(self, key: bytes) -> None:
        self._acknowledged.append(key)

    def apply(
        self, effects: Effects, memo: Memo, sends: Sequence[OutboxEntry], plan: bytes | None = None
    ) -> list[tuple[bytes, OutboxEntry]]:
        """Make a step durable in one write; gives the outbox entries that may now be sent."""
        puts = []
        for name, segment, run in effects.puts:
            head = _encoder.encode(
                _StoredSegment(*(getattr(segment, field) for field in _StoredSegment.__struct_fields__))
            )
            rows = encode_rows(run.rows).to_pybytes()
            puts.append((_segment_key(name, segment.id), len(head).to_bytes(2, "big") + head + rows))
        puts += [(_TABLE + name.encode(), data) for name, data in effects.tables.items() if data is not None]
        deletes = [_segment_key(name, id) for name, id in effects.drops]
        deletes += [_TABLE + name.encode() for name, data in effects.tables.items() if data is None]
        entries = []
        for send in sends:
            key = b"o" + self._next_outbox.to_bytes(8, "big")
            self._next_outbox += 1
            puts.append((key, _encoder.encode(send)))
            entries.append((key, send))
        done, self._acknowledged = self._acknowledged, []
        deletes += done
        if plan is not None:
            puts.append((_PLAN, plan))
        changed = [(key, data) for key, data in encoded_memo(memo) if self._memo.get(key) != data]
        self.engine.write(puts + changed, deletes)
        self._memo.update(changed)
        if done:
            failpoint("node.after_trim")
        return entries

    def state(self, name: StateName) -> "StateStore":
        """Where the segments of a state are kept."""
        return self._states.setdefault(name, StateStore(self, name))

    def settle(self) -> None:
        """What was applied is durable: it may be evicted from now on."""
        for state in self._states.values():
            state.settle()
        self.cache.measure()

    def load(self, name: StateName, id: int) -> Run:
        value = self.engine.get(_segment_key(name, id))
        assert value is not None, f"segment {id} of {name} of partition {self.partition} is not stored"
        return Run.of(decode_rows(_split(value)[1]), self._windows[name], presorted=True)

    def close(self) -> None:
        self.cache.forget(self.partition)
        self.engine.close()


class StateStore:
    """One state's segments: in the cache, or read back from the database.

    A put is visible here at once and durable with the step's batch; until then it lives in the cache, which never
    evicts within a step what the step has put (`pending`).
    """

    def __init__(self, store: NodeStore, name: StateName) -> None:
        self.store, self.name = store, name
        self.pending: dict[int, Run] = {}

    def get(self, id: int) -> Run:
        run = self.pending.get(id)
        if run is None:
            run = self.store.cache.get(self._key(id))
        if run is None:
            run = self.store.load(self.name, id)
            self.store.cache.put(self._key(id), run)
        return run

    def put(self, segment: Segment, run: Run) -> None:
        self.pending[segment.id] = run

    def drop(self, id: int) -> None:
        self.pending.pop(id, None)
        self.store.cache.drop(self._key(id))

    def settle(self) -> None:
        """The step is durable: what it put may be evicted from now on."""
        for id, run in self.pending.items():
            self.store.cache.put(self._key(id), run)
        self.pending.clear()

    def _key(self, id: int) -> CacheKey:
        return (self.store.partition, self.name, id)


def encoded_memo(memo: Memo) -> list[tuple[bytes, bytes]]:
    """A memo field by field, as it is stored."""
    return [(key, _encoder.encode(getattr(memo, name))) for name, key in _FIELDS.items()]


def _size(run: Run) -> int:
    return run.rows.nbytes + 16 * len(run) + run.index_bytes


def _segment_key(name: StateName, id: int) -> bytes:
    return b"s" + str(name).encode() + b"\0" + id.to_bytes(8, "big")


def _split(value: bytes) -> tuple[_StoredSegment, bytes]:
    size = int.from_bytes(value[:2], "big")
    return msgspec.msgpack.decode(value[2 : 2 + size], type=_StoredSegment), value[2 + size :]
