"""The record that stands in `<mesh>.dead` for one that could not be used: where it is, why, and its bytes.

Invariant: it names the record's place, so that nothing is lost even when the bytes were too many to copy.
"""

import base64

import msgspec

VALUE_MOST = 256 * 1024


def dead_letter(stream: str | None, topic: str, partition: int, offset: int, reason: str, value: bytes | None) -> bytes:
    value = value or b""
    return msgspec.json.encode(
        {
            "stream": stream,
            "topic": topic,
            "partition": partition,
            "offset": offset,
            "reason": reason,
            "bytes": len(value),
            "value_base64": base64.b64encode(value[:VALUE_MOST]).decode(),
        }
    )
