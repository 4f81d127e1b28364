"""A block comes back as it went, or not at all."""

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings

from schemas.block import Block, Header, Position, decode_block, encode_block
from schemas.errors import BlockError
from schemas.rows import Rows

HEADER = Header("rows", "o", 0, 4, 1, 17, 1, 0, 5, (Position(0, 1, 2, 3), Position(3, 0, 9, -(2**62))))
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


def test_round_trip() -> None:
    back = decode_block(encode_block(Block(HEADER, ROWS)))
    assert back.header == HEADER
    assert back.rows is not None
    assert same(back.rows, ROWS)
    assert decode_block(encode_block(Block(HEADER))).rows is None


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


def test_a_column_has_one_form_however_it_was_cut() -> None:
    rows = Rows({"x": pa.array([1, None, 3])})
    assert isinstance(rows.take(np.array([0, 2]))["x"], np.ndarray)
    assert isinstance(rows.slice(2, 3)["x"], np.ndarray)
    assert isinstance(rows.slice(0, 2)["x"], pa.Array)
