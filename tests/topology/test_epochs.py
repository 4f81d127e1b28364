"""Plans that change while rows are under way: the operator of an epoch makes exactly the pairs of that epoch, and
retires when every sender has ended it.

Drawn cases change the plan at drawn moments, so that several operators are alive; at every step it is checked that rows
come only where their operator runs, and that each composite is sent under the epoch of its newest part, or under the
next one alive if that has retired. A failing seed prints itself; `case(seed)` replays it. Each rule is also broken on
purpose: then some seed must fail.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest

from schemas.block import (
    Block,
    Composites,
    Events,
    Header,
    NodeEnded,
    PlanChanged,
    Position,
    Resume,
    SourceEnded,
    Suspend,
    decode_block,
)
from schemas.mesh import FieldType, Stream
from schemas.rows import Mask, Rows
from tests.drawn import check_often, restraint_of, say
from tests.random_restraint import Drawn
from tests.topology.test_feedback_equals_oracle import HEEDING, run_case
from topology.join.kernel import Kernel
from topology.join.partition import Partition
from topology.join.settings import Settings
from topology.message.effects import Effects
from topology.plan.plan import Tree, build_plan
from topology.query.cql import parse_query
from topology.restraint.interface import Freed, Restraint
from topology.restraint.suspension.policy import RESTLESS
from topology.restraint.suspension.suspension import Suspension
from topology.restraint.suspension.wire import pack
from topology.restraint.tables import entries_of
from topology.state.hashing import hash_key
from topology.state.window import HASH, part_id, part_time
from topology.state.window_state import EVER, Run, WindowState, merge_runs
from topology.testing.driver import TopologyDriver, with_modes

SEEDS, CHUNK, MUTANT_SEEDS = 240, 40, 120
MODES: tuple[tuple[bool | str, bool, bool, bool], ...] = (  # feedback, heralds, M-Joins, the random restraint
    (False, False, False, False),
    (True, False, False, False),
    (False, True, False, False),
    ("auto", True, False, False),
    (False, False, True, False),
    (True, True, True, False),
    (True, False, False, True),
    (False, False, True, True),
)
AT_LEAST = {
    "plan changes": 600,
    "operators retired": 3_000,
    "steps with two operators": 8_000,
    "steps with three or more": 4_000,
    "composites of two epochs": 8_000,
    "results": 10_000,
    "pairs_resumed": 150,
    "refused": 500,
}
done: Counter[str] = Counter()


class Watching(TopologyDriver):
    """Checks at every step that operators do their own work and no other's; a drawn node at a time lags behind, so that
    rows of an old plan come late where those of a new one are already."""

    seen: Counter[str]

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._epochs: dict[tuple[str, int], int] = {}  # (name of an id, id) -> epoch of the event
        self._chance = random.Random(f"{self.plan.tree} {len(self.inputs)}")
        self._lagging: tuple[str, int] | None = None
        for node in self.nodes.values():
            self._watch(node)

    def ready(self) -> list[tuple[str, Any]]:
        found = super().ready()
        if self._chance.random() < 0.02:
            self._lagging = self._chance.choice([None, *self.nodes])
        return [actor for actor in found if actor != ("node", self._lagging)] or found

    def _watch(self, node: Partition) -> None:
        step = node.step

        def watched(offset: int, block: Block) -> Effects:
            live = list(node.memo.live)
            self._check_arrival(node, block, live)
            effects = step(offset, block)
            for send in effects.sends:
                self._check_sent(send.block, live)
            self.seen["steps with two operators"] += len(live) == 2
            self.seen["steps with three or more"] += len(live) > 2
            self.seen["operators retired"] += len([e for e in live if e not in node.memo.live])
            return effects

        node.step = watched  # type: ignore[method-assign]

    def _check_arrival(self, node: Partition, block: Block, live: list[int]) -> None:
        header, rows = block.header, block.rows
        if rows is None or not isinstance(header, Events | Composites):
            return
        assert header.epoch in live, f"{node.node.id}: rows of epoch {header.epoch} came, but {live} are alive"
        if isinstance(header, Events):
            name = part_id(header.alias)
            self._epochs.update({(name, id): header.epoch for id in rows.ints(name).tolist()})

    def _check_sent(self, block: Block, live: list[int]) -> None:
        if not isinstance(block.header, Composites) or block.rows is None:
            return
        names = [name for name in block.rows.columns if name[0] == "#" and name != HASH]
        parts = [[self._epochs[name, id] for id in block.rows.ints(name).tolist()] for name in names]
        for epochs in zip(*parts, strict=True):
            owner = min(epoch for epoch in live if epoch >= max(epochs))
            assert block.header.epoch == owner, f"parts of {epochs} sent as {block.header.epoch}, {live} are alive"
            self.seen["composites of two epochs"] += len(set(epochs)) > 1

    def check(self) -> None:
        """When all is drained."""
        for (id, p), node in self.nodes.items():
            assert node.memo.live == [self.epoch], f"{id} partition {p}: {node.memo.live} are alive"
            assert not any(epoch < self.epoch for epoch in node.memo.ended), f"{id}: {node.memo.ended}"
        for log in (*self.inputs.values(), *self.out.values()):
            known, ended = 1, Counter[tuple[str, int]]()
            for header in (decode_block(data).header for data in log.records):
                if isinstance(header, PlanChanged):
                    known = max(known, header.epoch)
                elif isinstance(header, NodeEnded):
                    channel = (header.node, header.partition)
                    assert header.epoch > ended[channel], f"{header} came twice, or behind a later one"
                    ended[channel] = header.epoch
                elif isinstance(header, Composites):
                    assert header.epoch > ended[header.node, header.partition], f"{header} behind the end of its epoch"
                if log in self.inputs.values():
                    assert header.epoch <= known, f"{header} before its plan"


def case(seed: int) -> Counter[str]:
    feedback, heralds, flat, drawn = MODES[seed % len(MODES)]
    made: list[Watching] = []

    class Kept(Watching):
        seen = Counter[str]()

        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            made.append(self)

    settings = Settings(weights=RESTLESS, heeding=HEEDING[seed % len(HEEDING)])
    counts = run_case(
        seed,
        with_modes(settings, feedback, "eddy" if flat and seed % 16 > 7 else "fixed", heralds),
        Drawn(seed) if drawn else None,
        changes=(0.03, 0.1)[seed // 8 % 2],
        flat=flat,
        lengths=(12, 20),
        driven_by=Kept,
    )
    made[0].check()
    return counts + Kept.seen


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_results_are_the_oracles_and_every_operator_does_its_own(first: int) -> None:
    for seed in range(first, first + CHUNK):
        done.update(case(seed))
        done["seeds"] += 1


def test_several_plans_were_alive(capsys: pytest.CaptureFixture[str]) -> None:
    say(capsys, "epochs", done)
    check_often(done, SEEDS, AT_LEAST)


# -- each rule is needed


def an_operator_makes_a_pair_of_another_epoch(patch: pytest.MonkeyPatch) -> None:
    """The operator of a new plan makes what that of the old one makes, too."""
    of_new = Kernel.of_new

    def of_all(self: Kernel, side: int, probe: Run, epoch: int, above: int, upto: int) -> Iterator[Run]:  # noqa: ARG001
        return of_new(self, side, probe, epoch, EVER, upto)

    patch.setattr(Kernel, "of_new", of_all)


def owed_pairs_are_made_twice(patch: pytest.MonkeyPatch) -> None:
    """Whatever a restraint lets go is made, whether or not it was before."""

    def always(self: Kernel, made: Run, freed: Freed, by: Restraint) -> Mask:  # noqa: ARG001
        return np.ones(len(made), np.bool_) if freed.shows is None else freed.shows(made.rows)

    patch.setattr(Kernel, "_due", always)


def a_shared_state_is_purged_by_one_of_its_readers(patch: pytest.MonkeyPatch) -> None:
    """The join forgets what a restraint still owes."""
    patch.setattr(Partition, "horizon", lambda self, side: self.ground.others_reached(side))


def segments_of_two_epochs_are_merged_too_early(patch: pytest.MonkeyPatch) -> None:
    def append(self: WindowState, slice: int, run: Run, epoch: int) -> None:
        segments = self.slices.setdefault(slice, [])
        merged, rows = [run], len(run)
        while segments and segments[-1].rows <= 2 * rows:
            last = segments.pop()
            merged.append(self.store.get(last.id))
            self.store.drop(last.id)
            rows += last.rows
        segments.append(self._put(slice, merge_runs(merged), max(epoch, self.oldest)))

    patch.setattr(WindowState, "_append", append)


def retired_before_every_sender_has_ended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Partition, "_has_ended", lambda self, epoch: bool(self.memo.ended.get(epoch)))


MUTANTS = [
    an_operator_makes_a_pair_of_another_epoch,
    owed_pairs_are_made_twice,
    a_shared_state_is_purged_by_one_of_its_readers,
    segments_of_two_epochs_are_merged_too_early,
    retired_before_every_sender_has_ended,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__)
def test_a_broken_rule_is_noticed(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On seeds that the unbroken code passes above."""
    mutant(monkeypatch)
    for seed in range(MUTANT_SEEDS):
        try:
            case(seed)
        except AssertionError as error:
            with capsys.disabled():
                print(f"\n  {mutant.__name__} is noticed after {seed + 1} seeds: {str(error).splitlines()[0][:120]}")
            return
    pytest.fail(f"{mutant.__name__} is not noticed")


