"""Heralds: what a join is told of streams further down, what it makes for it, and that it changes no result.

The drawn cases are those of feedback, with all heralds heeded at once, or heeded and let be every few blocks, with
feedback and without. A failing seed prints itself; `case(seed, True, feedback)` replays it. Each rule that keeps
heralds exact is also broken on purpose: then some seed must fail.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest

from schemas.block import Block, FromNode, Heralds, Position, Reached, Resume, Suspend, decode_block, encode_block
from schemas.errors import BlockError
from schemas.mesh import FieldType, Stream
from schemas.rows import Mask, Rows
from tests.drawn import check_often, restraint_of, say
from tests.topology.test_feedback_equals_oracle import case
from topology.join.partition import Partition
from topology.join.settings import Settings
from topology.oracle.truth import Event, truth
from topology.plan.heralds import heralds_of, part_hash
from topology.plan.plan import Tree, build_plan
from topology.query.cql import parse_query
from topology.restraint.heralding.heeding import HeraldMemo, Weights
from topology.restraint.heralding.heralding import Heard, Heralding
from topology.restraint.interface import Freed, Ground
from topology.state.hashing import combine
from topology.state.meeting import ARRIVED, NEVER, first_met, meets
from topology.state.pairs import Pairs
from topology.state.window import HASH
from topology.state.window_state import MemoryStore, Run, WindowState
from topology.testing.driver import TopologyDriver

SEEDS, CHUNK = 300, 50
AT_LEAST = {"refused": 6_000, "made for heralds": 2_500, "heralds skipped": 4_000, "heedings": 2_000, "results": 50_000}
MINUTES_5 = 300_000
done: Counter[str] = Counter()


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_results_are_the_oracles(first: int) -> None:
    for seed in range(first, first + CHUNK):
        for feedback in (False, True):
            done.update(case(seed, heralds=True, feedback=feedback))
        done["seeds"] += 1


def test_heralds_really_did_something(capsys: pytest.CaptureFixture[str]) -> None:
    say(capsys, "heralds", done)
    check_often(done, SEEDS, AT_LEAST)


# -- each rule is needed


def gap_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Composites wait for heralds that were not kept."""
    patch.setattr(HeraldMemo, "gap", property(lambda _: -(2**62), lambda *_: None))


def everyone_is_first(patch: pytest.MonkeyPatch) -> None:
    """What an earlier herald has fitted is made again."""
    first = Heralding._first

    def forgetful(self: Heralding, heard: Heard, run: Run) -> Freed | None:
        freed = first(self, heard, run)
        wanted = None if freed is None else freed.wanted
        if freed is None or wanted is None:
            return freed

        def again(pairs: Pairs) -> Mask:
            with mock.patch.object(heard, "has_for", lambda _, at: np.zeros(len(at), np.bool_)):
                return wanted(pairs)

        return replace(freed, wanted=again)

    patch.setattr(Heralding, "_first", forgetful)


def heralds_go_early(patch: pytest.MonkeyPatch) -> None:
    """Heralds are kept only as long as they are valid."""
    purge = HeraldMemo.purge
    patch.setattr(HeraldMemo, "purge", lambda self, horizon, _: purge(self, horizon, 0))


def let_be_at_once(patch: pytest.MonkeyPatch) -> None:
    """Composites from before a herald is let be wait for it for ever."""
    let_be = HeraldMemo.let_be

    def forgets(self: HeraldMemo, w: Weights, now: int, latest: int) -> None:  # noqa: ARG001
        let_be(self, w, now, -(2**62))

    patch.setattr(HeraldMemo, "let_be", forgets)


def time_without_heralds(patch: pytest.MonkeyPatch) -> None:
    """The node's watermark runs ahead of what it is told."""
    patch.setattr(Ground, "watermark", property(lambda self: min(self.times[: len(self.states)])))


def rows_go_early(patch: pytest.MonkeyPatch) -> None:
    """Rows are purged though a herald may still fit them."""

    def reached(self: Ground, side: int) -> int:
        return min(time for other, time in enumerate(self.times[: len(self.states)]) if other != side)

    patch.setattr(Ground, "others_reached", reached)


