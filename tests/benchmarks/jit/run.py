"""One point in one mode: the real join nodes of the plan in one process, fed with blocks of a short stretch of event
time.

Counted as CPU: decoding every block, the nodes' steps, encoding every block they send. Not counted: making the events,
ingest, Kafka, RocksDB. Messages are delivered at once and in order, feedback before rows, as the paper's scheduling
demands.

Invariant: every mode gives the same results; `Figures.digest` says so, whatever their order.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any
from unittest import mock

import numpy as np

from schemas.block import OF_PRODUCER, Composites, Events, Header, Heralds, decode_block, encode_block
from schemas.rows import Rows
from tests.drawn import restraint_of
from topology.join.partition import Partition
from topology.join.settings import Settings
from topology.plan.plan import Plan
from topology.plan.shapes import Shape, shapes_of
from topology.restraint.interface import Freed, Restraint
from topology.restraint.suspension.suspension import Suspension
from topology.state.hashing import hash_key
from topology.state.window import part_id
from topology.state.window_state import EVER, NEWEST, Run


@dataclass(frozen=True)
class Mode:
    """How the nodes are made, and which sub-tuples may be spoken of."""

    about: str
    settings: Settings
    wanted: Callable[[Shape], bool] = lambda _: True

    @property
    def heralds(self) -> bool:
        return self.settings.heralds


PAPER_MODES = ("REF", "JIT", "ON", "SUSPEND", "DOE")
MODES = {
    "REF": Mode("feedback: off", Settings()),
    "JIT": Mode("feedback: auto, each input and each herald where it pays", Settings("auto", heralds=True)),
    "ON": Mode("feedback: on, every input speaks always", Settings("on", heralds=True)),
    "SUSPEND": Mode("suspend and resume alone and always, as in the paper", Settings("on")),
    "HERALD": Mode("heralds alone", Settings(heralds=True)),
    "DOE": Mode("feedback of the empty sub-tuple alone", Settings("on"), lambda shape: not shape.columns),
    "TYPE1": Mode(
        "feedback of sub-tuples that a row of one input shows alone", Settings("on"), lambda shape: any(shape.sides)
    ),
}


@dataclass
class Figures:
    """What one run of one point in one mode measured."""

    cpu_s: float = 0.0
    stopped: float = 0.0  # after which share of the work it was stopped; 0 if it ran to the end
    events: int = 0
    results: int = 0
    composites: int = 0  # rows that joins other than the root sent
    made: dict[str, int] = field(default_factory=dict)  # node -> rows it sent
    digest: int = 0  # of the results' ids
    state_rows: int = 0  # the largest at the end of a stretch, of all nodes together, as are the next five
    state_bytes: int = 0
    composite_rows: int = 0
    composite_bytes: int = 0  # held on sides that are fed by a join
    table_bytes: int = 0  # what is suspended, at both ends
    index_bytes: int = 0  # what feedback derives from stored runs to look for sub-tuples
    peak_bytes: int = 0  # state, tables and indexes at the worst moment
    comparisons: int = (
        0  # of two rows, or of a row with a value, that nested loops would make; what the paper's CPU time is made of
    )
    steps: int = 0
    suspended: int = 0  # values
    resumed: int = 0
    pairs_avoided: int = 0
    rows_diverted: int = 0
    pairs_resumed: int = 0
    messages: int = 0  # about demand
    message_bytes: int = 0
    block_bytes: int = 0  # everything between nodes and to the sink


class Mesh:
    """The nodes of a plan, one partition each."""

    def __init__(self, plan: Plan, mode: Mode) -> None:
        with only(mode.wanted):
            self.nodes = {node.id: Partition(plan, node.id, 0, 1, settings=mode.settings) for node in plan.nodes}
        self.plan, self.figures = plan, Figures()
        self.offsets = dict.fromkeys(self.nodes, 0)
        self.back: deque[tuple[str, bytes]] = deque()
        self.on: deque[tuple[str, bytes]] = deque()
        self.out: list[bytes] = []
        self.spent = 0.0  # CPU seconds
        for join in self.nodes.values():
            join.kernel.of_freed = self._of_freed(join)  # type: ignore[method-assign]

    def take(self, blocks: list[tuple[str, bytes]]) -> None:
        """Work off a stretch: block by block, each until nothing is under way any more."""
        for target, data in blocks:
            self._step(target, data)
            while self.back or self.on:
                self._step(*(self.back or self.on).popleft())

    def _step(self, target: str, data: bytes) -> None:
        offset, figures = self.offsets[target], self.figures
        self.offsets[target] += 1
        node = self.nodes[target]
        begin = time.process_time()
        block = decode_block(data, node.reads)
        self.spent += time.process_time() - begin
        before = None if block.rows is None else _before(node, block.header)
        begin = time.process_time()
        effects = node.step(offset, block)
        encoded = [encode_block(send.block) for send in effects.sends]
        self.spent += time.process_time() - begin
        if before is not None and block.rows is not None:
            figures.comparisons += before.comparisons(len(block.rows))
        for send, sent in zip(effects.sends, encoded, strict=True):
            figures.block_bytes += len(sent)
            if send.target == "out":
                self.out.append(sent)
                continue
            (self.back if send.back else self.on).append((send.target, sent))
            if send.back or isinstance(send.block.header, OF_PRODUCER):
                figures.messages += 1
                figures.message_bytes += len(sent)

    def _of_freed(self, node: Partition) -> Callable[[Freed, Restraint, int, int], Iterator[Run]]:
        """`of_freed` of a node's kernel, with what nested loops would compare for what is resumed."""
        inner = node.kernel.of_freed

        def of_freed(freed: Freed, by: Restraint, above: int, upto: int) -> Iterator[Run]:
            stored = freed.rows(EVER, NEWEST) if isinstance(by, Suspension) else None
            if stored is not None:
                self.figures.comparisons += len(stored) * node.states[1 - freed.side].rows
            return inner(freed, by, above, upto)

        return of_freed

    def measure(self) -> None:
        """What is held now, if it is more than ever before."""
        figures = self.figures
        rows = size = c_rows = c_size = tables = indexes = 0
        for node in self.nodes.values():
            for side, state in zip(node.node.inputs, node.states, strict=True):
                for segment in state.segments():
                    rows, size = rows + segment.rows, size + segment.bytes
                    if not side.is_source:
                        c_rows, c_size = c_rows + segment.rows, c_size + segment.bytes
                    indexes += _nbytes(state.store.get(segment.id).indexes)
            for heard in node.heard:
                indexes += heard.filter_bytes
                for segment in heard.state.segments():
                    tables += segment.bytes
                    indexes += _nbytes(heard.state.store.get(segment.id).indexes)
            tables += table_bytes(node)
        figures.state_rows, figures.state_bytes = max(figures.state_rows, rows), max(figures.state_bytes, size)
        figures.composite_rows, figures.composite_bytes = (
            max(figures.composite_rows, c_rows),
            max(figures.composite_bytes, c_size),
        )
        figures.table_bytes, figures.index_bytes = max(figures.table_bytes, tables), max(figures.index_bytes, indexes)
        figures.peak_bytes = max(figures.peak_bytes, size + tables + indexes)

    def finish(self) -> Figures:
        figures, root = self.figures, self.plan.root.id
        figures.made = {id: node.memo.counts.rows_out for id, node in self.nodes.items()}
        figures.composites = sum(n for id, n in figures.made.items() if id != root)
        figures.events = sum(
            node.memo.counts.rows_in[i] for node in self.nodes.values() for i in (0, 1) if node.node.inputs[i].is_source
        )
        figures.steps = sum(self.offsets.values())
        ids = [part_id(alias) for alias in self.plan.query.aliases]
        for block in map(decode_block, self.out):
            if block.rows is not None:
                figures.results += len(block.rows)
                figures.digest = (figures.digest + _digest(block.rows, ids)) % 2**64
        for node in self.nodes.values():
            if restraint_of(node, Suspension) is not None:
                memo = node.memo.feedback
                figures.suspended += memo.values_suspended
                figures.resumed += memo.values_resumed
                figures.pairs_avoided += memo.pairs_avoided
                figures.rows_diverted += memo.rows_diverted
                figures.pairs_resumed += memo.pairs_resumed
        return figures


