"""A binary join node's partition: the rows of each side meet the state of the other (`partition` has what every node does alike).

Per step: probe the other side's state with the new rows, insert them into their own side's, then apply the sender's watermark and purge.

Invariant: a pair is made by whichever of its rows is processed later, so exactly once; with feedback, at the first moment nobody has it suspended.
"""

import numpy as np

from schemas.block import Header
from schemas.mesh import Routing
from schemas.rows import I64, Rows
from topology.feedback import ARRIVED
from topology.frames import Conditions
from topology.hashing import equal_keys
from topology.partition import Effects, Partition
from topology.state import Run, count_matches, matches
from topology.window import validity


class JoinNode(Partition):
    """One partition of a join of two inputs."""

    def _prepare(self, feedback: bool | str, routing: Routing) -> None:  # noqa: ARG002
        self._all_windows = {**self.windows[0], **self.windows[1]}
        self._residual = Conditions(self.node.residuals)

    def _take(self, offset: int, header: Header, rows: Rows, effects: Effects) -> Rows | None:
        side = header.side
        run = probe = self.arriving(offset, side, rows)
        if self.feedback is not None:
            self.feedback.arrive(side, run, effects)
            probe = self.feedback.probing(side, run)
        output = self._join(side, probe)
        self._insert(side, run)
        if self.feedback is not None:
            self.feedback.detect(side, run, header.sender_partition)
            self.feedback.weigh(side, run, header, effects)
        return output

    def _join(self, side: int, probe: Run) -> Rows | None:
        """Every composite of `probe` with the other side's state that is wanted."""
        pairs, _ = self._pairs(side, probe)
        if pairs is not None and self.feedback is not None and not self.feedback.suspended.is_empty:
            pairs = pairs.filter(self.feedback.allowed(pairs, validity(pairs, self._all_windows)[1]))
        return pairs.select(self.carried) if pairs is not None and len(pairs) else None

    def join_again(self, side: int, stored: Run) -> tuple[Rows | None, I64]:
        return self._pairs(side, stored, moments=True)

    def candidates(self, side: int, probe: Run) -> int:
        reachable = self.states[1 - side].reachable(int(probe.starts.min()), int(probe.ends.max())) if len(probe) else ()
        return sum(count_matches(probe, run) for run in reachable)

    def _pairs(self, side: int, probe: Run, moments: bool = False) -> tuple[Rows | None, I64]:
        """Every pair of `probe` with the other side's state, key equality and residuals verified."""
        other, carried = self.states[1 - side], self._joined[1 - side]
        probed: list[I64] = []
        stored: list[Rows] = []
        came: list[I64] = []
        if not len(probe):
            return None, _NO_MOMENTS
        for run in other.reachable(int(probe.starts.min()), int(probe.ends.max())):
            for i, j in matches(probe, run):
                waits = None if self.feedback is None or moments else self.feedback.hidden(1 - side, run, j)
                if waits is not None:
                    self.feedback.memo.pairs_avoided += int(waits.sum())  # type: ignore[union-attr]
                    i, j = i[~waits], j[~waits]
                probed.append(i)
                stored.append(run.rows.select(carried).take(j))
                if moments:
                    came.append(np.maximum(probe.rows.ints(ARRIVED)[i], run.rows.ints(ARRIVED)[j]))
        if not probed:
            return None, _NO_MOMENTS
        mine = probe.rows.select(self._joined[side]).take(np.concatenate(probed))
        pairs = Rows({**mine.columns, **Rows.concat(stored).columns}, len(mine))
        since = np.concatenate(came) if moments else _NO_MOMENTS
        same = equal_keys(*([pairs[str(column)] for column in edge.key] for edge in self.node.inputs))
        masks = [] if same is None else [same]
        if masks:
            pairs = pairs.filter(masks[0])
        if self._residual and len(pairs):
            masks.append(self._residual.mask(pairs))
            pairs = pairs.filter(masks[-1])
        for mask in masks if moments else ():
            since = since[mask]
        return (pairs, since) if len(pairs) else (None, _NO_MOMENTS)


_NO_MOMENTS = np.empty(0, np.int64)
