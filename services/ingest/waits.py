"""How long ingest waits for more: not at all for the first record after a silence, longer the more a round costs.

Every round makes blocks of its own, and a block costs those who take it about the same however few rows it brings. So a
round begins no sooner behind the last one than what that cost: `SPACING` times as long as it took here, or `BLOCK_S`
for each block that it sent. When there is little to do, rounds are short and follow the records; when batches pay, they
grow.

Invariant: waiting never changes what is sent, only in how many blocks; a round that left work is followed at once.
"""

SPACING = 8.0  # of the time that the last round took
BLOCK_S = 0.0015  # that a small block takes receivers and broker, all together
LINGER_MOST_S = 0.04
PATIENCE_S = 0.1  # for a first record: somebody must look after commits, reports and plans, too
NO_ROOM_S = 0.01  # until receivers are asked again


class Waits:
    def __init__(self) -> None:
        self._next = 0.0  # when the next round may begin

    def worked(self, began: float, ended: float, blocks: int, nothing: bool) -> None:
        """A round is over that sent so many blocks; `nothing`: records wait, and none of them could go on."""
        cost = max(SPACING * (ended - began), BLOCK_S * blocks)
        self._next = ended + (LINGER_MOST_S if nothing else min(LINGER_MOST_S, cost))

    def linger_s(self, now: float) -> float:
        """How long to gather before the next round."""
        return min(LINGER_MOST_S, max(0.0, self._next - now))

    def patience_s(self, now: float, due: float) -> float:
        """How long to wait for a first record when something else is due at `due`."""
        return min(PATIENCE_S, max(0.0, due - now))
