"""The worked examples of the JIT paper (Yang and Papadias, ICDE 2008), on our nodes: its tuples, its states, its messages.

Where ours differs from the paper it is by granularity: a block's rows are joined before its feedback is heard, so what the paper stops within the join of one
tuple we stop from the next block on.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from schemas.block import decode_block
from schemas.mesh import FieldType, Routing, Stream
from topology.cql import parse_query
from topology.hashing import hash_key
from topology.mjoin import MultiJoin
from topology.oracle import Event, truth
from topology.plan import Tree, build_plan
from topology.shapes import shapes_of
from topology.subtuples import SHAPE, VALUE
from topology.testing import TopologyDriver


@dataclass
class Paper:
    """A mesh of one partition; every event is worked off before the next, as in the paper."""

    where: str
    tree: Tree
    columns: str
    names: str
    feedback: bool = True
    routing: Routing = "fixed"
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        fields = {**dict.fromkeys(self.columns, FieldType.INT64), "ts": FieldType.TIMESTAMP}
        self.streams = {n: Stream(n, n, fields, "ts") for n in self.names}
        sources = ", ".join(f"{n} [RANGE 5 MINUTES]" for n in self.names)
        self.query = parse_query("q", f"SELECT {self.names[0]}.ts AS t FROM {sources} WHERE {self.where}", self.streams)
        self.plan = build_plan(self.query, self.tree)
        self.driver = TopologyDriver(self.plan, self.streams, partitions=1, source_partitions=1, feedback=self.feedback, routing=self.routing)
        self.heard = dict.fromkeys(self.driver.backs, 0)

    def arrive(self, stream: str, ts: int, **values: int) -> None:
        row: dict[str, Any] = {**dict.fromkeys(self.columns, -1), **values, "ts": 1_000 * (ts + 1)}
        self.events.append(Event(stream, 0, self.driver.produce(stream, 0, row), row))
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
        return self.driver.nodes[node, 0].memo.rows_out

    def check(self) -> int:
        """The results are the truth; how many there are."""
        found = {key: (value, at) for key, value, at in self.driver.results}
        assert len(found) == len(self.driver.results)
        assert found == truth(self.query, self.streams, self.events)
        return len(found)


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
    told = paper.messages("j3")
    assert len(told) == 2  # a1 and c1, each minimal; nothing that contains them
    assert told[0][1] | told[1][1] == {sub_tuple("A.x", 1), sub_tuple("C.z", 3)}
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
    """Rows of both inputs wait, for different values, several times over: each pair is made once, whichever row waited for which."""
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


def section_five(feedback: bool, routing: Routing = "fixed") -> tuple[Paper, MultiJoin]:
    """Figure 2: a1 has gone its path, has met b1, and has found no c; there is another c that partners neither."""
    paper = Paper("A.x = B.x AND A.x = C.x AND A.y = C.y", ("A", "B", "C"), "xy", "ABC", feedback, routing)
    paper.arrive("C", 0, x=1, y=7)
    paper.arrive("B", 0, x=1)
    paper.arrive("A", 1, x=1, y=100)
    node = paper.driver.nodes["j1", 0]
    assert isinstance(node, MultiJoin)
    return paper, node


def hidden_in(node: MultiJoin, side: int) -> set[tuple[str, int]]:
    assert node.feedback is not None
    return {(str(t.shape), int(h)) for pair in node.feedback.pairs if pair.side == side for t in pair.tables for h in t.active}


def test_section_5_an_m_join_hides_what_has_no_partner_further_down_the_path() -> None:
    paper, node = section_five(feedback=True)
    assert node.paths.composites == 1  # a1b1, which met no c
    assert hidden_in(node, 0) == {sub_tuple("A.y", 100)}
    assert hidden_in(node, 1) == set()  # b1 has a partner by its own value
    paper.arrive("B", 2, x=1)
    assert node.paths.composites == 1  # b2's path makes no a1b2
    paper.arrive("A", 3, x=1, y=100)
    assert node.paths.composites == 1  # nor does a2, of a1's value, set out
    paper.arrive("C", 4, x=1, y=100)
    assert hidden_in(node, 0) == set()
    assert node.paths.composites == 1 + 2  # c2 meets a1 and a2 on its own path
    assert not paper.driver.backs["j1", 0].records  # nothing was asked for: c2's path made all there is
    assert paper.check() == 4


def test_section_5_without_feedback() -> None:
    paper, node = section_five(feedback=False)
    paper.arrive("B", 2, x=1)
    paper.arrive("A", 3, x=1, y=100)
    assert node.paths.composites == 4  # a1b1, b2a1, a2b1, a2b2
    paper.arrive("C", 4, x=1, y=100)
    assert node.paths.composites == 4 + 2
    assert paper.check() == 4


def test_section_5_every_stem_of_an_eddy_is_consumer_and_producer() -> None:
    """Whichever way a1 took, S_A hides it; b2 makes nothing of it, wherever it goes first."""
    paper, node = section_five(feedback=True, routing="eddy")
    assert sub_tuple("A.y", 100) in hidden_in(node, 0)
    before = node.paths.composites
    paper.arrive("B", 2, x=1)
    made = node.paths.composites - before
    assert made <= 1  # b2c1 at most, never b2a1
    paper.arrive("C", 4, x=1, y=100)
    assert hidden_in(node, 0) == set()
    assert paper.check() == 2


def test_section_5_an_empty_state_hides_everything() -> None:
    paper = Paper("A.x = B.x AND A.x = C.x", ("A", "B", "C"), "x", "ABC")
    node = paper.driver.nodes["j1", 0]
    assert isinstance(node, MultiJoin)
    for i in range(5):
        paper.arrive("A", i, x=i % 2)
        paper.arrive("B", i, x=i % 2)
    assert node.paths.composites == 1  # b0a0 found S_C empty
    assert EVERYTHING in hidden_in(node, 0) & hidden_in(node, 1)
    paper.arrive("C", 6, x=1)
    assert EVERYTHING not in hidden_in(node, 0) | hidden_in(node, 1)
    assert paper.check() == 4
