"""Blocks taken apart and put together by hand: whatever bytes, under a right checksum.

Invariant: `sealed(*parts(data))` is `data`.
"""

import struct
import zlib

from schemas.block import MAGIC, VERSION


def sealed(header: bytes, rest: bytes, size: int | None = None, version: int = VERSION) -> bytes:
    """`size`: of the header, if another is to be said than it has."""
    body = struct.pack("<I", len(header) if size is None else size) + header + rest
    return MAGIC + bytes([version]) + struct.pack("<I", zlib.crc32(body)) + body


def parts(data: bytes) -> tuple[bytes, bytes]:
    """Header and rows."""
    size = int.from_bytes(data[8:12], "little")
    return data[12 : 12 + size], data[12 + size :]
