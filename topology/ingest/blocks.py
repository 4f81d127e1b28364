"""Every block that ingest makes: events, heralds, notices of time, barriers, announcements of plans.

Nothing else in ingest knows what a header looks like.

Invariant: a block of a router names its alias, its plan's epoch and, as positions, the source offsets that it speaks
of; receivers drop repeats by these alone.
"""

from collections.abc import Sequence

from schemas.block import NO_WATERMARK, Block, Events, FromSource, Heralds, PlanChanged, Position, SourceEnded
from schemas.control import PlanPublished, decode_control, encode_control
from schemas.rows import Rows
from topology.message.effects import Send
from topology.plan.plan import Route

__all__ = ["Block", "Position", "Send", "Stamp", "announced", "announcement"]


class Stamp:
    """Makes the blocks of one route under one plan epoch."""

    def __init__(self, route: Route, epoch: int, herald: int | None = None) -> None:
        """`herald`: the number that the stream has among the node's heralds, if it is one."""
        self.route, self.epoch, self.herald = route, epoch, herald

    def rows(
        self, target: int, positions: Sequence[Position], rows: Rows | None, sources: int, latest: int = NO_WATERMARK
    ) -> Send:
        """Rows for one partition of the route's node. `sources`: how many partitions the stream has; `latest`: the
        largest time of heralds."""
        header: FromSource
        if self.herald is None:
            header = Events(self.epoch, self.route.alias, sources, tuple(positions))
        else:
            header = Heralds(self.epoch, self.route.alias, sources, tuple(positions), self.herald, latest)
        return Send(self.route.node, target, Block(header, rows))

    def notice(self, target: int, positions: Sequence[Position], sources: int) -> Send:
        """How far partitions are read, and the time, without rows."""
        return self.rows(target, positions, None, sources)

    def barrier(self, target: int, positions: Sequence[Position], sources: int) -> Send:
        """There are no more rows of this epoch from these source partitions."""
        header = SourceEnded(self.epoch, self.route.alias, sources, tuple(positions))
        return Send(self.route.node, target, Block(header))


def announcement(published: PlanPublished, node: str, partition: int) -> Send:
    """The plan of a new epoch, for one partition of one of its nodes."""
    return Send(node, partition, Block(PlanChanged(published.epoch, encode_control(published))))


def announced(block: Block) -> PlanPublished | None:
    """The plan that a block announces; None if it is another kind of block."""
    return decode_control(block.header.plan) if isinstance(block.header, PlanChanged) else None
