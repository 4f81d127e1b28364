"""A restraint that holds any pairs and lets go at any moments: it tests the rule itself.

Moments fall into stretches. In every fourth nothing is held; in the others, chance decides which rows of each input may
not probe or be met, and which pairs may not be made. Chance is a function of ids and stretch, so a node that starts
again decides the same.

Invariant: while anything may be held, the clock and the purge stand where they stood when nothing was.
"""

import random
from collections.abc import Generator, Mapping, Sequence

import numpy as np

from schemas.rows import I64, U64, Mask, Rows
from topology.restraint.interface import FOREVER, Freed, FreeFrom, Ground, Restraint
from topology.state.hashing import combine, hash_key, shape_hash
from topology.state.lookup import shown_by
from topology.state.pairs import Pairs
from topology.state.window import part_id
from topology.state.window_state import Run, merge_runs

STRETCHES = 4


class Drawn:
    """Makes one for each node partition of a case, and again when it starts again; remembers them."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(f"{seed} restraint")
        self.seed, self.length = rng.randrange(1 << 30), rng.choice([1, 2, 3, 7])
        self.rows, self.pairs = rng.choice([(0.0, 0.5), (0.3, 0.0), (0.3, 0.3), (0.05, 0.8)])
        self.made: list[RandomRestraint] = []

    def __call__(self, ground: Ground) -> Sequence[Restraint]:
        self.made.append(RandomRestraint(ground, self.seed, self.length, self.rows, self.pairs))
        return [self.made[-1]]


class RandomRestraint(Restraint):
    keeps_moments = True
    ripens = True

    def __init__(self, ground: Ground, seed: int, length: int, rows: float, pairs: float) -> None:
        """Stretches of so many moments; the shares of rows and pairs that are held in one."""
        self.ground, self.seed, self.length, self.rows, self.pairs = ground, seed, length, rows, pairs
        self.names = [tuple(map(part_id, edge.aliases)) for edge in ground.node.inputs]
        self.all_names = tuple(name for names in self.names for name in names)
        self.stood: int | None = None  # the least time when something was first held
        self._written: int | None = None
        self.held = self.let_go = 0

    # -- chance

    def _stretch(self, moment: int) -> int:
        return moment // self.length

    def _draw(self, hashes: U64, stretch: I64 | int, share: float) -> Mask:
        if not share:
            return np.zeros(len(hashes), np.bool_)
        drawn = combine([hashes, hash_key([np.broadcast_to(np.asarray(stretch + self.seed), hashes.shape).copy()])])
        held: Mask = (drawn % np.uint64(1000) < np.uint64(1000 * share)) & (np.asarray(stretch) % STRETCHES != 3)
        return held

    def _now(self, hashes: U64, share: float) -> Mask:
        return self._draw(hashes, self._stretch(self.ground.now), share)

    # -- the interface

    def probing(self, side: int, run: Run) -> Run:
        waits = self._now(shown_by(run, self.names[side]), self.rows)
        self.held += int(waits.sum())
        return run.take(np.flatnonzero(~waits)) if waits.any() else run

    def hidden(self, side: int, run: Run, at: I64) -> Mask | None:
        return self._now(shown_by(run, self.names[side])[at], self.rows)

    def allowed(self, pairs: Pairs) -> Mask | None:
        waits = self._now(pairs.shown(self.all_names), self.pairs)
        self.held += int(waits.sum())
        return ~waits

    def free_from(self, pairs: Rows, starts: I64, ends: I64, came: I64) -> FreeFrom | None:  # noqa: ARG002
        each = [(shape_hash(pairs, names), self.rows) for names in self.names]
        each.append((shape_hash(pairs, self.all_names), self.pairs))

        def free(moments: I64) -> I64:
            for _ in range(STRETCHES):
                stretch = np.minimum(moments // self.length, 1 << 40)
                held = np.logical_or.reduce([self._draw(hashes, stretch, share) for hashes, share in each])
                moments = np.where(held, (stretch + 1) * self.length, moments)
            return moments

        return free

    def ripe(self) -> Generator[Freed, int, None]:
        if self.ground.now % self.length == 0:
            state = self.ground.states[0]

            def rows(above: int, upto: int) -> Run | None:
                runs = list(state.reachable(-FOREVER, FOREVER, above, upto))
                return merge_runs(runs) if runs else None

            self.let_go += yield Freed(0, rows)
        if self._stretch(self.ground.now) % STRETCHES == 3:
            self.stood = None
        elif self.stood is None:
            self.stood = min(self.ground.times)

    @property
    def hold(self) -> int:  # type: ignore[override]
        return FOREVER if self.stood is None else self.stood

    def horizon(self, side: int, horizon: int) -> int:  # noqa: ARG002
        return min(horizon, self.hold)

    def changed(self) -> dict[str, bytes | None]:
        if self.stood == self._written:
            return {}
        self._written = self.stood
        return {"random": None if self.stood is None else str(self.stood).encode()}

    def restore(self, stored: Mapping[str, bytes]) -> None:
        if "random" in stored:
            self.stood = self._written = int(stored["random"])
