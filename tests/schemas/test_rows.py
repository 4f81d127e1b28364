"""Rows come back as they went, in the same form; bytes that were not made from rows are refused, or are sound rows."""

import random
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from schemas.errors import BlockError
from schemas.rows import Rows, as_arrow, as_column, decode_rows, encode_rows

INTS = (0, 1, -1, 2**53 + 1, 2**63 - 1, -(2**63))
DRAWN: dict[pa.DataType, Any] = {
    pa.int64(): lambda rng: rng.choice(INTS),
    pa.uint64(): lambda rng: rng.choice((0, 7, 2**63, 2**64 - 1)),
    pa.float64(): lambda rng: rng.choice((0.0, -0.0, 1.5, float("nan"), float("inf"), 5e-324, 1e300)),
    pa.bool_(): lambda rng: rng.random() < 0.5,
    pa.large_utf8(): lambda rng: rng.choice(("", "a", "é", "日本\x00", "x" * 40)),
    pa.utf8(): lambda rng: rng.choice(("", "b", "ü")),
}


def drawn_rows(rng: random.Random) -> Rows:
    length = rng.choice((0, 1, 2, 3, 7, 8, 9, 17, 64, 300))
    columns = {}
    for k in range(rng.choice((0, 1, 2, 3, 6))):
        type = rng.choice(list(DRAWN))
        nulls = rng.choice((0.0, 0.0, 0.3, 1.0))
        before, behind = rng.choice(((0, 0), (0, 3), (5, 2)))  # cut out of something longer, or not
        values = [None if rng.random() < nulls else DRAWN[type](rng) for _ in range(before + length + behind)]
        column = as_column(pa.array(values, type)[before : before + length])
        if isinstance(column, np.ndarray) and rng.random() < 0.2:
            column = np.repeat(column, 2)[::2]  # not contiguous
        columns[f"c{k}"] = column
    return Rows(columns, length)


def same(left: Rows, right: Rows) -> bool:
    """Equal, in the same form, bit by bit (a NaN too)."""
    return (len(left), list(left.columns)) == (len(right), list(right.columns)) and all(
        type(a) is type(b) and as_arrow(a).type == as_arrow(b).type and bits(a) == bits(b)
        for a, b in zip(left.columns.values(), right.columns.values(), strict=True)
    )


def bits(column: Any) -> Any:
    if isinstance(column, np.ndarray):
        return column.tobytes()
    return [None if v is None else np.float64(v).tobytes() if type(v) is float else v for v in column.to_pylist()]


@pytest.mark.parametrize("seed", range(400))
def test_rows_come_back_as_they_went(seed: int) -> None:
    rows = drawn_rows(random.Random(seed))
    data = encode_rows(rows).to_pybytes()
    assert not data.startswith(b"\xff\xff\xff\xff")
    back = decode_rows(data)
    assert same(rows, back)
    assert encode_rows(back).to_pybytes() == data  # what is sent again is what was sent
    assert same(rows, decode_rows(memoryview(b"123" + data)[3:]))  # wherever it stands


def test_nobody_can_write_to_what_was_decoded() -> None:
    data = bytearray(encode_rows(Rows({"x": np.arange(5)})).to_pybytes())
    x = decode_rows(memoryview(data))["x"]
    data[-40:] = bytes(40)
    assert x.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="read-only"):
        x[0] = 1


def test_other_types_and_what_an_earlier_version_wrote() -> None:
    rows = Rows({"x": np.arange(3, dtype=np.int32), "y": pa.array([b"a", None, b"c"])})
    stream = encode_rows(rows)
    assert stream.to_pybytes().startswith(b"\xff\xff\xff\xff")
    assert decode_rows(memoryview(stream))["y"].equals(rows["y"])


@pytest.mark.parametrize("seed", range(400))
def test_damage_is_refused_or_gives_sound_rows(seed: int) -> None:
    """Without a checksum: whatever passes can be read to its last byte."""
    rng = random.Random(seed)
    good = encode_rows(drawn_rows(rng)).to_pybytes()
    for _ in range(40):
        bad = bytearray(good)
        kind = rng.random()
        if kind < 0.2:
            del bad[rng.randrange(len(bad)) :]
        elif kind < 0.3:
            bad += rng.randbytes(rng.choice((1, 8, 64)))
        elif kind < 0.4:
            at = rng.randrange(len(bad))
            del bad[at : at + rng.choice((1, 8))]
        for _ in range(rng.choice((0, 1, 1, 3, 20)) if bad else 0):
            bad[rng.randrange(min(len(bad), rng.choice((40, 1000))))] = rng.choice(
                (0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256))
            )
        read(bytes(bad))


def read(data: bytes) -> None:
    try:
        rows = decode_rows(data)
    except BlockError:
        return
    for column in rows.columns.values():
        assert len(column) == len(rows)
        array = as_arrow(column)
        array.validate(full=True)
        if len(column) < 10_000:
            array.to_pylist()


def framed(head: object, body: bytes = b"") -> bytes:
    packed = msgspec.msgpack.encode(head)
    return b"JMR1" + len(packed).to_bytes(4, "little") + packed + bytes(-len(packed) % 8) + body


def text(*offsets: int) -> bytes:
    return b"".join(offset.to_bytes(8, "little", signed=True) for offset in offsets)


@pytest.mark.parametrize(
    "data",
    [
        framed([2, ["a"], "i", []], bytes(8)),  # too short
        framed([1, ["a"], "i", []], bytes(16)),  # too long
        framed([2**31, [], "", []]),
        framed([-1, ["a"], "i", []]),
        framed([2**31 - 1, ["a"], "b", []], bytes(8)),
        framed([2**31 - 1, ["a"], "T", [2**31 - 1]], bytes(64)),
        framed([1, ["a", "a"], "ii", []], bytes(16)),  # a column twice
        framed([1, ["a"], "ii", []], bytes(16)),
        framed([1, ["a"], "x", []], bytes(8)),
        framed([1, ["a"], "t", []], text(0, 0)),  # no size
        framed([1, ["a"], "i", [0]], bytes(8)),  # a size too many
        framed([1, ["a"], "t", [1]], text(0, 2) + b"a" + bytes(7)),  # beyond its end
        framed([1, ["a"], "t", [1]], text(0, -1) + b"a" + bytes(7)),
        framed([1, ["a"], "t", [1]], text(-1, 1) + b"a" + bytes(7)),
        framed([2, ["a"], "t", [2]], text(0, 2, 1) + b"ab" + bytes(6)),  # backwards
        framed([1, ["a"], "t", [1]], text(0, 1) + b"\xff" + bytes(7)),  # not UTF-8
        framed([1, ["a"], "T", [1]], b"\1" + bytes(7) + text(0, 1) + b"\xff" + bytes(7)),
        framed([1, [b"\xff"], "i", []], bytes(8)),
        framed({"rows": 1}),
        framed([1, ["a"], "i", [], 5], bytes(8)),
        b"",
        b"JMR1",
        b"JMR1\xff\xff\xff\xff",
        b"JMR2" + framed([0, [], "", []])[4:],
        b"\xff\xff\xff\xff",
    ],
)
def test_hostile_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(BlockError):
        decode_rows(data)
