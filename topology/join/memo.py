"""What a node partition must remember beside its segments and tables.

Invariant: a partition that starts again from its memo, segments and tables goes on as if nothing had been.
"""

import msgspec

from schemas.block import NO_WATERMARK
from topology.join.routing import PathsMemo
from topology.restraint.heralding.heeding import HeraldsMemo
from topology.restraint.hiding import HidingMemo
from topology.restraint.interface import Counts
from topology.restraint.suspension.memo import FeedbackMemo


class Memo(msgspec.Struct):
    """Written with every step, by what changed."""

    offsets: dict[str, int] = msgspec.field(default_factory=dict)  # next offset of each topic kind (in, control, …)
    live: list[int] = msgspec.field(default_factory=list)  # epochs that an operator runs for, oldest first
    plans: dict[int, bytes] = msgspec.field(default_factory=dict)  # of those that came while it ran
    ended: dict[int, dict[str, list[int]]] = msgspec.field(default_factory=dict)  # epoch -> sender -> its partitions
    seen_offsets: dict[str, dict[int, int]] = msgspec.field(default_factory=dict)  # alias -> source partition -> next
    incarnations: dict[str, dict[int, int]] = msgspec.field(default_factory=dict)  # node -> partition -> newest
    seen_sequences: dict[str, dict[int, int]] = msgspec.field(default_factory=dict)  # node -> partition -> last
    times: dict[str, dict[int, int]] = msgspec.field(default_factory=dict)  # sender -> its partition -> watermark
    senders: dict[str, int] = msgspec.field(default_factory=dict)  # sender -> how many partitions it has
    watermarks: list[int] = msgspec.field(default_factory=list)  # of each input, then of each herald
    time_sent: dict[int, int] = msgspec.field(default_factory=dict)  # target partition -> watermark it was sent
    sequence: int = 0
    rows_repeated: int = 0
    blocks_fenced: int = 0
    rows_purged: int = 0
    counts: Counts = msgspec.field(default_factory=Counts)
    feedback: FeedbackMemo = msgspec.field(default_factory=FeedbackMemo)
    hiding: HidingMemo = msgspec.field(default_factory=HidingMemo)
    heralds: HeraldsMemo = msgspec.field(default_factory=HeraldsMemo)
    paths: PathsMemo = msgspec.field(default_factory=PathsMemo)

    def sized(self, inputs: int, heralds: int) -> "Memo":
        """With a place for each input and herald."""
        self.watermarks += [NO_WATERMARK] * (inputs + heralds - len(self.watermarks))
        self.counts.rows_in += [0] * (inputs - len(self.counts.rows_in))
        return self
