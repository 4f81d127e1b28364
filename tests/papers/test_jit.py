"""The worked examples of the JIT paper (Yang and Papadias, ICDE 2008), on our nodes: its tuples, its states, its
messages.

Where ours differs from the paper it is by granularity: a block's rows are joined before its feedback is heard, so what
the paper stops within the join of one tuple we stop from the next block on.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from schemas.block import decode_block
from schemas.mesh import FieldType, Routing, Stream
from tests.drawn import restraint_of
from topology.join.partition import Partition
from topology.oracle.truth import Event, truth
from topology.plan.plan import Tree, build_plan
from topology.plan.shapes import shapes_of
from topology.query.cql import parse_query
from topology.restraint.hiding import Hiding
from topology.restraint.suspension.suspension import Suspension
from topology.restraint.suspension.wire import SHAPE, VALUE
from topology.state.hashing import hash_key
from topology.testing.driver import TopologyDriver


@dataclass
class Paper:
    """A mesh of one partition; every event is worked off before the next, as in the paper."""

    where: str
    tree: Tree
    columns: str
    names: str
    feedback: bool = True
    relation: list[int] | None = None  # the values of the key y of a static relation R
    missing: int = 0  # how many of its tuples come later
    routing: Routing = "fixed"
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        fields = {**dict.fromkeys(self.columns, FieldType.INT64), "ts": FieldType.TIMESTAMP}
        self.streams = {n: Stream(n, n, fields, "ts") for n in self.names}
        sources = ", ".join(f"{n} [RANGE 5 MINUTES]" for n in self.names)
        if self.relation is not None:
            self.streams["R"], sources = Stream("R", "R", {"y": FieldType.INT64}, "", table="y"), f"{sources}, R"
        self.query = parse_query("q", f"SELECT {self.names[0]}.ts AS t FROM {sources} WHERE {self.where}", self.streams)
        self.plan = build_plan(self.query, self.tree)
        self.cuts = {"R": {0: len(self.relation or []) + self.missing}}
        self.driver = TopologyDriver(
            self.plan,
            self.streams,
            partitions=1,
            source_partitions=1,
            feedback=self.feedback,
            cuts=self.cuts,
            routing=self.routing,
        )
        self.heard = dict.fromkeys(self.driver.backs, 0)
        for y in self.relation or []:
            self.relate(y)

    def arrive(self, stream: str, ts: int, **values: int) -> None:
        row: dict[str, Any] = {**dict.fromkeys(self.columns, -1), **values, "ts": 1_000 * (ts + 1)}
        self.events.append(Event(stream, 0, self.driver.produce(stream, 0, row), row))
        self.driver.run(lambda n: n - 1)

    def relate(self, y: int) -> None:
        self.events.append(Event("R", 0, self.driver.produce("R", 0, {"y": y}), {"y": y}))
        self.driver.run(lambda n: n - 1)

    def messages(self, node: str) -> list[tuple[str, set[tuple[str, int]]]]:
        """What a node was told since the last time: (command, {(columns, hash)})."""
        log = self.driver.backs[node, 0].records
        new, self.heard[node, 0] = log[self.heard[node, 0] :], len(log)
        shapes = shapes_of(self.plan)[node]
        told = []
        for block in map(decode_block, new):
            if block.rows is not None:
                pairs = zip(block.rows[SHAPE].tolist(), block.rows[VALUE].tolist(), strict=True)
                told.append((block.header.kind, {(str(shapes[i]), h) for i, h in pairs}))
        return told

    def made(self, node: str) -> int:
        return self.driver.nodes[node, 0].memo.counts.rows_out

    def check(self) -> int:
        """The results are the truth; how many there are."""
        found = {key: (value, at) for key, value, at in self.driver.results}
        assert len(found) == len(self.driver.results)
        assert found == truth(self.query, self.streams, self.events, self.cuts)
        return len(found)

    def stored(self, node: str, side: int) -> int:
        return sum(segment.rows for segment in self.driver.nodes[node, 0].states[side].segments())


def sub_tuple(columns: str, *values: int) -> tuple[str, int]:
    return columns, int(hash_key([np.array([v]) for v in values])[0])


EVERYTHING = ("everything", 0)


def table_one(feedback: bool = True) -> Paper:
    """Figure 1 and table I, with some other C tuple in its state: an empty one is another example."""
    paper = Paper("A.x = B.x AND A.y = C.y", (("A", "B"), "C"), "xy", "ABC", feedback)
    paper.arrive("C", 0, y=7)
    for _ in range(3):
        paper.arrive("B", 0, x=1)
    paper.arrive("A", 1, x=1, y=100)
    return paper


def test_table_1_the_producer_stops_and_resumes() -> None:
    paper = table_one()
    assert paper.made("j1") == 3  # a1b1, a1b2, a1b3
    assert paper.messages("j1") == [("suspend", {sub_tuple("A.y", 100)})]
    paper.arrive("B", 2, x=1)
    assert paper.made("j1") == 3  # not a1b4
    paper.arrive("A", 3, x=1, y=100)
    assert paper.made("j1") == 3  # nor a2b1 to a2b4: a2 has a1's value
    assert paper.messages("j1") == []  # and nothing is reported twice
    paper.arrive("C", 4, y=100)
    assert paper.messages("j1") == [("resume", {sub_tuple("A.y", 100)})]
    assert paper.made("j1") == 8  # a1b4, a2b1 … a2b4: exactly what is missing
    assert paper.check() == 8


def test_table_1_without_feedback_makes_all_at_once() -> None:
    paper = table_one(feedback=False)
    paper.arrive("B", 2, x=1)
    paper.arrive("A", 3, x=1, y=100)
    assert paper.made("j1") == 8
    paper.arrive("C", 4, y=100)
    assert paper.check() == 8


def test_a_fruitless_partial_result_is_never_made() -> None:
    """Section III-A: without a partner before it expires, an NPR becomes an FPR, which JIT eliminates altogether."""
    paper = table_one()
    for i in range(50):
        paper.arrive("B", 2 + i, x=1)
    for stream in "ABC":
        paper.arrive(stream, 400, x=5, y=6)
    paper.arrive("C", 401, y=100)  # a1 has expired at 301
    assert paper.made("j1") == 3 + 1  # and the pair at 400
    assert paper.check() == 1


def test_an_empty_state_suspends_everything_as_doe_does() -> None:
    paper = Paper("A.x = B.x AND A.y = C.y", (("A", "B"), "C"), "xy", "ABC")
    paper.arrive("B", 0, x=1)
    paper.arrive("A", 1, x=1, y=100)
    assert paper.messages("j1") == [("suspend", {EVERYTHING})]
    for i in range(5):
        paper.arrive("A", 2, x=1, y=i)
    assert paper.made("j1") == 1
    paper.arrive("C", 3, y=3)
    assert paper.messages("j1")[0] == ("resume", {EVERYTHING})
    assert paper.made("j1") == 6
    assert paper.check() == 1


FIGURE_5 = "A.p = B.p AND C.q = D.q AND A.r = C.r AND A.x = E.x AND B.y = E.y AND C.z = E.z AND D.w = E.w"


def figure_five() -> Paper:
    """b1 and c1d1 are there; E has partners of b1 and d1, but not of a1 and c1."""
    paper = Paper(FIGURE_5, ((("A", "B"), ("C", "D")), "E"), "pqrxyzw", "ABCDE")
    paper.arrive("E", 0, x=8, y=2, z=8, w=4)
    paper.arrive("B", 0, p=1, y=2)
    paper.arrive("C", 0, q=1, r=1, z=3)
    paper.arrive("D", 0, q=1, w=4)
    return paper


def test_figure_5_feedback_travels_up_both_branches() -> None:
    paper = figure_five()
    for node in ("j1", "j2", "j3"):
        paper.messages(node)
    paper.arrive("A", 1, p=1, r=1, x=1)
    assert paper.messages("j3") == [
        ("suspend", {sub_tuple("A.x", 1), sub_tuple("C.z", 3)})
    ]  # each minimal; nothing that contains them
    assert ("suspend", {sub_tuple("A.x", 1)}) in paper.messages("j1")
    assert ("suspend", {sub_tuple("C.z", 3)}) in paper.messages("j2")
    before = {node: paper.made(node) for node in ("j1", "j2", "j3")}
    paper.arrive("B", 1, p=1, y=2)
    paper.arrive("D", 1, q=1, w=4)
    assert before == {node: paper.made(node) for node in ("j1", "j2", "j3")}  # nothing is made, at any level
    paper.arrive("E", 2, x=1, y=2, z=3, w=4)
    assert ("resume", {sub_tuple("A.x", 1), sub_tuple("C.z", 3)}) in paper.messages("j3")
    assert ("resume", {sub_tuple("A.x", 1)}) in paper.messages("j1")
    assert ("resume", {sub_tuple("C.z", 3)}) in paper.messages("j2")
    assert paper.check() == 4


def test_figure_8_a_pair_of_matched_components_may_be_minimal() -> None:
    """e1 matches a, e2 matches c, no tuple both: `ac` is the minimal sub-tuple, of type II at Op3."""
    paper = Paper(FIGURE_5, ((("A", "B"), ("C", "D")), "E"), "pqrxyzw", "ABCDE")
    paper.arrive("E", 0, x=1, y=2, z=9, w=4)
    paper.arrive("E", 0, x=9, y=2, z=3, w=4)
    paper.arrive("B", 0, p=1, y=2)
    paper.arrive("C", 0, q=1, r=1, z=3)
    paper.arrive("D", 0, q=1, w=4)
    paper.messages("j3")
    paper.arrive("A", 1, p=1, r=1, x=1)
    assert paper.messages("j3") == [("suspend", {sub_tuple("A.x, C.z", 1, 3)})]
    made = paper.made("j3")
    paper.arrive("B", 1, p=1, y=2)
    assert paper.made("j3") == made  # a1b2 with c1d1 is not joined …
    paper.arrive("C", 1, q=1, r=1, z=5)
    assert paper.made("j3") > made  # … but with other c's it is
    paper.arrive("E", 2, x=1, y=2, z=3, w=4)
    assert ("resume", {sub_tuple("A.x, C.z", 1, 3)}) in paper.messages("j3")
    assert paper.check() == 2


@pytest.mark.parametrize("first", ["y", "z"])
def test_both_inputs_suspended_and_resumed_in_either_order(first: str) -> None:
    """Rows of both inputs wait, for different values, several times over: each pair is made once, whichever row waited
    for which."""
    paper = Paper("A.x = B.x AND A.y = C.y AND B.z = D.z", ((("A", "B"), "C"), "D"), "xyz", "ABCD")
    paper.arrive("C", 0, y=7)
    paper.arrive("D", 0, z=7)
    for turn in range(3):
        at = 1 + 100 * turn
        for i in range(2):
            paper.arrive("A", at + i, x=1, y=100)
            paper.arrive("B", at + i, x=1, z=200)
        for stream, column, value in (("C", "y", 100), ("D", "z", 200))[:: 1 if first == "y" else -1]:
            paper.arrive(stream, at + 5, **{column: value})
            paper.arrive("A", at + 6, x=1, y=100)
            paper.arrive("B", at + 6, x=1, z=200)
    assert paper.check() > 100


def test_figure_9a_a_selection_never_sits_above_a_join() -> None:
    """a1 fails the selection: it never reaches the join that the paper's selection would have to stop."""
    paper = Paper("A.x = B.x AND A.y > 200", ("A", "B"), "xy", "AB")
    for i in range(3):
        paper.arrive("B", i, x=1)
    paper.arrive("A", 3, x=1, y=100)
    paper.arrive("A", 3, x=1, y=201)
    assert paper.driver.nodes["j1", 0].memo.counts.rows_in == [1, 3]  # a1 is dropped before
    assert paper.stored("j1", 0) == 1
    assert paper.check() == 3


