"""What the controller says to everyone: the plan of each query, by epoch.

A record of `<mesh>.control` is JSON and is written whole to every partition, so that it is one more ordered input of
each step.

Invariant: a plan is a function of (query text, tree), so these two and the epoch are all that travels; the digest lets
a receiver of another version notice that it would derive something else.
"""

import msgspec

from schemas.errors import BlockError
from schemas.mesh import Feedback, Routing


class PlanPublished(msgspec.Struct, frozen=True, tag="plan", tag_field="kind"):
    query: str
    epoch: int
    text: str
    tree: str
    digest: str
    at_ms: int
    source_partitions: dict[str, int]  # stream -> partitions of its topic when the plan was made
    feedback: Feedback = "off"  # whether joins tell their producers what not to make
    table_cuts: dict[
        str, dict[int, int]
    ] = {}  # table -> partition -> where its topic ended when the mesh first started
    routing: Routing = "fixed"  # in which order rows of an M-Join meet its inputs
    heralds: bool = False  # whether joins are told of streams that their rows meet further down


ControlMessage = PlanPublished

_decoder = msgspec.json.Decoder(ControlMessage)


def encode_control(message: ControlMessage) -> bytes:
    return msgspec.json.encode(message)


def decode_control(data: bytes | None) -> ControlMessage:
    """Raises `BlockError` for whatever else somebody may have written there."""
    if data is None:
        raise BlockError("the record has no value")
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BlockError(f"not a control message: {error}") from None
