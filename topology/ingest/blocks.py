"""Every block that ingest makes: rows, notices of time, barriers, announcements of plans.

Nothing else in ingest knows what a header looks like.

Invariant: a block of a router names its alias, its plan's epoch and, as positions, the source offsets that it speaks
of; receivers drop repeats by these alone.
"""

from collections.abc import Sequence
from typing import cast

import pyarrow as pa

from schemas.block import NO_WATERMARK, Block, Header, Kind, Position
from schemas.control import PlanPublished, decode_control, encode_control
from schemas.rows import Rows
from topology.join.partition import Send
from topology.plan.plan import Route

__all__ = ["Block", "Header", "Position", "Send", "Stamp", "announced", "announcement"]
_PLAN = "plan"


class Stamp:
    """Makes the blocks of one route under one plan epoch."""

    def __init__(self, route: Route, epoch: int, incarnation: int) -> None:
        self.route, self.epoch, self.incarnation = route, epoch, incarnation

    def rows(
        self, target: int, positions: Sequence[Position], rows: Rows, sources: int, watermark: int = NO_WATERMARK
    ) -> Send:
        """Rows for one partition of the route's node. `sources`: how many partitions the stream has."""
        return self._send(target, "rows", positions, sources, watermark, rows)

    def notice(self, target: int, positions: Sequence[Position], sources: int) -> Send:
        """How far partitions are read, and the time, without rows."""
        return self._send(target, "watermark", positions, sources, NO_WATERMARK, None)

    def barrier(self, target: int, positions: Sequence[Position], sources: int) -> Send:
        """There are no more rows of this epoch from these source partitions."""
        return self._send(target, "barrier", positions, sources, NO_WATERMARK, None)

    def _send(
        self,
        target: int,
        kind: Kind,
        positions: Sequence[Position],
        sources: int,
        watermark: int,
        rows: Rows | None,
    ) -> Send:
        route = self.route
        header = Header(
            kind, route.alias, 0, sources, self.incarnation, 0, self.epoch, route.side, watermark, tuple(positions)
        )
        return Send(route.node, target, Block(header, rows))


def announcement(published: PlanPublished, node: str, partition: int, incarnation: int) -> Send:
    """The plan of a new epoch, for one partition of one of its nodes.

    STAND-IN for the block format's own kind "plan": the message travels as a text column, because a block has no other
    payload yet. Only this function and `announced` know it.
    """
    header = Header(cast(Kind, _PLAN), published.query, 0, 1, incarnation, 0, published.epoch, 0, NO_WATERMARK)
    text = pa.array([encode_control(published).decode()], pa.large_utf8())
    return Send(node, partition, Block(header, Rows({_PLAN: text}, 1)))


def announced(block: Block) -> PlanPublished | None:
    """The plan that a block announces; None if it is another kind of block."""
    if cast(str, block.header.kind) != _PLAN:
        return None
    assert block.rows is not None
    return decode_control(block.rows[_PLAN][0].as_py().encode())