# -- by hand

FIELDS = {"k": FieldType.INT64, "m": FieldType.INT64, "ts": FieldType.TIMESTAMP}
STREAMS = {name: Stream(name, name, FIELDS, "ts") for name in "abc"}


class Stepped:
    """One partition of one node, block by block."""

    def __init__(self, names: str, where: str, tree: Tree, settings: Settings | None = None) -> None:
        sources = ", ".join(f"{name} [RANGE 5 MINUTES]" for name in names)
        plan = build_plan(parse_query("q", f"SELECT a.k FROM {sources} WHERE {where}", STREAMS), tree)
        self.node = Partition(plan, "j1", 0, 1, settings=settings)
        self.offset, self.next = 0, dict.fromkeys(names, 0)

    def step(self, header: Header, rows: Rows | None = None) -> list[tuple[int, tuple[int, ...]]]:
        """What is sent: the epoch and the parts' offsets of each composite, in order."""
        effects = self.node.step(self.offset, Block(header, rows))
        self.offset, sent = self.offset + 1, list[tuple[int, tuple[int, ...]]]()
        for send in effects.sends:
            if isinstance(send.block.header, Composites) and send.block.rows is not None:
                ids = [send.block.rows.ints(part_id(alias)).tolist() for alias in self.node.node.aliases]
                sent += [(send.block.header.epoch, found) for found in zip(*ids, strict=True)]
            elif isinstance(send.block.header, NodeEnded):
                sent.append((send.block.header.epoch, ()))
        return sorted(sent)

    def plan(self, epoch: int) -> list[tuple[int, tuple[int, ...]]]:
        return self.step(PlanChanged(epoch, b""))

    def row(self, alias: str, epoch: int) -> list[tuple[int, tuple[int, ...]]]:
        """An event of a stream; all have the same values."""
        edge = next(edge for edge in self.node.node.inputs if edge.name == alias)
        at, one = self.next[alias], np.ones(1, np.int64)
        self.next[alias] = at + 1
        columns: dict[str, Any] = {part_id(alias): one * at, part_time(alias): one * 1_000}
        columns |= {str(column): one for column in edge.columns}
        columns[HASH] = hash_key([one for _ in edge.key])
        return self.step(Events(epoch, alias, 1, (Position(0, at, at + 1, 1_000),)), Rows(columns, 1))

    def end(self, alias: str, epoch: int) -> list[tuple[int, tuple[int, ...]]]:
        at = self.next[alias]
        return self.step(SourceEnded(epoch, alias, 1, (Position(0, at, at, 1_000),)))


