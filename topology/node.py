"""A binary join node's partition: the rows of each side meet the state of the other (`partition` has what every node does alike).

Per step: probe the other side's state with the new rows, insert them into their own side's, then apply the sender's watermark and purge.

Invariant: a pair is made by whichever of its rows is processed later, so exactly once; with feedback, at the first moment nobody has it suspended.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from schemas.block import Header
from schemas.mesh import Routing
from schemas.rows import I64, U64, Rows
from topology.frames import Conditions
from topology.hashing import combine, equal_keys
from topology.heralding import Found, Told, Wanted
from topology.heralds import part_hash
from topology.meeting import ARRIVED
from topology.partition import Effects, Partition
from topology.state import Run, count_matches, matches
from topology.subtuples import shown_by
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
        if self.heralding is not None:
            probe = self.heralding.probing(side, probe)
        output = self._join(side, probe)
        self._insert(side, run)
        if self.feedback is not None:
            self.feedback.detect(side, run, header.sender_partition)
            self.feedback.weigh(side, run, header, effects)
        return output

    def _join(self, side: int, probe: Run) -> Rows | None:
        """Every composite of `probe` with the other side's state that is wanted."""
        pairs = self._built(side, probe, self._found(side, probe, None if self.heralding is None else self.heralding.wanted))
        if pairs is not None and self.feedback is not None and not self.feedback.suspended.is_empty:
            pairs = pairs.filter(self.feedback.allowed(pairs, validity(pairs, self._all_windows)[1]))
        return pairs.select(self.carried) if pairs is not None and len(pairs) else None

    def join_again(self, side: int, stored: Run) -> tuple[Rows | None, I64]:
        pairs = self._built(side, stored, self._found(side, stored, again=True), [ARRIVED])
        if pairs is None:
            return None, _NO_MOMENTS
        since = pairs.ints(ARRIVED)
        if self.heralding is not None:
            since = self.heralding.moments(pairs, *validity(pairs, self._all_windows), since)
        return pairs, since

    def candidates(self, side: int, probe: Run) -> int:
        reachable = self.states[1 - side].reachable(int(probe.starts.min()), int(probe.ends.max())) if len(probe) else ()
        return sum(count_matches(probe, run) for run in reachable)

    def make_for(self, told: Told, heralds: Run, wanted: Wanted) -> Iterator[Rows]:
        assert self.heralding is not None
        side = told.herald.parts[0].side
        mine = self.heralding.rows_of(told, 0, heralds)
        if mine is None:
            return
        if len(told.names) == 1:
            pairs = self._built(side, mine, self._found(side, mine, wanted, again=True))
        else:
            theirs = self.heralding.rows_of(told, 1, heralds)
            pairs = None if theirs is None else self._built(side, mine, self._between(side, told, heralds, mine, theirs, wanted))
        if pairs is not None:
            yield pairs

    def _between(self, side: int, told: Told, heralds: Run, mine: Run, theirs: Run, wanted: Wanted) -> Iterator[tuple[I64, Run, I64]]:
        """Pairs of rows of both sides of which each shows its part of one herald: by way of the heralds, so that nothing is found that none of them fits."""
        shown = shown_by(mine, told.names[0])
        order = np.argsort(shown, kind="stable")
        first = Run(Rows({}, len(mine)), shown[order], mine.starts[order], mine.ends[order])
        keyed = combine([theirs.hashes, shown_by(theirs, told.names[1])])
        last = np.argsort(keyed, kind="stable")
        second = Run(Rows({}, len(theirs)), keyed[last], theirs.starts[last], theirs.ends[last])
        asked = Run(heralds.rows, heralds.rows[part_hash(0)], heralds.starts, heralds.ends)
        for c, x in matches(asked, first):
            i = order[x]
            starts, ends = np.maximum(heralds.starts[c], mine.starts[i]), np.minimum(heralds.ends[c], mine.ends[i])
            probe = Run(Rows({}, len(c)), combine([mine.hashes[i], heralds.rows[part_hash(1)][c]]), starts, ends)
            for y, z in matches(probe, second):
                yield from self._kept(side, mine, theirs, i[y], last[z], wanted)

    def _found(self, side: int, probe: Run, wanted: Wanted | None = None, again: bool = False) -> Iterator[tuple[I64, Run, I64]]:
        """Pairs of `probe` with the other side's state: (rows of it, stored run, rows of that). `again`: of rows that are all stored, whatever is suspended."""
        if not len(probe):
            return
        for run in self.states[1 - side].reachable(int(probe.starts.min()), int(probe.ends.max())):
            for i, j in matches(probe, run):
                waits = None if self.feedback is None or again else self.feedback.hidden(1 - side, run, j)
                if waits is not None:
                    self.feedback.memo.pairs_avoided += int(waits.sum())  # type: ignore[union-attr]
                    i, j = i[~waits], j[~waits]
                if wanted is None:
                    yield i, run, j
                else:
                    yield from self._kept(side, probe, run, i, j, wanted)

    def _kept(self, side: int, probe: Run, run: Run, i: I64, j: I64, wanted: Wanted) -> Iterator[tuple[I64, Run, I64]]:
        """Those of some pairs that heralds fit."""

        def shown(told: Told, at: I64) -> U64:
            both = ((probe, i[at]), (run, j[at]))
            return told.of_pairs(both if side == 0 else both[::-1])

        starts, ends = np.maximum(probe.starts[i], run.starts[j]), np.minimum(probe.ends[i], run.ends[j])
        keep = wanted(Found(starts, ends, shown))
        if keep.any():
            yield i[keep], run, j[keep]

    def _built(self, side: int, probe: Run, found: Iterable[tuple[I64, Run, I64]], extra: Sequence[str] = ()) -> Rows | None:
        """Pairs as rows, key equality and residuals verified. `extra` columns are the larger of both rows'."""
        probed: list[I64] = []
        stored: list[Rows] = []
        for i, run, j in found:
            probed.append(i)
            stored.append(run.rows.select([*self._joined[1 - side], *extra]).take(j))
        if not probed:
            return None
        mine, theirs = probe.rows.select([*self._joined[side], *extra]).take(np.concatenate(probed)), Rows.concat(stored)
        both = {name: np.maximum(mine[name], theirs[name]) for name in extra}
        pairs = Rows({**mine.columns, **theirs.columns, **both}, len(mine))
        same = equal_keys(*([pairs[str(column)] for column in edge.key] for edge in self.node.inputs))
        if same is not None:
            pairs = pairs.filter(same)
        if self._residual and len(pairs):
            pairs = pairs.filter(self._residual.mask(pairs))
        return pairs if len(pairs) else None


_NO_MOMENTS = np.empty(0, np.int64)
