"""A block comes back as it went, or not at all."""

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings

from schemas.block import (
    Block,
    Composites,
    Events,
    Header,
    Heralds,
    NodeEnded,
    PlanChanged,
    Poll,
    Position,
    Reached,
    Release,
    Resume,
    ResumeDone,
    SourceEnded,
    Step,
    Suspend,
    decode_block,
    decode_header,
    encode_block,
)
from schemas.errors import BlockError, StateError
from schemas.rows import Rows

POSITIONS = (Position(0, 1, 2, 3), Position(3, 0, 9, -(2**62)))
HEADER = Events(1, "o", 4, POSITIONS)
NODE = (1, "j1", 2, 4, 1, 17)  # epoch, node, partition, partitions, incarnation, sequence
HEADERS: list[Header] = [
    HEADER,
    Heralds(1, "o", 4, POSITIONS, 2, 99),
    SourceEnded(1, "o", 4, POSITIONS),
    PlanChanged(2, b"a plan"),
    Composites(*NODE, 5, 3, (Step(16, 1), Step(17, 2))),
    NodeEnded(*NODE),
    Suspend(*NODE, 5),
    Resume(*NODE, 5, 7),
    Reached(*NODE, 5),
    ResumeDone(*NODE, 7),
    Release(*NODE),
    Poll(*NODE),
]
ROWS = Rows(
    {
        "#o": np.array([1, 2, 3]),
        "o.s": pa.array(["x", None, "zz"], pa.large_utf8()),
        "o.b": np.array([True, False, True]),
    }
)


def same(left: Rows, right: Rows) -> bool:
    return list(left.columns) == list(right.columns) and all(
        pa.array(a).equals(pa.array(b)) if isinstance(a, np.ndarray) else a.equals(b)
        for a, b in zip(left.columns.values(), right.columns.values(), strict=True)
    )


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: header.kind)
def test_round_trip(header: Header) -> None:
    back = decode_block(encode_block(Block(header, ROWS)))
    assert back.header == header
    assert type(back.header) is type(header)
    assert back.rows is not None
    assert same(back.rows, ROWS)
    assert decode_header(encode_block(Block(header, ROWS))) == header
    assert decode_block(encode_block(Block(header))).rows is None
    assert decode_block(encode_block(Block(header, ROWS)), lambda _: False).rows is None


def test_every_kind_has_its_type() -> None:
    assert len({header.kind for header in HEADERS}) == len(HEADERS) == 12
    assert {header.sender for header in HEADERS} == {"o", "j1", "ingest"}


def test_every_flipped_bit_and_every_cut_is_noticed() -> None:
    good = encode_block(Block(HEADER, ROWS))
    for i in range(len(good)):
        for bit in (0, 3, 7):
            bad = bytearray(good)
            bad[i] ^= 1 << bit
            with pytest.raises(BlockError):
                decode_block(bytes(bad))
    for size in range(len(good)):
        with pytest.raises(BlockError):
            decode_block(good[:size])


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_are_refused_not_crashed_on(data: bytes) -> None:
    with pytest.raises(BlockError):
        decode_block(data)


def test_a_version_of_tomorrow_says_what_to_do() -> None:
    bad = bytearray(encode_block(Block(HEADER)))
    bad[3] = 9
    with pytest.raises(BlockError, match="version 9 is not known here"):
        decode_block(bytes(bad))


def test_a_whole_block_of_the_version_before_stops_the_service_and_says_what_to_do() -> None:
    """It is whole, so nothing may set it aside."""
    old = bytearray(encode_block(Block(HEADER)))
    old[3] = 1
    with pytest.raises(StateError, match=r"a block of version 1 came.* under a new mesh name"):
        decode_block(bytes(old))
    old[-1] ^= 1
    with pytest.raises(BlockError, match="damaged"):
        decode_block(bytes(old))


def test_a_column_has_one_form_however_it_was_cut() -> None:
    rows = Rows({"x": pa.array([1, None, 3])})
    assert isinstance(rows.take(np.array([0, 2]))["x"], np.ndarray)
    assert isinstance(rows.slice(2, 3)["x"], np.ndarray)
    assert isinstance(rows.slice(0, 2)["x"], pa.Array)
