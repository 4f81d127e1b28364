"""A node's store writes what changed and gives back what was written; its cache counts all that stands in memory."""

import msgspec
import numpy as np
import pytest

from schemas.errors import StateError
from schemas.rows import Rows
from services.runtime.store import Cache, NodeStore
from services.simulation.processes import Disk
from topology.join.memo import Memo
from topology.message.effects import Effects
from topology.restraint.interface import Counts
from topology.state.lookup import indexed, perhaps_present, shown_by
from topology.state.window import HASH, part_id, part_time
from topology.state.window_state import Run, StateName, WindowState

WINDOWS = {"a": 1_000}
NAME = StateName(("a",), ("a.k",))


class Noting(Disk):
    """Remembers the last write."""

    def write(self, puts, deletes) -> None:  # type: ignore[no-untyped-def]
        self.put, self.deleted = dict(puts), list(deletes)
        super().write(puts, deletes)


def run(rows: int, first: int = 0) -> Run:
    ids = np.arange(first, first + rows)
    columns = {part_id("a"): ids, part_time("a"): ids, "a.k": ids * 3, HASH: ids.astype(np.uint64)}
    return Run.of(Rows(columns), WINDOWS)


def test_a_memo_comes_back_and_only_its_changes_are_written() -> None:
    disk = Noting(strict=False)
    store, memo = NodeStore(disk, 0, Cache(), 1), Memo()
    assert store.memo() is None
    memo.offsets["in"], memo.seen_offsets["a"] = 3, {0: 7}
    store.apply(Effects(), memo, [])
    assert store.memo() == memo
    memo.offsets["in"] = 4
    store.apply(Effects(), memo, [])
    assert list(disk.put) == [b"moffsets"]
    again = NodeStore(disk, 0, Cache(), 2)
    found = again.memo()
    assert msgspec.msgpack.encode(found) == msgspec.msgpack.encode(memo)
    assert found is not None
    found.offsets["in"], found.counts.rows_out = 5, 9
    again.apply(Effects(), found, [])
    assert sorted(disk.put) == [b"mcounts", b"moffsets"]
    assert NodeStore(disk, 0, Cache(), 3).memo() == found


def test_a_field_that_is_new_has_its_default() -> None:
    disk = Noting(strict=False)
    NodeStore(disk, 0, Cache(), 1).apply(Effects(), Memo(counts=Counts(rows_out=2)), [])
    del disk.data[b"mlive"], disk.data[b"mfeedback"]
    disk.data[b"mforgotten"] = b"\xc0"
    assert NodeStore(disk, 0, Cache(), 2).memo() == Memo(counts=Counts(rows_out=2))


def test_a_memo_of_an_earlier_version_is_refused() -> None:
    disk = Disk(strict=False, data={b"m": msgspec.msgpack.encode(Memo())})
    with pytest.raises(StateError, match="earlier joinmesh"):
        NodeStore(disk, 0, Cache(), 1).memo()


def test_a_piece_of_a_table_is_written_and_deleted() -> None:
    store = NodeStore(Noting(strict=False), 0, Cache(), 1)
    first = Effects(tables={"s0/1": b"one", "s0/2": b"two"})
    first.add(Effects(tables={"s0/2": None, "s0/3": b"three"}))
    store.apply(first, Memo(), [])
    assert store.tables() == {"s0/1": b"one", "s0/3": b"three"}
    store.apply(Effects(tables={"s0/1": None}), Memo(), [])
    assert store.tables() == {"s0/3": b"three"}


def test_the_cache_counts_what_lookups_add() -> None:
    cache = Cache(limit=1 << 30)
    store = NodeStore(Disk(strict=False), 0, cache, 1)
    side = store.state(NAME)
    state = WindowState(WINDOWS, side, key=("a.k",))
    state.insert(run(1_000))
    store.settle()
    bare = cache.used
    (segment,) = state.segments()
    found = side.get(segment.id)
    hashes, order = indexed(found, ("a.k",))
    shown = shown_by(found, ("a.k",))
    perhaps_present(state, ("a.k",), shown)
    store.settle()
    blooms = found.indexes["bloom", "a.k"].nbytes
    assert cache.used == bare + hashes.nbytes + order.nbytes + shown.nbytes + blooms
    assert found.index_bytes == cache.used - bare
    cache.forget(0)
    assert cache.used == 0


def test_indexes_push_runs_out_of_the_cache() -> None:
    one = run(1_000)
    cache = Cache(limit=5 * (one.rows.nbytes + 16 * len(one)))
    for k in range(4):
        cache.put((0, NAME, k), run(1_000, k))
    for k in range(4):
        found = cache.get((0, NAME, k))
        assert found is not None
        indexed(found, ("a.k",))
    cache.measure()
    assert cache.used <= cache.limit
    assert [cache.get((0, NAME, k)) is not None for k in range(4)] == [False, True, True, True]
