"""A binary join node's partition: the rows of each side meet the state of the other (`partition` has what every node does alike).

Per step: probe the other side's state with the new rows, insert them into their own side's, then apply the sender's watermark and purge.

Invariant: a pair is made by whichever of its rows is processed later, so exactly once; with feedback, at the first moment nobody has it suspended.
"""

import numpy as np

from schemas.block import Block, Header, Kind
from schemas.mesh import Routing
from schemas.rows import I64, Rows
from topology.feedback import ARRIVED, PARTITIONS_MOST, Feedback, FeedbackMemo, is_feedback
from topology.feedback_blocks import check_feedback, restore_tables
from topology.frames import Conditions
from topology.hashing import equal_keys
from topology.partition import Effects, Partition, Send
from topology.state import Run, count_matches, matches
from topology.window import validity


class JoinNode(Partition):
    """One partition of a join of two inputs."""

    def _prepare(self, feedback: bool | str, routing: Routing) -> None:  # noqa: ARG002
        self._all_windows = {**self.windows[0], **self.windows[1]}
        self._residual = Conditions(self.node.residuals)
        self.feedback: Feedback | None = None
        if feedback and self.partitions <= PARTITIONS_MOST and len(self.plan.nodes) > 1:
            self.memo.feedback = self.memo.feedback or FeedbackMemo()
            self.feedback = Feedback(self, self.memo.feedback, auto=feedback == "auto")

    def _restore_tables(self, tables: dict[str, bytes]) -> None:
        if self.feedback is not None:
            restore_tables(self.feedback, tables)

    def _admit(self, block: Block) -> None:
        if self.feedback is not None and is_feedback(block.header, self.node.target):
            check_feedback(self.feedback, block)
        else:
            super()._admit(block)

    def _work(self, offset: int, block: Block, rows: Rows, effects: Effects) -> Rows | None:
        if self.feedback is not None and is_feedback(block.header, self.node.target):
            return self.feedback.hear(block, offset, effects)
        return super()._work(offset, block, rows, effects)

    def _take(self, offset: int, header: Header, rows: Rows, effects: Effects) -> Rows | None:
        side = header.side
        if self.feedback is None:
            run = Run.of(rows, self.windows[side])
            output = self._join(side, run)
            self._insert(side, run)
            return output
        run = Run.of(rows.with_column(ARRIVED, np.full(len(rows), offset, np.int64)), self.windows[side])
        self.feedback.arrive(side, run, effects)
        output = self._join(side, self.feedback.probing(side, run))
        self._insert(side, run)
        self.feedback.detect(side, run, header.sender_partition)
        self.feedback.weigh(side, run, header, effects)
        return output

    def _finish(self, effects: Effects) -> None:
        if self.feedback is not None:
            self.feedback.finish(effects)

    @property
    def watermark(self) -> int:
        """No later output starts before this."""
        held = min(self.memo.watermarks)
        return held if self.feedback is None else min(held, self.feedback.hold)

    def _horizon(self, side: int) -> int:
        return super()._horizon(side) if self.feedback is None else self.feedback.horizon(side)

    def send_to(self, partition: int, kind: Kind, rows: Rows) -> Send:
        """To a partition of the consumer, about demand."""
        return self._send(partition, kind, self.watermark, rows)

    def send_back(self, side: int, partition: int, kind: Kind, watermark: int, rows: Rows | None) -> Send:
        """To a partition of the producer of a side."""
        return Send(self.node.inputs[side].name, partition, Block(self._header(kind, side, watermark), rows), back=True)

    def _join(self, side: int, probe: Run) -> Rows | None:
        """Every composite of `probe` with the other side's state that is wanted."""
        pairs, _ = self._pairs(side, probe)
        if pairs is not None and self.feedback is not None and not self.feedback.suspended.is_empty:
            pairs = pairs.filter(self.feedback.allowed(pairs, validity(pairs, self._all_windows)[1]))
        return pairs.select(self.carried) if pairs is not None and len(pairs) else None

    def join_again(self, side: int, stored: Run) -> tuple[Rows | None, I64]:
        """Composites of rows that are stored already, and the moment when the later row of each came."""
        return self._pairs(side, stored, moments=True)

    def candidates(self, side: int, probe: Run) -> int:
        """How many pairs of these rows the key alone would allow; cheap, because none is made."""
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
            waits = None if self.feedback is None or moments else self.feedback.hidden(1 - side, run)
            for i, j in matches(probe, run):
                if waits is not None:
                    free = ~waits[j]
                    self.feedback.memo.pairs_avoided += len(i) - int(free.sum())  # type: ignore[union-attr]
                    i, j = i[free], j[free]
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
