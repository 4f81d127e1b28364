"""A block: a columnar run of rows of one side of one join, or a notice without rows. What crosses every inner topic.

Wire: magic `JMB`, version byte, CRC-32 of the rest (little-endian), header length (u32), header (MessagePack), rows
(Arrow IPC stream).

Invariant: `decode_block` gives back exactly what `encode_block` was given, or raises `BlockError`; bytes damaged on the
way are never read as rows.
"""

import struct
import zlib
from collections.abc import Callable
from typing import Literal

import msgspec

from schemas.errors import BlockError
from schemas.rows import Rows, decode_rows, encode_rows

MAGIC, VERSION = b"JMB", 1
MAX_BLOCK_BYTES = 512 * 1024  # what blocks are cut to; a single larger row travels alone
_PREFIX = struct.Struct("<3sBII")

Kind = Literal["rows", "watermark", "suspend", "resume", "resume-done", "release", "poll", "completion", "barrier"]
NO_WATERMARK = -(2**62)


class Position(msgspec.Struct, frozen=True, array_like=True):
    """How far ingest has read one source partition: rows of [first, next) are in this block or were not wanted."""

    partition: int
    first: int
    next: int
    watermark: int


class Step(msgspec.Struct, frozen=True, array_like=True):
    """What a block holds of one step of its sender, if it holds rows of several."""

    sequence: int
    rows: int


class Header(msgspec.Struct, frozen=True, array_like=True):
    """Who sent it, what it is, and where it stands in the sender's sequence.

    A block of ingest (`positions` not empty) is deduplicated by source offset, one of a join node by `sequence`: the
    last of its steps that it holds something of, with those of all its rows, in order, in `steps` if there are several.
    """

    kind: Kind
    sender: str  # the alias whose rows ingest sends, or the id of the sending join node
    sender_partition: int
    sender_partitions: int  # how many partitions the sender has: a watermark needs word from all of them
    incarnation: int
    sequence: int
    epoch: int
    side: int  # 0 left, 1 right
    watermark: int
    positions: tuple[Position, ...] = ()
    # pairs the sender has left out so far because of feedback and not made since, about; its consumer weighs them
    # against what feedback costs
    avoided: int = 0
    steps: tuple[Step, ...] = ()


class Block(msgspec.Struct, frozen=True):
    header: Header
    rows: Rows | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)


def encode_block(block: Block) -> bytes:
    header = _encoder.encode(block.header)
    body = header if block.rows is None else header + memoryview(encode_rows(block.rows))
    size = len(header).to_bytes(4, "little")
    checksum = zlib.crc32(body, zlib.crc32(size))
    return _PREFIX.pack(MAGIC, VERSION, checksum, len(header)) + body


def decode_header(data: bytes | None) -> Header:
    """The header alone, checked."""
    if data is None:
        raise BlockError("the record has no value")
    if len(data) < _PREFIX.size:
        raise BlockError(f"a block has at least {_PREFIX.size} bytes, this record has {len(data)}")
    magic, version, checksum, size = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise BlockError("the record does not begin with a block's magic bytes")
    if version != VERSION:
        raise BlockError(f"block version {version} is not known here (this is version {VERSION}); upgrade this service")
    if size > len(data) - _PREFIX.size:
        raise BlockError(f"the header is said to have {size} bytes, the record has {len(data)}")
    if zlib.crc32(memoryview(data)[8:]) != checksum:
        raise BlockError("checksum does not match: the block was damaged")
    try:
        return _decoder.decode(memoryview(data)[_PREFIX.size : _PREFIX.size + size])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:  # msgspec lets bad UTF-8 through as the latter
        raise BlockError(f"header cannot be read: {error}") from None


def decode_block(data: bytes | None, wanted: Callable[[Header], bool] | None = None) -> Block:
    """A block; without its rows, if its header says that they are not wanted."""
    header = decode_header(data)
    if wanted is not None and not wanted(header):
        return Block(header)
    assert data is not None
    (size,) = struct.unpack_from("<I", data, 8)
    start = _PREFIX.size + size
    if len(data) <= start:
        return Block(header)
    return Block(header, decode_rows(memoryview(data)[start:]))
