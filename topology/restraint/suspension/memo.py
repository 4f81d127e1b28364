"""What feedback at a node partition remembers beside its tables: how far others are, resumes under way, and what was
done so far.

Invariant: it is part of the node's memo, so it is written with every step.
"""

import msgspec

from schemas.block import NO_WATERMARK
from topology.restraint.suspension.demand import Ticket
from topology.restraint.suspension.policy import Weighed


class FeedbackMemo(msgspec.Struct):
    """What is remembered beside the tables."""

    reached: dict[int, int] = msgspec.field(default_factory=dict)  # consumer partition -> watermark of its other side
    tickets: list[list[Ticket]] = msgspec.field(default_factory=lambda: [[], []])
    reported: list[int] = msgspec.field(
        default_factory=lambda: [NO_WATERMARK, NO_WATERMARK]
    )  # watermark each producer was told
    expired: list[int] = msgspec.field(
        default_factory=lambda: [NO_WATERMARK, NO_WATERMARK]
    )  # up to where values were last forgotten
    pairs_avoided: int = 0
    # pairs that we did not have to make because our producers left out, for our consumer's sake, what they are made of;
    # with `auto`, about
    spared_above: int = 0
    rows_diverted: int = 0
    values_suspended: int = 0
    values_resumed: int = 0
    pairs_resumed: int = 0
    blocks_sent: int = 0  # about demand, to producers and to the consumer
    bytes_sent: int = 0  # of these; counted by the host, which encodes them
    weighed: list[Weighed] | None = None  # per side, with `auto`

    @property
    def spared(self) -> int:
        """What our consumer is told it saves: pairs left out and not made since."""
        return self.pairs_avoided + self.spared_above - self.pairs_resumed

    def counts(self, here: int, above: int = 0, speaking: int = 0) -> dict[str, int]:
        """For reports: what is suspended now, and what was done since the beginning."""
        return {
            "suspended_here": here,
            "suspended_above": above,
            "rows_diverted": self.rows_diverted,
            "pairs_avoided": self.pairs_avoided,
            "pairs_resumed": self.pairs_resumed,
            "values_suspended": self.values_suspended,
            "values_resumed": self.values_resumed,
            "blocks_sent": self.blocks_sent,
            "bytes_sent": self.bytes_sent,
            "sides_speaking": speaking,
        }
