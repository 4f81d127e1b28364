"""A static table at the edge: which records count, what is broken, how it is told to join nodes, and that the audit
reads records the same way."""

import json
from typing import Any

import msgspec
import pytest

import topology.ingest.table as table_module
from schemas.block import NO_WATERMARK, Block
from schemas.errors import BlockError
from schemas.mesh import FieldType, Stream
from schemas.rows import Rows
from topology.ingest.reading import Reading, StreamReader
from topology.ingest.routing import Router
from topology.ingest.table import TableReader
from topology.join.partition import Partition
from topology.plan.plan import Plan, build_plan, describe
from topology.plan.planner import Statistics, choose_tree
from topology.query.cql import parse_query
from topology.state.window import COMPLETE, OFFSET_MASK
from topology.testing.driver import TopologyDriver

USERS = Stream(
    "users", "users", {"id": FieldType.INT64, "name": FieldType.STRING, "since": FieldType.TIMESTAMP}, "", table="id"
)
NAMES = Stream("names", "names", {"name": FieldType.STRING, "n": FieldType.INT64}, "", table="name")
ORDERS = Stream("orders", "orders", {"id": FieldType.INT64, "name": FieldType.STRING, "ts": FieldType.TIMESTAMP}, "ts")
STREAMS = {s.name: s for s in (USERS, NAMES, ORDERS)}


def plan(text: str = "SELECT o.ts, u.name FROM orders [RANGE 500 MS] AS o, users AS u WHERE o.id = u.id") -> Plan:
    query = parse_query("q", text, STREAMS)
    return build_plan(query, choose_tree(query))


def reader_of(stream: Stream, cut: int) -> TableReader:
    reader = TableReader(stream, 1, {0: cut})
    reader.readings[0] = Reading(0)
    return reader


def row(**values: Any) -> bytes:
    return json.dumps(values).encode()


def loaded(reader: TableReader, stream: Stream) -> dict[int, Any]:
    rows = reader.load(0)
    assert rows["@"].tolist() == [0] * len(rows)
    return dict(
        zip((rows["#"] & OFFSET_MASK).tolist(), rows[str(stream.table)].tolist() if len(rows) else [], strict=True)
    )


@pytest.mark.parametrize("fold", [1, 3, 100_000])
def test_the_last_record_of_each_key_counts_however_they_come(fold: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "FOLD_ROWS", fold)
    records: list[tuple[bytes | None, bytes | None]] = [
        (row(id=1), None),
        (row(id=2), None),
        (None, b"1"),
        (row(id=3), None),
        (row(id=2, name="b"), None),
        (row(id=1), b"not looked at"),
        (None, b"3"),
        (None, b"9"),
        (row(id=-4), None),
        (None, b"-4"),
        (None, b"-4"),
        (row(id=2**63 - 1), None),
        (None, b"9223372036854775806"),
    ]
    for size in (1, 2, 5, len(records)):
        reader = reader_of(USERS, len(records))
        for at in range(0, len(records), size):
            piece = records[at : at + size]
            offsets = list(range(at, at + len(piece)))
            read = reader.read(
                0, offsets, [value for value, _ in piece], {o: key for o, (_, key) in zip(offsets, piece, strict=True)}
            )
            assert (len(read.rows), read.late, read.broken) == (0, [], [])
            assert reader.watermark(0) == NO_WATERMARK
        assert loaded(reader, USERS) == {4: 2, 5: 1, 11: 2**63 - 1}
        assert (reader.watermark(0), reader.readings[0].next) == (COMPLETE, len(records))


def test_text_keys_and_an_empty_table() -> None:
    reader = reader_of(NAMES, 4)
    reader.read(0, range(4), [row(name="é", n=1), row(name=""), None, row(name="a")], {2: b""})
    assert loaded(reader, NAMES) == {0: "é", 3: "a"}
    assert loaded(reader_of(NAMES, 0), NAMES) == {}


@pytest.mark.parametrize(
    ("key", "value", "stream"),
    [
        (None, None, USERS),
        (b"", None, USERS),
        (b"x", None, USERS),
        (b"01", None, USERS),
        (b" 1", None, USERS),
        (b"1.0", None, USERS),
        (b"+1", None, USERS),
        (b"9223372036854775808", None, USERS),
        (b"1" * 5000, None, USERS),
        (b"1\n", None, USERS),
        ("١".encode(), None, USERS),
        (b"-9223372036854775808", None, USERS),
        (b"-0", None, USERS),
        (b"\xff", None, NAMES),
        (b"", None, NAMES),
        (b"any", None, NAMES),
        (None, None, NAMES),
        (b"1", b"", USERS),
        (b"1", b"{}", USERS),
        (b"1", b'{"id": null}', USERS),
        (b"1", b'{"id": 1.0}', USERS),
        (b"1", b'{"id": 0}', USERS),
        (None, b'{"id": -5, "since": -5}', USERS),
        (b"1", b'{"id": 1, "since": "yesterday"}', USERS),
        (b"1", b'{"id": 1, "since": "2024-05-01T10:00:00Z"}', USERS),
        (b"1", b'{"id": null, "id": 2}', USERS),
        (b"1", b'{"id": 1, "id": null}', USERS),
        (b"1", b'{"name": ""}', NAMES),
        (b"1", b'{"name": "\\ud800"}', NAMES),
        (b"1", b'{"name": 5}', NAMES),
    ],
    ids=lambda v: repr(v)[:30] if not isinstance(v, Stream) else v.name,
)
def test_the_audit_reads_records_of_a_table_the_same_way(
    key: bytes | None, value: bytes | None, stream: Stream
) -> None:
    from services.audit.decode import Broken, table_decoder

    reader = reader_of(stream, 2)
    broken = reader.read(0, [1], [value], {1: key}).broken
    theirs = table_decoder({name: kind.value for name, kind in stream.fields.items()}, str(stream.table))
    try:
        is_row, fields = theirs(key, value)
    except Broken:
        assert [(offset, b.index) for offset, b in broken] == [(1, 0)]
        return
    assert not broken
    rows = reader.load(0)
    assert len(rows) == is_row
    if is_row:
        assert [rows[name].tolist()[0] for name in stream.fields] == fields