@pytest.mark.parametrize(
    "mutant",
    [gap_is_forgotten, everyone_is_first, heralds_go_early, let_be_at_once, time_without_heralds, rows_go_early],
    ids=lambda m: m.__name__,
)
def test_a_broken_rule_is_noticed(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mutant(monkeypatch)
    for seed in range(400):
        try:
            case(seed, heralds=True, feedback=False)
        except AssertionError as error:
            with capsys.disabled():
                print(f"\n  {mutant.__name__} is noticed after {seed + 1} seeds: {str(error).splitlines()[0][:120]}")
            return
    pytest.fail(f"{mutant.__name__} is not noticed")


# -- by hand


class Told_:
    """A mesh of one partition; every event is worked off before the next."""

    def __init__(self, where: str, tree: Tree, columns: str, names: str, weights: Weights | None = None) -> None:
        fields = {**dict.fromkeys(columns, FieldType.INT64), "ts": FieldType.TIMESTAMP}
        self.streams = {n: Stream(n, n, fields, "ts") for n in names}
        sources = ", ".join(f"{n} [RANGE 5 MINUTES]" for n in names)
        self.query = parse_query("q", f"SELECT {names[0]}.ts AS t FROM {sources} WHERE {where}", self.streams)
        self.plan = build_plan(self.query, tree)
        settings = Settings(heralds=True, heeding=weights or Weights())
        self.driver = TopologyDriver(self.plan, self.streams, partitions=1, source_partitions=1, settings=settings)
        self.columns, self.events = columns, list[Event]()

    def arrive(self, stream: str, ts: int, **values: int) -> None:
        row: dict[str, Any] = {**dict.fromkeys(self.columns, -1), **values, "ts": 1_000 * (ts + 1)}
        self.events.append(Event(stream, 0, self.driver.produce(stream, 0, row), row))
        self.driver.run(lambda n: n - 1)

    def made(self, node: str) -> int:
        return self.driver.nodes[node, 0].memo.counts.rows_out

    def check(self) -> int:
        found = {key: (value, at) for key, value, at in self.driver.results}
        assert len(found) == len(self.driver.results)
        assert found == truth(self.query, self.streams, self.events)
        return len(found)


def test_table_1_of_the_jit_paper_makes_nothing_before_there_is_a_partner() -> None:
    """Where the paper makes a1b1 to learn that nobody wants it, nothing is made; with c1 come all eight, at once."""
    mesh = Told_("A.x = B.x AND A.y = C.y", (("A", "B"), "C"), "xy", "ABC")
    mesh.arrive("C", 0, y=7)
    for _ in range(3):
        mesh.arrive("B", 0, x=1)
    mesh.arrive("A", 1, x=1, y=100)
    mesh.arrive("B", 2, x=1)
    mesh.arrive("A", 3, x=1, y=100)
    assert mesh.made("j1") == 0
    mesh.arrive("C", 4, y=100)
    assert mesh.made("j1") == 8
    mesh.arrive("C", 5, y=100)
    assert mesh.made("j1") == 8  # the second is not the first to fit them
    mesh.arrive("B", 6, x=1)
    assert mesh.made("j1") == 10  # and what comes later finds it there
    assert mesh.check() == 20


def test_both_sides_of_a_bushy_plan_are_spared_and_nobody_waits_for_the_other() -> None:
    """Feedback of both sides at once would lose a1b2c1d2: a1 waits for a CD with its values, c1 for an AB with its own.
    Heralds are of rows of sources, which never wait."""
    mesh = Told_(
        "A.x = B.x AND C.z = D.z AND A.p = C.p AND A.q = D.q AND B.r = C.r AND B.s = D.s",
        (("A", "B"), ("C", "D")),
        "xzpqrs",
        "ABCD",
    )
    mesh.arrive("A", 0, x=1, p=1, q=1)
    mesh.arrive("B", 0, x=1, r=9, s=9)
    mesh.arrive("C", 0, z=1, p=1, r=1)
    mesh.arrive("D", 0, z=1, q=8, s=8)
    assert (mesh.made("j1"), mesh.made("j2")) == (0, 0)  # a1b1 lacks a C, c1d1 lacks an A
    mesh.arrive("B", 1, x=1, r=1, s=1)
    mesh.arrive("D", 1, z=1, q=1, s=1)
    assert (mesh.made("j1"), mesh.made("j2")) == (1, 1)
    assert mesh.check() == 1


def test_a_herald_that_has_ended_fits_only_what_began_before() -> None:
    mesh = Told_("A.x = B.x AND A.y = C.y", (("A", "B"), "C"), "xy", "ABC")
    mesh.arrive("C", 0, y=1)
    mesh.arrive("A", 299, x=1, y=1)
    mesh.arrive("B", 299, x=1)
    assert mesh.made("j1") == 1
    mesh.arrive("B", 301, x=1)  # c has ended at 300, so a with this b has no partner
    assert mesh.made("j1") == 1
    mesh.arrive("C", 400, y=1)
    assert mesh.made("j1") == 2
    assert mesh.check() == 3


def test_heralds_of_plans() -> None:
    """A key that all share names the one partition it concerns; columns of one input are type I; of several, type
    II."""
    mesh = Told_("A.x = B.x AND B.x = C.x AND A.y = D.y", ((("A", "B"), "C"), "D"), "xy", "ABCD")
    shown = {
        n.id: [
            (str(h), [p.side for p in h.parts], [p.side for p in h.also], h.to is not None)
            for h in heralds_of(mesh.plan, n)
        ]
        for n in mesh.plan.nodes
    }
    assert shown == {
        "j1": [("C by A.x = C.x", [0], [1], True), ("D by A.y = D.y", [0], [], False)],
        "j2": [("D by A.y = D.y", [0], [], False)],
        "j3": [],
    }


# -- what it rests on


def test_meeting_equals_a_look_at_every_row() -> None:
    rng = np.random.default_rng(5)
    for _ in range(60):
        window = int(rng.integers(1, 50))
        state = WindowState({"a": window}, MemoryStore(), slices_per_window=2)
        rows: list[tuple[int, int, int]] = []
        for moment in range(int(rng.integers(1, 6))):
            n = int(rng.integers(1, 30))
            values, times = rng.integers(0, 12, n).astype(np.uint64), rng.integers(0, 200, n)
            state.insert(Run.of(Rows({HASH: values, "@a": times, ARRIVED: np.full(n, moment)}, n), {"a": window}))
            rows += [(int(v), int(t), moment) for v, t in zip(values, times, strict=True)]
        hashes = rng.integers(0, 14, 80).astype(np.uint64)
        low = rng.integers(-50, 220, 80)
        high = low + rng.integers(-3, 60, 80)
        came = [
            [m for v, t, m in rows if v == h and lo <= t <= hi]
            for h, lo, hi in zip(hashes.tolist(), low.tolist(), high.tolist(), strict=True)
        ]
        assert meets(state, hashes, low, high).tolist() == [bool(c) for c in came]
        assert first_met(state, hashes, low, high).tolist() == [min(c, default=NEVER) for c in came]


HERALD = Heralds(1, "C", 1, (Position(0, 0, 1, 5_000),), herald=0, latest=5_000)


def herald_block(node: Partition, rows: dict[str, Any], header: Heralds = HERALD) -> Block:
    return decode_block(encode_block(Block(header, Rows(rows, 1))), node.reads)


def test_a_herald_that_is_none_is_refused() -> None:
    mesh = Told_("A.x = B.x AND A.y = C.y AND B.z = C.z", (("A", "B"), "C"), "xyz", "ABC")
    node = Partition(mesh.plan, "j1", 0, 1, settings=Settings(heralds=True))
    one, two = np.array([5], np.uint64), np.array([6], np.uint64)
    whole = combine([one, two])
    good = {"#C": np.array([0]), "@C": np.array([5_000]), HASH: whole, part_hash(0): one, part_hash(1): two}
    with pytest.raises(BlockError, match="not that of its parts"):
        node.step(0, herald_block(node, {**good, HASH: one}))
    with pytest.raises(BlockError, match="columns"):
        node.step(0, herald_block(node, {name: column for name, column in good.items() if name != part_hash(1)}))
    with pytest.raises(BlockError, match="outside its positions"):
        node.step(0, herald_block(node, {**good, "#C": np.array([3])}))
    with pytest.raises(BlockError, match="of herald 1, but C is herald 0 here"):
        node.step(0, herald_block(node, good, msgspec.structs.replace(HERALD, herald=1)))
    with pytest.raises(BlockError, match="out of range"):
        node.step(0, herald_block(node, good, msgspec.structs.replace(HERALD, latest=2**60)))
    node.step(0, herald_block(node, good))
    assert node.heard[0].memo.rows == 1


def test_a_sparse_stream_is_elected_and_one_that_always_fits_is_let_be() -> None:
    """Of two heralds the one that spares most is heeded, though the other comes first; a restart changes nothing."""
    weights = Weights(weighed_blocks=4, block_us=1, row_us=0.1, makes_us=1, samples_least=50)
    mesh = Told_("A.x = B.x AND A.y = C.y AND A.z = D.z", ((("A", "B"), "C"), "D"), "xyz", "ABCD", weights)
    rng = np.random.default_rng(1)
    for i in range(900):
        mesh.arrive("ABC"[i % 3], i, x=int(rng.integers(4)), y=int(rng.integers(2)), z=int(rng.integers(50)))
        if i % 90 == 0:
            mesh.arrive("D", i, z=int(rng.integers(50)))
    memo = mesh.driver.nodes["j1", 0].memo.heralds
    assert [h.heeded for h in memo.each] == [False, True]
    assert memo.each[0].skipped > 50
    assert mesh.check() > 100
    assert mesh.made("j1") < 4_000


def test_heralding_has_a_window_of_its_own_streams_only() -> None:
    mesh = Told_("A.x = B.x AND A.y = C.y", (("A", "B"), "C"), "xy", "ABC")
    node = mesh.driver.nodes["j1", 0]
    heralding = restraint_of(node, Heralding)
    assert heralding is not None
    assert heralding.window == MINUTES_5


@pytest.mark.parametrize("kind", [Suspend, Resume, Reached])
def test_what_an_m_join_says_of_its_third_input_is_not_taken_for_a_herald(kind: type[FromNode]) -> None:
    """The producer of that input has two inputs of its own, so that 2 was its first herald's number; while that is let
    be, a resume was passed over (seed 95 of the M-Joins)."""
    mesh = Told_("A.x = B.x AND B.x = C.x AND C.x = D.x AND A.y = D.y", ("C", "D", ("A", "B")), "xy", "ABCD")
    node = next(n for n in mesh.plan.nodes if n.target != "out")
    join = Partition(mesh.plan, node.id, 0, 1, settings=Settings(heralds=True, feedback="on"))
    assert node.target_side == len(join.states)
    for heard in join.heard:
        heard.memo.collects = False
    assert not join.reads(HERALD)
    said = (5_000, 7) if kind is Resume else (5_000,)
    assert join.reads(kind(1, node.target, 0, 1, 1, 0, *said))