def test_figure_9a_a_selection_over_both_inputs_is_applied_where_they_meet() -> None:
    """Nothing that fails it is sent, so no consumer is left that could ask for less."""
    paper = Paper("A.x = B.x AND A.y + B.y > 200 AND A.y = C.y", (("A", "B"), "C"), "xy", "ABC")
    paper.arrive("C", 0, y=100)
    for i in range(3):
        paper.arrive("B", i, x=1, y=99 + i)
    paper.arrive("A", 3, x=1, y=100)
    assert paper.made("j1") == 1  # a1b3; a1b1 and a1b2 have 199 and 200
    assert paper.driver.nodes["j2", 0].memo.counts.rows_in == [1, 1]
    assert paper.messages("j1") == []
    assert paper.check() == 1


def figure_nine_b(feedback: bool = True, relation: tuple[int, ...] = (7, 8)) -> Paper:
    paper = Paper("A.x = B.x AND A.y = R.y", (("A", "B"), "R"), "xy", "AB", feedback, list(relation))
    paper.driver.run(lambda n: n - 1)
    for _ in range(3):
        paper.arrive("B", 0, x=1)
    paper.arrive("A", 1, x=1, y=100)
    return paper


def test_figure_9b_a_static_join_suspends_and_never_resumes() -> None:
    paper = figure_nine_b()
    assert paper.made("j1") == 3  # a1b1, a1b2, a1b3
    assert paper.messages("j1")[0] == ("suspend", {sub_tuple("A.y", 100)})
    for i in range(40):
        paper.arrive("B", 2 + i, x=1)
        paper.arrive("A", 2 + i, x=1, y=100)
    assert paper.made("j1") == 3
    paper.arrive("A", 50, x=1, y=7)
    assert paper.made("j1") == 3 + 43
    assert paper.messages("j1") == []
    assert paper.stored("j2", 0) == 0  # the relation is complete: what joins it need not wait
    assert paper.check() == 43


