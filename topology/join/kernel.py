"""The kernel: makes the pairs of a node of two to ten inputs. The half join is written once; a binary join is a path of
one.

A new row of one input goes through half joins with the states of all others, one after the other (`routing` says in
which order). Composites on the way to a result are never stored.

Invariant: a pair is made at the first moment when all its rows are there and no restraint holds it, by the operator of
its epoch. For new rows that moment is now, or later: what a restraint holds is left out. For stored rows that a
restraint lets go it is now iff at every moment since the last of them came somebody held the pair (`_due`).
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

import numpy as np

from schemas.rows import Mask, Rows
from topology.join.half_join import HalfJoin, build, half_join, meet, visible
from topology.join.routing import Paths
from topology.plan.plan import Input
from topology.restraint.interface import Freed, Ground, Restraint
from topology.state.meeting import ARRIVED
from topology.state.pairs import Pairs, Piece
from topology.state.window import part_id, part_time
from topology.state.window_state import EVER, PAIRS_AT_ONCE, Run

COMPOSITES_AT_ONCE = 1 << 17


class Kernel:
    def __init__(self, ground: Ground, restraints: Sequence[Restraint], paths: Paths) -> None:
        self.ground, self.restraints, self.paths = ground, restraints, paths
        node = ground.node
        self._joined = tuple(_parts(edge) + [str(c) for c in edge.columns] for edge in node.inputs)  # all but the hash
        self.carried = [
            n for edge in node.inputs for n in _parts(edge) + [str(c) for c in edge.columns if c in node.columns]
        ]
        self._half_joins: dict[tuple[tuple[int, ...], int], HalfJoin] = {}
        self._ways: dict[tuple[int, ...], list[HalfJoin]] = {}  # of inputs in the order they were met
        self._notes = any(restraint.notes_unmet for restraint in restraints)

    def of_new(self, side: int, probe: Run, epoch: int, above: int, upto: int) -> Iterator[Run]:
        """What new rows of an epoch become part of, of the epochs behind `above` up to `upto`."""
        if len(probe) and epoch <= upto:
            self.paths.begin()
            yield from self._follow(probe, (side,), epoch > above, (above, upto))

    def of_freed(self, freed: Freed, by: Restraint, above: int, upto: int) -> Iterator[Run]:
        """What is due of stored rows that a restraint lets go."""
        for made in self._again(freed, above, upto):
            due = made.take(np.flatnonzero(self._due(made, freed, by)))
            if len(due):
                yield due

    def _again(self, freed: Freed, above: int, upto: int) -> Iterator[Run]:
        if freed.partners is not None and above == EVER:
            known = freed.partners()
            if known is not None:
                each = np.arange(len(known[0]))
                half = self._half_join((freed.side,), 1 - freed.side)
                kept = self._kept(known[0], [(each, known[1], each)], freed)
                yield from self._built(half, known[0], (freed.side,), kept, again=True)
            return
        for low, high in ((above, upto), (EVER, above))[: 1 if above == EVER else 2]:
            rows = freed.rows(low, high)
            if rows is not None and len(rows):
                yield from self._follow(rows, (freed.side,), low >= above, (above, upto), freed)

    def _follow(
        self, probe: Run, held: tuple[int, ...], fresh: bool, epochs: tuple[int, int], freed: Freed | None = None
    ) -> Iterator[Run]:
        """The results that composites of the inputs `held` become part of, in pieces. `fresh`: they are of the wanted
        epochs already. `freed`: all rows are stored, and nothing hides them."""
        above, upto = epochs
        half, last = self._next(held)
        state, count = self.ground.states[half.to], 0
        met = np.zeros(len(probe), np.bool_) if self._notes and freed is None else None
        for low in (EVER,) if fresh else (above,) if last else (above, EVER):
            found = meet(half, probe, state, low, upto if fresh or low == above else above)
            if met is not None:
                found = _marked(found, met)
            if freed is None and self.restraints:
                found = visible(found, half.to, self.restraints)
            if last:
                found = self._kept(probe, found, freed)
            for made in self._built(half, probe, held, found, freed is not None):
                count += len(made)
                if last:
                    yield made
                elif len(made):
                    self.ground.counts.composites += len(made)
                    yield from self._follow(made, (*held, half.to), fresh or low == above, epochs, freed)
        self.paths.measure(half.name, len(probe), count)
        if met is not None and not met.all():
            alone = probe.take(np.flatnonzero(~met))
            for restraint in self.restraints:
                if restraint.notes_unmet:
                    restraint.unmet(held, half.to, alone)

    def _kept(self, probe: Run, found: Iterable[Piece], freed: Freed | None) -> Iterator[Piece]:
        """Those pairs that may be made, as far as that is seen before they are built; asked about many at once."""
        asked: list[Callable[[Pairs], Mask | None]] = [restraint.allowed for restraint in self.restraints]
        if freed is not None:
            asked = [freed.wanted] if freed.wanted is not None else []
        if not asked:
            yield from found
            return
        now = self.ground.now if freed is None else None
        for some in _batched(found, PAIRS_AT_ONCE):
            pairs = Pairs(probe, some, now)
            for ask in asked:
                keep: Mask | None = ask(pairs)
                if keep is not None and not keep.all():
                    pieces = pairs.kept(keep)
                    if not pieces:
                        break
                    pairs = Pairs(probe, pieces, now)
            else:
                yield from pairs.pieces

    def _built(
        self, half: HalfJoin, probe: Run, held: tuple[int, ...], found: Iterable[Piece], again: bool
    ) -> Iterator[Run]:
        """With the moments when their rows came, if they are stored ones."""
        more = [ARRIVED] if again else []
        mine = [*self._joined[held[0]], *more] if len(held) == 1 else list(probe.rows.columns)
        theirs = [*self._joined[half.to], *more]
        for pieces in _batched(found, COMPOSITES_AT_ONCE):
            yield build(half, probe, pieces, mine, theirs)

    def _due(self, made: Run, freed: Freed, by: Restraint) -> Mask:
        """Which pairs are free at this moment for the first time."""
        came, now = made.rows.ints(ARRIVED), self.ground.now
        keep = np.ones(len(made), np.bool_) if freed.shows is None else freed.shows(made.rows)
        asked = [r for r in self.restraints if not (freed.without_a_gap and r is by)]
        said = [r.free_from(made.rows, made.starts, made.ends, came) for r in asked]
        frees = [free for free in said if free is not None]
        moments = np.full(len(made), now, np.int64) if freed.without_a_gap else came
        while frees:
            before = moments
            for free in frees:
                moments = free(moments)
            if len(frees) == 1 or (moments == before).all():
                break
        due: Mask = keep & (moments == now)
        return due

    def _next(self, held: tuple[int, ...]) -> tuple[HalfJoin, bool]:
        """The half join that composites of the inputs `held` go through next, and whether it is the last."""
        ways = self._ways.get(held)
        if ways is None:
            rest = (i for i in range(len(self.ground.states)) if i not in held)
            ways = self._ways[held] = [self._half_join(held, to) for to in rest]
        if len(ways) == 1:
            return ways[0], True
        to = self.paths.choose([(way.to, way.name) for way in ways], first=len(held) == 1)
        return next(way for way in ways if way.to == to), False

    def _half_join(self, held: tuple[int, ...], to: int) -> HalfJoin:
        key = (tuple(sorted(held)), to)
        if key not in self._half_joins:
            self._half_joins[key] = half_join(self.ground.node, *key)
        return self._half_joins[key]


def let_go(
    kernels: Sequence[tuple[Kernel, int, int]], taking: Generator[Freed, int, None], by: Restraint
) -> list[list[Run]]:
    """What a restraint lets go, made by the operator that it belongs to; one list an operator."""
    made: list[list[Run]] = [[] for _ in kernels]
    freed = next(taking, None)
    while freed is not None:
        count = 0
        for mine, (kernel, above, upto) in zip(made, kernels, strict=True):
            pieces = list(kernel.of_freed(freed, by, above, upto))
            count += sum(map(len, pieces))
            mine += pieces
        try:
            freed = taking.send(count)
        except StopIteration:
            freed = None
    return made


def _marked(found: Iterable[Piece], met: Mask) -> Iterator[Piece]:
    """Marks the rows that have a partner by value, whether or not it may be met."""
    for i, run, j in found:
        met[i] = True
        yield i, run, j


def _batched(found: Iterable[Piece], limit: int) -> Iterator[list[Piece]]:
    """Pieces together, up to about so many pairs."""
    some: list[Piece] = []
    count = 0
    for i, run, j in found:
        for begin in range(0, len(i), limit):
            some.append((i[begin : begin + limit], run, j[begin : begin + limit]) if len(i) > limit else (i, run, j))
            count += len(some[-1][0])
            if count >= limit:
                yield some
                some, count = [], 0
    if some:
        yield some


def _parts(edge: Input) -> list[str]:
    return [name(alias) for alias in edge.aliases for name in (part_id, part_time)]


def rows_of(made: Iterable[Run], carried: Sequence[str]) -> Rows | None:
    """Composites as they are sent."""
    found = [run.rows.select(carried) for run in made if len(run)]
    return Rows.concat(found) if found else None
