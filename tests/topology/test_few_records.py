"""A few records are read another way than many, because it is cheaper: the answer is the same."""

import json
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa

from schemas.mesh import FieldType, Stream
from schemas.rows import Rows
from topology.ingest.decode import FEW, Decoder
from topology.ingest.reading import Reading, StreamReader
from topology.ingest.routing import Router
from topology.plan.plan import build_plan
from topology.query.cql import parse_query

FIELDS = {
    "i": FieldType.INT64,
    "f": FieldType.FLOAT64,
    "b": FieldType.BOOL,
    "s": FieldType.STRING,
    "at": FieldType.TIMESTAMP,
    "ts": FieldType.TIMESTAMP,
}
STREAM = Stream("a", "a", FIELDS, "ts", lateness_ms=20)
TABLE = Stream("t", "t", FIELDS, "", table="i")
VALUES: dict[str, list[Any]] = {
    "i": [0, -1, 2**63 - 1, -(2**63), 2**63, 1.0, 1.5, "1", True, None],
    "f": [0.0, -0.0, 1, 1e308, 5e-324, 2**70, "x", None],
    "b": [True, False, 0, "true", None],
    "s": ["", "a", "é", "\x00", "longer than sixteen bytes", 5, None],
    "at": [0, -5, 2**62, "2024-05-01T10:00:00.1239Z", "1970-01-01 02:00:00+02:00", "yesterday", 1.5, None],
    "ts": [1, 1000, 253_402_300_799_999, 253_402_300_800_000, 0, -1, "2024-05-01T10:00:00Z", "1969-01-01T00:00:00Z"],
}
RAW = [
    None, b"", b"{", b"[]", b"\xff", b'{"ts": 5, "x": "\xff"}', b'{"ts": 5, "s": "\\ud800"}', b'{"ts": 5, "ts": 6}',
    b'{"ts": 5, "x": ' + b"[" * 2000 + b"]" * 2000 + b"}", b'{"ts": 5, "i": 1, "s": "\xc3\xa9"}', b' {"ts":5,"i":2} ',
]  # fmt: skip


def draw(rng: Random, good: float) -> bytes | None:
    if rng.random() > good and rng.random() < 0.2:
        return rng.choice(RAW)
    row = {name: values[0] if rng.random() < good else rng.choice(values) for name, values in VALUES.items()}
    return json.dumps({name: value for name, value in row.items() if rng.random() < 0.95 or name == "ts"}).encode()


def same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray):
        return isinstance(right, np.ndarray) and left.dtype == right.dtype and left.tobytes() == right.tobytes()
    return isinstance(right, pa.Array) and left.type == right.type and left.to_pylist() == right.to_pylist()


def values_of(rows: Rows) -> list[dict[str, Any]]:
    columns = {name: column.tolist() for name, column in rows.columns.items()}
    return [{name: repr(column[i]) for name, column in columns.items()} for i in range(len(rows))]


def test_a_record_is_the_same_event_or_equally_broken_in_any_company() -> None:
    fine = json.dumps({name: values[0] for name, values in VALUES.items()}).encode()
    broken = 0
    for seed in range(300):
        rng = Random(seed)
        decoder = Decoder(rng.choice((STREAM, TABLE)))
        values = [draw(rng, rng.choice((0.5, 0.9, 1.0))) for _ in range(rng.randint(1, FEW))]
        few = decoder.decode(values)
        many = decoder.decode([*values, *[fine] * (FEW + 1)])
        assert few.broken == many.broken
        broken += len(few.broken)
        count = len(few.rows)
        assert values_of(few.rows) == values_of(many.rows.slice(0, count))
        one_by_one = [decoder.decode([value]) for value in values]
        assert [(i, b.reason) for i, d in enumerate(one_by_one) for b in d.broken] == [
            (b.index, b.reason) for b in few.broken
        ]
        assert [row for d in one_by_one for row in values_of(d.rows)] == values_of(few.rows)
    assert broken > 500


def test_columns_of_few_and_many_have_the_same_form() -> None:
    for given in ({}, {"i": None}, {"f": None, "b": None}, {"at": None}):
        row = {name: values[0] for name, values in VALUES.items()} | given
        decoder, value = Decoder(STREAM), json.dumps(row).encode()
        few, many = decoder.decode([value] * FEW).rows, decoder.decode([value] * (FEW + 1)).rows.slice(0, FEW)
        assert all(same(few[name], many[name]) for name in FIELDS)


def test_lateness_and_partition_do_not_depend_on_how_many_come_together() -> None:
    streams = {n: Stream(n, n, FIELDS, "ts", lateness_ms=20) for n in ("a", "b")}
    query = parse_query("q", "SELECT a.s FROM a [RANGE 1 SECOND], b [RANGE 1 SECOND] WHERE a.i = b.i", streams)
    plan = build_plan(query, ("a", "b"))
    late = 0
    for seed in range(60):
        rng = Random(seed)
        values = [json.dumps({"i": rng.randrange(9), "ts": 1000 + rng.randrange(60)}).encode() for _ in range(80)]
        told = []
        for size in (1, 3, FEW, 80):
            reader, router = StreamReader(streams["a"], 1), Router(plan, plan.routes[0], 3, 1)
            reader.readings[0] = Reading(0, floor=990 + seed)
            router.assign(0, 0)
            aside, sent = [], []
            for at in range(0, 80, size):
                read = reader.read(0, range(at, min(80, at + size)), values[at : at + size])
                aside += read.late
                for send in router.send(read.rows, reader):
                    sent += [(i, send.partition) for i in send.block.rows["#a"]] if send.block.rows is not None else []
            told.append((aside, sorted(sent), reader.readings[0]))
        assert all(one == told[0] for one in told)
        late += len(told[0][0])
    assert late > 200
