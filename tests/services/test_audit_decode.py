"""The audit's decoder: which bytes are an event, which are a dead letter, and which events are late. Tables, no
Spark."""

import pyarrow as pa
import pytest

from services.audit.batches import event_mapper, inside_cut, result_mapper
from services.audit.decode import Broken, event_decoder, to_timestamp

FIELDS = {"ts": "timestamp", "i": "int64", "f": "float64", "b": "bool", "s": "string", "t": "timestamp"}

GOOD = [
    (b'{"ts":1}', [1, None, None, None, None, None]),
    (b' {"ts":5,"i":-0} \n', [5, 0, None, None, None, None]),
    (b'{"ts":5,"i":9223372036854775807}', [5, 2**63 - 1, None, None, None, None]),
    (b'{"ts":5,"i":-9223372036854775808}', [5, -(2**63), None, None, None, None]),
    (b'{"ts":5,"f":3}', [5, None, 3.0, None, None, None]),
    (b'{"ts":5,"f":1e-999}', [5, None, 0.0, None, None, None]),
    (b'{"ts":5,"f":12345678901234567890123}', [5, None, 1.2345678901234568e22, None, None, None]),
    (b'{"ts":5,"b":true,"s":"\\ud83d\\ude00\\u0000"}', [5, None, None, True, "\U0001f600\0", None]),
    (b'{"ts":5,"s":"\\\\ud800"}', [5, None, None, None, "\\ud800", None]),
    (b'{"ts":5,"i":null,"s":null}', [5, None, None, None, None, None]),
    (b'{"ts":5,"i":1,"i":2}', [5, 2, None, None, None, None]),
    (b'{"ts":5,"other":[1e999,{"i":"x"}],"s":""}', [5, None, None, None, "", None]),
    (b'{"ts":253402300799999}', [253402300799999, None, None, None, None, None]),
    (b'{"ts":"2024-05-01T10:00:00.123Z","t":-5}', [1714557600123, None, None, None, None, -5]),
]
BROKEN = [
    None,
    b"",
    b"  ",
    b"null",
    b"[]",
    b'"x"',
    b"{",
    b'{"ts":5} x',
    b'{"ts":5}{"ts":5}',
    b"\xef\xbb\xbf" + b'{"ts":5}',
    b'{"ts":5,"s":"\xff"}',
    b'{"ts":5,"other":"\xff"}',
    b'{"ts":5,"other":NaN}',
    b'{"ts":5,"f":Infinity}',
    b'{"ts":5,"f":-Infinity}',
    b'{"ts":5,"f":1e999}',
    b'{"ts":5,"f":' + b"9" * 400 + b"}",
    b'{"ts":5,"f":"1"}',
    b'{"ts":5,"f":true}',
    b'{"ts":5,"i":1.0}',
    b'{"ts":5,"i":1e3}',
    b'{"ts":5,"i":true}',
    b'{"ts":5,"i":"1"}',
    b'{"ts":5,"i":9223372036854775808}',
    b'{"ts":5,"i":-9223372036854775809}',
    b'{"ts":5,"i":' + b"9" * 5000 + b"}",
    b'{"ts":5,"i":01}',
    b'{"ts":5,"b":1}',
    b'{"ts":5,"b":"true"}',
    b'{"ts":5,"s":5}',
    b'{"ts":5,"s":["x"]}',
    b'{"ts":5,"i":{}}',
    b'{"ts":5,"s":"\\ud800"}',
    b'{"ts":5,"s":"\\ude00\\ud83d"}',
    b'{"ts":5,"s":"\\ud83d\\n\\ude00"}',
    b'{"ts":5,"other":"\\ud800x"}',
    b'{"ts":5,"s":"a\nb"}',
    b"{'ts':5}",
    b'{"ts":5,}',
    b'{"ts":5,"i":"x","i":2}',
    b"{}",
    b'{"ts":null}',
    b'{"ts":0}',
    b'{"ts":-1}',
    b'{"ts":253402300800000}',
    b'{"ts":1.5}',
    b'{"ts":"1"}',
    b'{"ts":"2024-05-01"}',
]


@pytest.mark.parametrize(("value", "row"), GOOD, ids=str)
def test_a_good_record_has_one_reading(value: bytes, row: list[object]) -> None:
    ts, found = event_decoder(FIELDS, "ts")(value)
    assert (ts, found) == (row[0], row)
    assert [type(x) for x in found] == [type(x) for x in row]