def test_broken_records_keep_their_place_among_deletions() -> None:
    reader = reader_of(USERS, 9)
    values: list[bytes | None] = [None, b"{", row(id=1), None, b"[]"]
    read = reader.read(0, [2, 3, 5, 7, 8], values, {2: b"1", 7: None})
    assert [(offset, broken.index) for offset, broken in read.broken] == [(3, 1), (7, 3), (8, 4)]
    assert loaded(reader, USERS) == {5: 1}


def blocks(reader: StreamReader, alias: str, rows: Rows) -> list[Block]:
    router = Router(plan(), next(r for r in plan().routes if r.alias == alias), 1, 1)
    router.assign(0, 0)
    return [send.block for send in router.send(rows, reader)]


def test_once_the_table_is_complete_the_stream_is_not_stored() -> None:
    node, table = Partition(plan(), "j1", 0, 1), reader_of(USERS, 3)
    stream = StreamReader(ORDERS, 1)
    early = stream.read(0, [0], [row(id=1, ts=1000)]).rows
    table.read(0, range(2), [row(id=1, name="old"), row(id=1, name="a")])
    assert not node.step(0, blocks(stream, "o", early)[0]).sends
    (told,) = blocks(table, "u", table.load(0))
    assert (told.header.positions[0].next, told.header.positions[0].watermark) == (3, COMPLETE)
    (made,) = node.step(1, told).sends
    assert made.block.rows is not None
    assert made.block.rows["u.name"].to_pylist() == ["a"]
    assert [side["rows"] for side in node.describe()] == [0, 1]
    assert node.describe()[1]["window_ms"] == -1
    later = stream.read(0, [1], [row(id=1, ts=9_000_000)]).rows
    assert node.step(2, blocks(stream, "o", later)[0]).sends
    assert [side["rows"] for side in node.describe()] == [0, 1]
    assert node.ground.is_static == (False, True)


def test_a_table_row_with_a_time_and_an_event_without_one_are_refused() -> None:
    node, table, stream = Partition(plan(), "j1", 0, 1), reader_of(USERS, 1), StreamReader(ORDERS, 1)
    table.read(0, [0], [row(id=1)])
    (block,) = blocks(table, "u", table.load(0))
    (event,) = blocks(stream, "o", stream.read(0, [0], [row(id=1, ts=1000)]).rows)
    assert block.rows is not None
    assert event.rows is not None
    for wrong, column, time in ((block, "@u", 1), (block, "@u", -1), (event, "@o", 0)):
        assert wrong.rows is not None
        with pytest.raises(BlockError, match=r"event time of . is out of range"):
            node.step(0, Block(wrong.header, wrong.rows.with_column(column, wrong.rows[column] * 0 + time)))
    beyond = msgspec.structs.replace(block.header.positions[0], watermark=COMPLETE + 1)
    with pytest.raises(BlockError, match="watermark"):
        node.step(0, Block(msgspec.structs.replace(block.header, positions=(beyond,)), block.rows))


def test_a_join_of_tables_holds_nothing_once_both_are_complete() -> None:
    tables = plan(
        "SELECT o.ts FROM users AS u, names AS n, orders [RANGE 1 SECOND] AS o WHERE u.name = n.name AND o.id = u.id"
    )
    driver = TopologyDriver(tables, STREAMS, partitions=1, source_partitions=1, cuts={"users": {0: 2}, "names": {0: 1}})
    driver.produce("users", 0, row(id=1, name="a"))
    driver.produce("users", 0, row(id=2, name="a"))
    driver.produce("names", 0, row(name="a", n=1))
    driver.produce("orders", 0, row(id=2, name="x", ts=1000))
    driver.run(lambda n: n - 1)
    assert [side["rows"] for side in driver.nodes["j1", 0].describe()] == [0, 0]
    assert [side["rows"] for side in driver.nodes["j2", 0].describe()] == [2, 0]
    assert [(key, time) for key, _, time in driver.results] == [("users:0:1|names:0:0|orders:0:0", 1000)]


def test_the_plan_says_static_table_and_costs_are_finite() -> None:
    text = "SELECT o.ts FROM users AS u, names AS n, orders [RANGE 1 SECOND] AS o WHERE u.name = n.name AND o.id = u.id"
    said = describe(plan(text))
    assert "users as u -> j1, static table by id" in said
    assert "state left    static table u, whole" in said
    assert "state left    static: all rows of j1" in said
    query = parse_query("q", text, STREAMS)
    statistics = Statistics(rates={"orders": 10.0}, distinct={"users.id": 500, "users.name": 100, "names.name": 100})
    estimated = describe(build_plan(query, choose_tree(query, statistics)), statistics=statistics)
    assert "about 500 rows: static table u, whole" in estimated
