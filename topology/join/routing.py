"""In which order a row of an M-Join meets the states of the other inputs: a fixed path, or an Eddy (JIT, figure 2).

*fixed*: as the inputs are written in the plan. *eddy*: at every half join anew, for each batch, the input whose state
has lately given the fewest partners, so that a composite which finds none dies early. What was measured ages, so the
order follows the streams; now and then, by count, the half join that was tried least comes first.

Invariant: an order changes the work, never the results, because every order meets every state. The choice is a function
of counts in the memo, so a partition that starts again or is rebuilt takes the same ones.
"""

from collections.abc import Sequence

import msgspec

from schemas.mesh import Routing

EXPLORE_EVERY = 32  # batches
MEASURED_MOST = 1 << 14  # rows; then both counts are halved


class PathsMemo(msgspec.Struct):
    """What an M-Join remembers of its paths."""

    batches: int = 0
    fan_outs: dict[str, list[int]] = msgspec.field(
        default_factory=dict
    )  # half join -> rows that probed, composites they made


class Paths:
    def __init__(self, routing: Routing, memo: PathsMemo) -> None:
        self.routing, self.memo = routing, memo

    def begin(self) -> None:
        """A new batch of rows sets out."""
        self.memo.batches += 1

    def choose(self, ways: Sequence[tuple[int, str]], first: bool) -> int:
        """The input to meet next, of (input, name of the half join) in the order of the plan."""
        if self.routing == "fixed" or len(ways) == 1:
            return ways[0][0]
        if first and self.memo.batches % EXPLORE_EVERY == 0:
            return min(ways, key=lambda way: self.memo.fan_outs.get(way[1], (0, 0))[0])[0]
        return min(ways, key=lambda way: self._fan_out(way[1]))[0]

    def measure(self, half_join: str, probed: int, made: int) -> None:
        if self.routing == "fixed":
            return
        counts = self.memo.fan_outs.setdefault(half_join, [0, 0])
        counts[0] += probed
        counts[1] += made
        while counts[0] > MEASURED_MOST:
            counts[0] >>= 1
            counts[1] >>= 1

    def _fan_out(self, half_join: str) -> float:
        probed, made = self.memo.fan_outs.get(half_join, (0, 0))
        return made / probed if probed else 0.0  # one that was never tried is tried first
