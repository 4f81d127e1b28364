"""A block: a header that says what it is, and rows if it brings any. What crosses every inner topic.

Wire: magic `JMB`, version byte, CRC-32 of the rest (little-endian), header length (u32), header (MessagePack), rows.
One type of header a kind of message, one meaning a field:

    of ingest        Events, Heralds, SourceEnded, PlanChanged
    of a join node   Composites, NodeEnded                          to the node it feeds, or out
                     ResumeDone, Release, Poll                      about demand, to the node it feeds
                     Suspend, Resume, Reached                       about demand, to a node that feeds it

Invariant: `decode_block` gives back exactly what `encode_block` was given, or raises `BlockError`; bytes damaged on the
way are never read as rows. A block of the version before is a `StateError`: it is
whole, and must not be set aside.
"""

import struct
import zlib
from collections.abc import Callable

import msgspec

from schemas.errors import BlockError, StateError
from schemas.rows import Rows, decode_rows, encode_rows

MAGIC, VERSION = b"JMB", 2
MAX_BLOCK_BYTES = 512 * 1024  # what blocks are cut to; a single larger row travels alone
_PREFIX = struct.Struct("<3sBII")
NO_WATERMARK = -(2**62)


class Position(msgspec.Struct, frozen=True, array_like=True):
    """How far ingest has read one source partition: rows of [first, next) are in this block or were not wanted."""

    partition: int
    first: int
    next: int
    watermark: int  # no later event of the partition is on time below this


class Step(msgspec.Struct, frozen=True, array_like=True):
    """What a block holds of one step of its sender, if it holds rows of several."""

    sequence: int
    rows: int


class Header(msgspec.Struct, frozen=True, array_like=True):
    """What every block says."""

    epoch: int  # of the plan: of rows, the one they are routed by; else one that sender and receiver both know

    @property
    def kind(self) -> str:
        return str(self.__struct_config__.tag)

    @property
    def sender(self) -> str:
        """An alias, or the id of a join node."""
        raise NotImplementedError


class FromSource(Header, frozen=True, array_like=True):
    """Of ingest: deduplicated by source offset, which `positions` say."""

    alias: str
    partitions: int  # of the source topic
    positions: tuple[Position, ...]

    @property
    def sender(self) -> str:
        return self.alias


class Events(FromSource, frozen=True, array_like=True, tag="events"):
    """Rows of a stream for the input that it feeds; without rows, its time."""


class Heralds(FromSource, frozen=True, array_like=True, tag="heralds"):
    """What rows of a stream have that meet this node's rows only further down."""

    herald: int  # which of the node's heralds
    latest: int = NO_WATERMARK  # the largest time of its rows, for a receiver that does not read them


class SourceEnded(FromSource, frozen=True, array_like=True, tag="source-ended"):
    """These source partitions bring no more rows of the epoch: a barrier."""


class PlanChanged(Header, frozen=True, array_like=True, tag="plan"):
    """A query has a new plan: rows of its epoch may come from now on."""

    plan: bytes  # as on the control topic

    @property
    def sender(self) -> str:
        return "ingest"


class FromNode(Header, frozen=True, array_like=True):
    """Of a partition of a join node: deduplicated by `sequence`, which grows with all it says."""

    node: str
    partition: int
    partitions: int
    incarnation: int  # of the sender: an earlier one is a worker that was taken for dead
    sequence: int

    @property
    def sender(self) -> str:
        return self.node


class Composites(FromNode, frozen=True, array_like=True, tag="composites"):
    """Rows that a node made, for the input that it feeds; without rows, its time.

    `sequence` is the last of its steps that it holds something of, with those of all its rows, in order, in `steps` if
    there are several.
    """

    watermark: int  # no later row of the sender starts before this
    spared: int = 0  # pairs the sender left out so far because of feedback and not made since, about
    steps: tuple[Step, ...] = ()


class NodeEnded(FromNode, frozen=True, array_like=True, tag="node-ended"):
    """The sender makes no more rows of the epoch: a barrier."""


class Suspend(FromNode, frozen=True, array_like=True, tag="suspend"):
    """Do not make what shows these values."""

    reached: int  # rows of the receiver that end before this are not wanted any more


class Resume(FromNode, frozen=True, array_like=True, tag="resume"):
    """Make again what shows these values, and what was left out of it; answer under the ticket."""

    reached: int
    ticket: int


class Reached(FromNode, frozen=True, array_like=True, tag="reached"):
    """How far the sender is, for what the receiver keeps for its sake."""

    reached: int


class ResumeDone(FromNode, frozen=True, array_like=True, tag="resume-done"):
    """All that a ticket asked for has been sent."""

    ticket: int


class Release(FromNode, frozen=True, array_like=True, tag="release"):
    """These values are forgotten: nothing is left out for them any more."""


class Poll(FromNode, frozen=True, array_like=True, tag="poll"):
    """Others do not want these values; do you?"""


OF_CONSUMER = (Suspend, Resume, Reached)
OF_PRODUCER = (ResumeDone, Release, Poll)
_Kinds = (
    Events
    | Heralds
    | SourceEnded
    | PlanChanged
    | Composites
    | NodeEnded
    | Suspend
    | Resume
    | Reached
    | ResumeDone
    | Release
    | Poll
)


class Block(msgspec.Struct, frozen=True):
    header: Header
    rows: Rows | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Kinds)


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
    if size > len(data) - _PREFIX.size:
        raise BlockError(f"the header is said to have {size} bytes, the record has {len(data)}")
    if zlib.crc32(memoryview(data)[8:]) != checksum:
        raise BlockError("checksum does not match: the block was damaged")
    if version != VERSION:
        raise _other_version(version)
    try:
        header: Header = _decoder.decode(memoryview(data)[_PREFIX.size : _PREFIX.size + size])
        return header
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:  # msgspec lets bad UTF-8 through as the latter
        raise BlockError(f"header cannot be read: {error}") from None


def _other_version(version: int) -> Exception:
    if version != 1:
        return BlockError(
            f"block version {version} is not known here (this is version {VERSION}); upgrade this service"
        )
    return StateError(
        f"a block of version 1 came, written by an earlier joinmesh (this one writes version {VERSION}): the mesh was"
        " upgraded while blocks were under way. Go back to the version before, stop its producers, wait until `joinmesh"
        " status` shows no lag, then upgrade and start under a new mesh name"
    )


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