def test_figure_9b_an_empty_relation_stops_everything_at_once() -> None:
    paper = figure_nine_b(relation=())
    assert paper.messages("j1")[0] == ("suspend", {EVERYTHING})
    for i in range(20):
        paper.arrive("A", 2 + i, x=1, y=i)
    assert paper.made("j1") == 0  # the paper makes one: its join looks only when a row comes
    assert paper.messages("j1") == []
    assert paper.check() == 0


def test_figure_9b_the_producer_keeps_nothing_for_it_beyond_its_own_window() -> None:
    """The paper deletes a1 at once. Ours holds it as long as without feedback, and a suspended value four windows
    longer than rows show it."""
    with_feedback, without = figure_nine_b(), figure_nine_b(feedback=False)
    feedback = restraint_of(with_feedback.driver.nodes["j1", 0], Suspension)
    assert feedback is not None
    most = 0
    for i in range(360):
        for paper in (with_feedback, without):
            paper.arrive("AB"[i % 2], 10 * i, x=1, y=1000 + i // 10)
        held = [(paper.stored("j1", 0), paper.stored("j1", 1)) for paper in (with_feedback, without)]
        assert held[0] == held[1]
        most = max(most, feedback.counts()["suspended_here"])
    assert 2 <= most <= 20  # of 36 values: five windows of 300 s, and half a slice
    assert with_feedback.made("j1") < without.made("j1") / 5
    assert {kind for kind, _ in with_feedback.messages("j1")} == {"suspend"}
    assert with_feedback.check() == without.check()


def test_figure_9b_nothing_is_said_before_the_relation_is_there() -> None:
    paper = Paper("A.x = B.x AND A.y = R.y", (("A", "B"), "R"), "xy", "AB", relation=[7], missing=2)
    paper.arrive("B", 0, x=1)
    for y in (7, 8, 100):
        paper.arrive("A", 1, x=1, y=y)
    paper.relate(8)
    assert (paper.made("j1"), paper.stored("j2", 0), paper.messages("j1")) == (3, 3, [])
    paper.relate(9)
    assert (paper.stored("j2", 0), paper.messages("j1")) == (
        0,
        [],
    )  # the relation is complete: the pairs are made, and nothing waits any more
    paper.arrive("A", 2, x=1, y=100)
    paper.arrive("A", 3, x=1, y=100)
    assert paper.messages("j1")[0] == ("suspend", {sub_tuple("A.y", 100)})
    assert paper.made("j1") == 4
    assert paper.check() == 2


def test_a_relation_in_the_producer_does_not_keep_suspended_values_for_ever() -> None:
    paper = Paper("A.y = R.y AND A.x = B.x", (("A", "R"), "B"), "xy", "AB", relation=[1, 2, 3])
    feedback = restraint_of(paper.driver.nodes["j1", 0], Suspension)
    assert feedback is not None
    most = 0
    for i in range(400):
        paper.arrive("B", 10 * i, x=-2)
        paper.arrive("A", 10 * i, x=i, y=1 + i % 3)
        most = max(most, feedback.counts()["suspended_here"])
    assert 20 <= most <= 5 * 30 + 20  # of 400 values: a window shows 30, and they are kept for four more
    assert paper.check() == 0


def section_five(feedback: bool, routing: Routing = "fixed") -> tuple[Paper, Partition]:
    """Figure 2: a1 has gone its path, has met b1, and has found no c; there is another c that partners neither."""
    paper = Paper("A.x = B.x AND A.x = C.x AND A.y = C.y", ("A", "B", "C"), "xy", "ABC", feedback, routing=routing)
    paper.arrive("C", 0, x=1, y=7)
    paper.arrive("B", 0, x=1)
    paper.arrive("A", 1, x=1, y=100)
    node = paper.driver.nodes["j1", 0]
    assert node.node.is_flat
    return paper, node


def hidden_in(node: Partition, side: int) -> set[tuple[str, int]]:
    hiding = restraint_of(node, Hiding)
    assert hiding is not None
    return {(str(t.shape), int(h)) for pair in hiding.pairs if pair.side == side for t in pair.tables for h in t.active}


def test_section_5_an_m_join_hides_what_has_no_partner_further_down_the_path() -> None:
    paper, node = section_five(feedback=True)
    assert node.memo.counts.composites == 1  # a1b1, which met no c
    assert hidden_in(node, 0) == {sub_tuple("A.y", 100)}
    assert hidden_in(node, 1) == set()  # b1 has a partner by its own value
    paper.arrive("B", 2, x=1)
    assert node.memo.counts.composites == 1  # b2's path makes no a1b2
    paper.arrive("A", 3, x=1, y=100)
    assert node.memo.counts.composites == 1  # nor does a2, of a1's value, set out
    paper.arrive("C", 4, x=1, y=100)
    assert hidden_in(node, 0) == set()
    assert node.memo.counts.composites == 1 + 2  # c2 meets a1 and a2 on its own path
    assert not paper.driver.backs["j1", 0].records  # nothing was asked for: c2's path made all there is
    assert paper.check() == 4


def test_section_5_without_feedback() -> None:
    paper, node = section_five(feedback=False)
    paper.arrive("B", 2, x=1)
    paper.arrive("A", 3, x=1, y=100)
    assert node.memo.counts.composites == 4  # a1b1, b2a1, a2b1, a2b2
    paper.arrive("C", 4, x=1, y=100)
    assert node.memo.counts.composites == 4 + 2
    assert paper.check() == 4


def test_section_5_every_stem_of_an_eddy_is_consumer_and_producer() -> None:
    """Whichever way a1 took, S_A hides it; b2 makes nothing of it, wherever it goes first."""
    paper, node = section_five(feedback=True, routing="eddy")
    assert sub_tuple("A.y", 100) in hidden_in(node, 0)
    before = node.memo.counts.composites
    paper.arrive("B", 2, x=1)
    made = node.memo.counts.composites - before
    assert made <= 1  # b2c1 at most, never b2a1
    paper.arrive("C", 4, x=1, y=100)
    assert hidden_in(node, 0) == set()
    assert paper.check() == 2


def test_section_5_an_empty_state_hides_everything() -> None:
    paper = Paper("A.x = B.x AND A.x = C.x", ("A", "B", "C"), "x", "ABC")
    node = paper.driver.nodes["j1", 0]
    assert node.node.is_flat
    for i in range(5):
        paper.arrive("A", i, x=i % 2)
        paper.arrive("B", i, x=i % 2)
    assert node.memo.counts.composites == 1  # b0a0 found S_C empty
    assert EVERYTHING in hidden_in(node, 0) & hidden_in(node, 1)
    paper.arrive("C", 6, x=1)
    assert EVERYTHING not in hidden_in(node, 0) | hidden_in(node, 1)
    assert paper.check() == 4


def test_where_both_inputs_are_joins_the_one_that_makes_nothing_silences_the_other() -> None:
    """DOE in a bushy plan: there is no ABCD, so nobody makes an EF after the first."""
    where = "A.x = B.x AND C.x = D.x AND A.y = C.y AND B.y = D.y AND E.x = F.x AND A.u = E.u AND C.v = F.v"
    paper = Paper(where, ((("A", "B"), ("C", "D")), ("E", "F")), "xyuv", "ABCDEF")
    paper.arrive("A", 0, x=1, y=1, u=1)
    paper.arrive("B", 0, x=1, y=1)
    for i in range(10):
        for stream in "EF":
            paper.arrive(stream, 60 + 30 * i, x=1, u=1, v=1)
    for stream in "AB":
        paper.arrive(stream, 340, x=1, y=1, u=1)
    assert paper.made("j4") == 1
    assert ("suspend", {EVERYTHING}) in paper.messages("j4")
    for stream in "CD":
        paper.arrive(stream, 341, x=1, y=1, v=1)
    assert paper.made("j4") == paper.check() > 10  # there is an ABCD now


@pytest.mark.parametrize("routing", ["fixed", "eddy"])
def test_section_5_an_m_join_tells_its_producer_what_it_has_no_partner_for(routing: Routing) -> None:
    paper = Paper("A.x = B.x AND A.y = C.y AND C.y = D.y", (("A", "B"), "C", "D"), "xy", "ABCD", routing=routing)
    paper.arrive("C", 0, y=7)
    paper.arrive("D", 0, y=100)
    for _ in range(3):
        paper.arrive("B", 1, x=1)
    paper.arrive("A", 2, x=1, y=100)
    assert paper.made("j1") == 3
    assert paper.messages("j1") == [("suspend", {sub_tuple("A.y", 100)})]
    for i in range(5):
        paper.arrive("B", 3 + i, x=1)
    assert paper.made("j1") == 3
    paper.arrive("C", 10, y=100)
    assert paper.messages("j1") == [("resume", {sub_tuple("A.y", 100)})]
    assert paper.made("j1") == 8
    assert paper.check() == 8


@pytest.mark.parametrize("routing", ["fixed", "eddy"])
def test_section_5_an_m_join_leaves_out_what_its_consumer_does_not_want(routing: Routing) -> None:
    paper = Paper("A.x = B.x AND B.x = C.x AND A.y = D.y", (("A", "B", "C"), "D"), "xy", "ABCD", routing=routing)
    paper.arrive("D", 0, y=7)
    for stream in "BC":
        paper.arrive(stream, 1, x=1)
    paper.arrive("A", 2, x=1, y=100)
    assert paper.messages("j1") == [("suspend", {sub_tuple("A.y", 100)})]
    for i in range(3):
        paper.arrive("B", 3 + i, x=1)
        paper.arrive("C", 3 + i, x=1)
    assert paper.made("j1") == 1
    paper.arrive("D", 10, y=100)
    assert paper.made("j1") == 16  # each of the others once, whichever of its rows came last
    assert paper.check() == 16