@contextlib.contextmanager
def only(wanted: Callable[[Shape], bool]) -> Iterator[None]:
    """While this lasts, nodes are made that may speak only of these sub-tuples. A node that feeds another keeps its
    place, if with none."""

    def restricted(plan: Plan) -> Mapping[str, tuple[Shape, ...]]:
        return {id: tuple(s for s in shapes if wanted(s)) for id, shapes in shapes_of(plan).items()}

    with mock.patch("topology.restraint.suspension.suspension.shapes_of", restricted):
        yield


def run(plan: Plan, mode: str, work: list[list[tuple[str, bytes]]], limit_s: float = float("inf")) -> Figures:
    """Measure a workload in a mode; not further than the first stretch that ends beyond the limit."""
    mesh, stopped = Mesh(plan, MODES[mode]), 0.0
    for k, blocks in enumerate(work, 1):
        mesh.take(blocks)
        mesh.measure()
        if mesh.spent > limit_s and k < len(work):
            stopped = k / len(work)
            break
    figures = mesh.finish()
    figures.stopped = round(stopped, 3)
    figures.cpu_s = round(mesh.spent, 3)
    return figures


def table_bytes(node: Partition) -> int:
    suspension = restraint_of(node, Suspension)
    if suspension is None:
        return 0
    here = sum(t.nbytes for t in suspension.suspended.tables)
    return here + sum(t.nbytes for demand in suspension.demands if demand is not None for t in demand.tables)