WHERE = {"ab": "a.k = b.k", "abc": "a.k = b.k AND b.k = c.k"}


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_each_pair_is_made_by_the_operator_of_its_newest_row(names: str) -> None:
    """Every order in which rows of every three epochs can come."""
    for epochs in product((1, 2, 3), repeat=len(names)):
        for order in permutations(range(len(names))):
            stepped = Stepped(names, WHERE[names], tuple(names))
            sent = [*stepped.plan(2), *stepped.plan(3)]
            for i in order:
                sent += stepped.row(names[i], epochs[i])
            assert sent == [(max(epochs), (0,) * len(names))], (epochs, order)


def test_a_row_meets_rows_of_both_plans_and_each_operator_makes_its_own() -> None:
    stepped = Stepped("ab", WHERE["ab"], ("a", "b"))
    assert stepped.plan(2) == []
    assert stepped.row("b", 1) == stepped.row("b", 2) == []
    assert stepped.row("a", 1) == [(1, (0, 0)), (2, (0, 1))]  # an old row late: with the new one it is new
    assert stepped.row("a", 2) == [(2, (1, 0)), (2, (1, 1))]


def test_an_operator_retires_when_every_sender_has_ended_and_not_before() -> None:
    stepped = Stepped("ab", WHERE["ab"], ("a", "b"))
    stepped.plan(2)
    stepped.row("a", 1)
    assert stepped.end("a", 1) == []
    assert stepped.end("a", 1) == []  # said again
    assert stepped.row("b", 1) == [(1, (0, 0))]
    assert stepped.node.memo.live == [1, 2]
    assert stepped.end("b", 1) == [(1, ())]
    assert stepped.node.memo.live == [2]
    assert stepped.row("b", 2) == [(2, (0, 1))]  # with a row of the old plan, which is still there


