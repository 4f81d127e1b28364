"""A binary join node's partition: the rows of each side meet the state of the other (`partition` has what every node
does alike).

Per step: probe the other side's state with the new rows, insert them into their own side's, then apply the sender's
watermark and purge.

Invariant: a pair is made by whichever of its rows is processed later, so exactly once; with feedback, at the first
moment nobody has it suspended.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from schemas.block import Header
from schemas.mesh import Routing
from schemas.rows import I64, U64, Rows
from topology.join.partition import Effects, Partition
from topology.plan.heralds import part_hash
from topology.query.conditions import Conditions
from topology.restraint.heralding.heralding import Found, Told, Wanted
from topology.state.hashing import combine, equal_keys
from topology.state.lookup import Picked, shown_by
from topology.state.meeting import ARRIVED
from topology.state.window import validity
from topology.state.window_state import PAIRS_AT_ONCE, Run, count_matches, matches


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
        found: Iterable[tuple[I64, Run, I64]] = self._found(side, probe)
        if self.heralding is not None and self.heralding.asks:
            found = self._kept(side, probe, found, self.heralding.wanted)
        pairs = self._built(side, probe, found)
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
        reachable = (
            self.states[1 - side].reachable(int(probe.starts.min()), int(probe.ends.max())) if len(probe) else ()
        )
        return sum(count_matches(probe, run) for run in reachable)

    def make_for(self, told: Told, heralds: Run, wanted: Wanted) -> Iterator[Rows]:
        assert self.heralding is not None
        side = told.herald.parts[0].side
        mine = self.heralding.pick(told, 0, heralds)
        if not len(mine):
            return
        if len(told.names) == 1:
            probe = mine.run(np.argsort(mine.hashes, kind="stable"))
            pairs = self._built(
                side, probe, self._kept(side, probe, self._found(side, probe, again=True), wanted, again=True)
            )
        else:
            pairs = self._between(side, heralds, mine, self.heralding.pick(told, 1, heralds), wanted)
        if pairs is not None:
            yield pairs

    def _between(self, side: int, heralds: Run, mine: Picked, theirs: Picked, wanted: Wanted) -> Rows | None:
        """Pairs of rows of both sides of which each shows its part of one herald: by way of the heralds, so that
        nothing is found that none of them fits."""
        keyed = combine([theirs.hashes, theirs.shown])
        order, last = np.argsort(mine.shown, kind="stable"), np.argsort(keyed, kind="stable")
        first = Run(_NO_ROWS, mine.shown[order], mine.starts[order], mine.ends[order])
        second = Run(_NO_ROWS, keyed[last], theirs.starts[last], theirs.ends[last])
        asked = Run(_NO_ROWS, heralds.rows[part_hash(0)], heralds.starts, heralds.ends)
        some: list[tuple[I64, I64]] = []
        for c, x in matches(asked, first):
            i = order[x]
            starts, ends = np.maximum(heralds.starts[c], mine.starts[i]), np.minimum(heralds.ends[c], mine.ends[i])
            probe = Run(_NO_ROWS, combine([mine.hashes[i], heralds.rows[part_hash(1)][c]]), starts, ends)
            some += [(i[y], last[z]) for y, z in matches(probe, second)]
        if not some:
            return None
        left, right = (
            theirs_or_mine.run(np.concatenate(at))
            for theirs_or_mine, at in zip((mine, theirs), zip(*some, strict=True), strict=True)
        )
        each = np.arange(len(left))
        return self._built(side, left, self._kept(side, left, [(each, right, each)], wanted, again=True))

    def _found(self, side: int, probe: Run, again: bool = False) -> Iterator[tuple[I64, Run, I64]]:
        """Pairs of `probe` with the other side's state: (rows of it, stored run, rows of that). `again`: of rows that
        are all stored, whatever is suspended."""
        if not len(probe):
            return
        for run in self.states[1 - side].reachable(int(probe.starts.min()), int(probe.ends.max())):
            for i, j in matches(probe, run):
                waits = None if self.feedback is None or again else self.feedback.hidden(1 - side, run, j)
                if waits is not None:
                    self.feedback.memo.pairs_avoided += int(waits.sum())  # type: ignore[union-attr]
                    i, j = i[~waits], j[~waits]
                yield i, run, j

    def _kept(
        self, side: int, probe: Run, found: Iterable[tuple[I64, Run, I64]], wanted: Wanted, again: bool = False
    ) -> Iterator[tuple[I64, Run, I64]]:
        """Those of some pairs that heralds fit; asked about at once, in bounded pieces."""
        some: list[tuple[I64, Run, I64]] = []
        for one in found:
            some.append(one)
            if sum(len(i) for i, _, _ in some) > PAIRS_AT_ONCE:
                yield from self._fitting(side, probe, some, wanted, again)
                some = []
        if some:
            yield from self._fitting(side, probe, some, wanted, again)

    def _fitting(
        self, side: int, probe: Run, found: list[tuple[I64, Run, I64]], wanted: Wanted, again: bool
    ) -> Iterator[tuple[I64, Run, I64]]:
        i = np.concatenate([i for i, _, _ in found])
        bounds = np.cumsum([0, *(len(j) for _, _, j in found)])
        starts = np.maximum(probe.starts[i], np.concatenate([run.starts[j] for _, run, j in found]))
        ends = np.minimum(probe.ends[i], np.concatenate([run.ends[j] for _, run, j in found]))

        def shown(told: Told, at: I64) -> U64:
            def by(other: int, names: tuple[str, ...]) -> U64:
                every: U64 = (
                    shown_by(probe, names)[i]
                    if other == side
                    else np.concatenate([shown_by(run, names)[j] for _, run, j in found])
                )
                return every[at]

            return told.of_pairs(by)

        def came(at: I64) -> I64:
            theirs = np.concatenate([run.rows.ints(ARRIVED)[j] for _, run, j in found])
            latest: I64 = np.maximum(probe.rows.ints(ARRIVED)[i], theirs)[at]
            return latest

        keep = wanted(Found(starts, ends, shown, came if again else None))
        for k, (i, run, j) in enumerate(found):
            mine = keep[bounds[k] : bounds[k + 1]]
            if mine.any():
                yield i[mine], run, j[mine]

    def _built(
        self, side: int, probe: Run, found: Iterable[tuple[I64, Run, I64]], extra: Sequence[str] = ()
    ) -> Rows | None:
        """Pairs as rows, key equality and residuals verified. `extra` columns are the larger of both rows'."""
        probed: list[I64] = []
        stored: list[Rows] = []
        for i, run, j in found:
            probed.append(i)
            stored.append(run.rows.select([*self._joined[1 - side], *extra]).take(j))
        if not probed:
            return None
        mine, theirs = (
            probe.rows.select([*self._joined[side], *extra]).take(np.concatenate(probed)),
            Rows.concat(stored),
        )
        both = {name: np.maximum(mine[name], theirs[name]) for name in extra}
        pairs = Rows({**mine.columns, **theirs.columns, **both}, len(mine))
        same = equal_keys(*([pairs[str(column)] for column in edge.key] for edge in self.node.inputs))
        if same is not None:
            pairs = pairs.filter(same)
        if self._residual and len(pairs):
            pairs = pairs.filter(self._residual.mask(pairs))
        return pairs if len(pairs) else None


_NO_MOMENTS = np.empty(0, np.int64)
_NO_ROWS = Rows({}, 0)