class _Before:
    """What a node holds before it takes rows: from it follows what nested loops would compare. What is suspended and
    heralded is looked up in hash tables, as the paper proposes for its MNS buffer: one comparison each."""

    def __init__(self, node: Partition, against: Sequence[int], heralded: bool) -> None:
        """Rows meet those of the inputs `against`, unless they are only heralded."""
        self.node = node
        self.stored = sum(node.states[side].rows for side in against)
        suspension = restraint_of(node, Suspension)
        self.tables = 0 if suspension is None or heralded else _tables(suspension)
        self.done = self._done()

    def _done(self) -> tuple[int, int]:
        return self.node.memo.feedback.rows_diverted, sum(heard.memo.tested for heard in self.node.heard)

    def comparisons(self, rows: int) -> int:
        """Of the new rows with stored ones, but for those that wait, which are compared when they are resumed; and what
        is looked up."""
        diverted, tested = (now - before for now, before in zip(self._done(), self.done, strict=True))
        return (rows - diverted) * self.stored + rows * self.tables + tested


def _before(node: Partition, header: Header) -> _Before | None:
    """Before rows of an input or of a herald."""
    if isinstance(header, Heralds):
        heard = node.heard[header.herald]
        return _Before(node, [part.side for part in heard.herald.parts] if heard.memo.heeded else [], heralded=True)
    if isinstance(header, Events | Composites):
        return _Before(node, [i for i, e in enumerate(node.node.inputs) if e.name != header.sender], heralded=False)
    return None


def _tables(suspension: Suspension) -> int:
    """In how many tables a new row is looked up: of values suspended here, and of those it may be a partner of."""
    here = sum(table.count_active > 0 for table in suspension.suspended.tables)
    return here + sum(len(t) > 0 for demand in suspension.demands if demand is not None for t in demand.tables)


def _nbytes(value: Any) -> int:
    if is_dataclass(value):
        return sum(map(_nbytes, vars(value).values()))
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(_nbytes, value.values()))
    return sum(map(_nbytes, value)) if isinstance(value, tuple) else 0


def _digest(rows: Rows, ids: list[str]) -> int:
    """The same for the same set of results, whatever their order."""
    return int(hash_key([rows[name] for name in ids]).sum(dtype=np.uint64))