def test_operators_retire_in_order() -> None:
    """That of epoch 2 has ended first, and waits for the older one."""
    stepped = Stepped("ab", WHERE["ab"], ("a", "b"))
    stepped.plan(2)
    stepped.plan(3)
    assert [stepped.end("a", 2), stepped.end("b", 2), stepped.end("a", 1)] == [[], [], []]
    assert stepped.node.memo.live == [1, 2, 3]
    assert stepped.end("b", 1) == [(1, ()), (2, ())]
    assert stepped.node.memo.live == [3]


@pytest.mark.parametrize("retired", [False, True])
def test_pairs_that_suspension_owes_across_a_change(retired: bool) -> None:
    """They belong to the operator of their newest row; if that has retired, to the next."""
    stepped = Stepped("abc", "a.k = b.k AND a.m = c.m", (("a", "b"), "c"), Settings(feedback="on"))
    suspension = restraint_of(stepped.node, Suspension)
    assert suspension is not None
    shapes = [str(table.shape) for table in suspension.suspended.tables]
    value = pack([(shapes.index("a.m"), entries_of(hash_key([np.ones(1, np.int64)])))])
    assert stepped.row("a", 1) == []
    assert stepped.step(Suspend(1, "j2", 0, 1, 1, 1, 0), value) == []
    assert stepped.row("b", 1) == []  # held
    assert stepped.plan(2) == []
    assert stepped.row("b", 1) == stepped.row("b", 2) == []  # held, too
    ended = [*stepped.end("a", 1), *stepped.end("b", 1)] if retired else []
    assert ended == ([(1, ())] if retired else [])
    old = 2 if retired else 1
    owed = stepped.step(Resume(2 if retired else 1, "j2", 0, 1, 1, 2, 0, 7), value)
    assert owed == [(old, (0, 0)), (old, (0, 1)), (2, (0, 2))]
    assert stepped.row("b", 2) == [(2, (0, 3))]