@pytest.mark.parametrize("value", BROKEN, ids=lambda value: str(value)[:40])
def test_a_broken_record_is_refused(value: bytes | None) -> None:
    with pytest.raises(Broken):
        event_decoder(FIELDS, "ts")(value)


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("1970-01-01t00:00:00z", 0),
        ("1970-01-01 00:00:00Z", 0),
        ("1970-01-01T00:00:00.1Z", 100),
        ("1970-01-01T00:00:00.0009999999999Z", 0),
        ("1969-12-31T23:59:59.9999Z", -1),
        ("2024-05-01T12:00:00+02:00", 1714557600000),
        ("2024-05-01T08:30:00-01:30", 1714557600000),
        ("2024-02-29T00:00:00-00:00", 1709164800000),
        ("9999-12-31T23:59:59.999Z", 253402300799999),
    ],
)
def test_rfc_3339(text: str, ms: int) -> None:
    assert to_timestamp(text) == ms


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2024-05-01",
        "2024-05-01T10:00:00",
        "2024-05-01T10:00Z",
        "2024-05-01T10:00:00.Z",
        "2023-02-29T00:00:00Z",
        "2024-13-01T00:00:00Z",
        "2024-05-01T24:00:00Z",
        "2024-05-01T10:60:00Z",
        "2024-05-01T10:00:60Z",
        "2024-05-01T10:00:00+0200",
        "2024-05-01T10:00:00+24:00",
        "2024-05-01T10:00:00Z ",
        "٢٠٢٤-05-01T10:00:00Z",
        "0000-01-01T00:00:00Z",
    ],
)
def test_not_rfc_3339(text: str) -> None:
    with pytest.raises(Broken):
        to_timestamp(text)


def test_lateness_is_a_function_of_each_partition_in_offset_order() -> None:
    story = [  # partition, offset, ts, status; lateness is 10
        (0, 0, 100, "ok"),
        (1, 0, 5, "ok"),
        (0, 1, 90, "ok"),
        (0, 2, 89, "late"),
        (0, 5, 120, "ok"),
        (0, 6, 109, "late"),
        (0, 7, 110, "ok"),
        (0, 8, None, "broken"),
        (1, 1, 1, "ok"),
        (1, 2, 16, "ok"),
        (1, 3, 5, "late"),
        (1, 4, 6, "ok"),
    ]
    rows = [(p, o, b"?" if ts is None else b'{"ts":%d}' % ts) for p, o, ts, _ in story]
    run = event_mapper({"ts": "int64"}, "ts", 10)

    def batch(part: list[tuple[int, int, bytes]]) -> pa.RecordBatch:
        columns = [list(c) for c in zip(*part, strict=True)]
        types = [pa.int32(), pa.int64(), pa.binary()]
        return pa.RecordBatch.from_arrays(
            [pa.array(c, t) for c, t in zip(columns, types, strict=True)], names=["partition", "offset", "value"]
        )

    for size in (1, 3, len(rows)):  # batches are an accident of transport
        batches = [batch(rows[i : i + size]) for i in range(0, len(rows), size)]
        found = [status for out in run(iter(batches)) for status in out.column(3).to_pylist()]
        assert found == [status for *_, status in story]
    with pytest.raises(AssertionError, match="offset order"):
        list(run(iter([batch(rows[:1]), batch(rows[:1])])))


def test_result_values_are_read_strictly() -> None:
    run = result_mapper({"x": "int64", "y": "float64"}, ("a", "b"), {"a": {0: (0, 5)}, "b": {0: (0, 5)}})
    values = [
        b'{"x":9007199254740993,"y":1}',
        b'{"x":1.0,"y":1}',
        b'{"x":1}',
        b'{"x":1,"y":1,"z":1}',
        b'{"x":1,"x":1,"y":1}',
        b"",
        b'{"y":null,"x":null}',
    ]
    keys = [b"a:0:1|b:0:1"] * 6 + [None]
    batch = pa.RecordBatch.from_arrays(
        [pa.array(keys, pa.binary()), pa.array(values, pa.binary()), pa.array([7] * 7, pa.int64())],
        names=["key", "value", "time"],
    )
    rows = [row for out in run(iter([batch])) for row in out.to_pylist()]
    assert [row["#problem"] for row in rows] == [
        None,
        "x: not an int64",
        "column y is not there",
        "column z was not asked for",
        "column x stands twice",
        "empty value",
        None,
    ]
    assert rows[0]["x"] == 9007199254740993
    assert rows[0]["y"] == 1.0
    assert rows[6]["#id"] == ""


@pytest.mark.parametrize(
    ("id", "inside"),
    [
        ("a:0:3|b:1:9", True),
        ("a:0:2|b:1:9", False),
        ("a:0:7|b:1:9", False),
        ("b:0:3|a:1:9", True),
        ("a:0:3", True),
        ("a:0:-9|b:1:9", True),
        ("a:9:3|b:1:9", True),
    ],
)
def test_only_well_formed_ids_can_lie_outside_the_cut(id: str, inside: bool) -> None:
    assert inside_cut(id, ("a", "b"), {"a": {0: (3, 7)}, "b": {1: (0, 10)}}) is inside
