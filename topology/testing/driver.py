"""TopologyDriver: a whole mesh in one process, every channel under the test's hand.

Source records go in as bytes, results come out as the records a reader would see. Between them stand the real ingest,
join nodes and result encoder, and every block crosses as bytes. The test chooses who runs next and how much it takes.

Invariant: whatever the choices, once every channel is drained the results are those of the oracle.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from schemas.block import Block, PlanChanged, decode_block, encode_block
from schemas.control import PlanPublished
from schemas.mesh import Feedback, Routing, Stream
from topology.ingest.effects import Effect, Emit, SetAside
from topology.ingest.ingest import Fetched, Ingestion, Stored
from topology.ingest.reading import Late
from topology.ingest.table import TableReader
from topology.join.partition import Partition, Restrain
from topology.join.settings import Settings
from topology.message.bundle import bundled
from topology.message.effects import Send
from topology.plan.plan import Plan, tree_text
from topology.results.results import ResultEncoder, SequenceFilter

Choose = Callable[[int], int]  # choose(n) -> 0 … n-1


@dataclass
class Log:
    """One partition of one topic."""

    records: list[bytes] = field(default_factory=list)
    read: int = 0

    @property
    def waiting(self) -> int:
        return len(self.records) - self.read


def with_modes(settings: Settings, feedback: bool | str, routing: Routing = "fixed", heralds: bool = False) -> Settings:
    """Settings with these modes; feedback may be said as a truth value."""
    mode: Feedback = "auto" if feedback == "auto" else "on" if feedback in (True, "on") else "off"
    return replace(settings, feedback=mode, routing=routing, heralds=heralds)


class TopologyDriver:
    def __init__(
        self,
        plan: Plan,
        streams: Mapping[str, Stream],
        *,
        partitions: int = 2,
        source_partitions: int = 2,
        feedback: bool | str | None = None,
        cuts: dict[str, dict[int, int]] | None = None,
        routing: Routing = "fixed",
        heralds: bool = False,
        settings: Settings | None = None,
        restrain: Restrain | None = None,
    ) -> None:
        """`feedback`, `routing` and `heralds` stand for settings with these."""
        self.plan, self.partitions, self.streams = plan, partitions, streams
        self.settings = (
            settings if settings is not None else with_modes(Settings(), feedback or False, routing, heralds)
        )
        used = dict.fromkeys(source.stream for source in plan.query.sources)  # in order: a seed must replay
        counts = dict.fromkeys(used, source_partitions)
        self.published = first = PlanPublished(
            plan.query.name,
            1,
            "",
            tree_text(plan.tree),
            "",
            0,
            counts,
            table_cuts=cuts or {},
            heralds=self.settings.heralds,
        )
        self.ingestion = Ingestion(
            {name: streams[name] for name in used}, partitions, {plan.query.name: [(first, plan)]}, counts
        )
        everything = [Stored(streams[name].topic, p, -1, None, 0, 0) for name in used for p in range(source_partitions)]
        self.ingestion.assigned(everything, 0.0)
        self.readers = self.ingestion.readers
        self.deleted: dict[tuple[str, int], dict[int, bytes | None]] = {}  # record keys of records without a value
        self.loaded: set[tuple[str, int]] = set()  # partitions of tables
        self.sources = {(name, p): Log() for name in used for p in range(source_partitions)}
        self.inputs = {(node.id, p): Log() for node in plan.nodes for p in range(partitions)}
        self.backs = {key: Log() for key in self.inputs}  # feedback topics
        self.nodes = {
            key: Partition(plan, *key, partitions, settings=self.settings, restrain=restrain) for key in self.inputs
        }
        self.out = {p: Log() for p in range(partitions)}
        self.filters = {p: SequenceFilter() for p in range(partitions)}
        self.encoder = ResultEncoder(plan)
        self.results: list[tuple[str, dict[str, Any], int]] = []
        self.late: list[tuple[str, Late]] = []
        self.broken: list[tuple[str, int, int, str]] = []

    def delete(self, table: str, partition: int, key: bytes | None) -> int:
        """Append a record that takes a key out of a table; returns its offset."""
        offset = self.produce(table, partition, b"")
        self.deleted.setdefault((table, partition), {})[offset] = key
        return offset

    def produce(self, stream: str, partition: int, value: bytes | Mapping[str, Any]) -> int:
        """Append a record to a source topic; returns its offset."""
        log = self.sources[stream, partition]
        log.records.append(value if isinstance(value, bytes) else json.dumps(value).encode())
        return len(log.records) - 1

    @property
    def epoch(self) -> int:
        return self.published.epoch

    def change_plan(self) -> int:
        """Go over to a plan of the same tree; gives its epoch."""
        self.published = msgspec.structs.replace(self.published, epoch=self.epoch + 1)
        self._take(self.ingestion.change_plan(self.published, self.plan))
        return self.epoch

    def tick(self) -> None:
        """Every node takes a message that says nothing new."""
        for log in self.inputs.values():
            log.records.append(encode_block(Block(PlanChanged(1, b""))))

    def run(self, choose: Choose, most: int = 5) -> None:
        """Drain every channel, letting `choose` pick who runs next and how many records it takes."""
        while ready := self.ready():
            actor = ready[choose(len(ready))]
            self.advance(actor, 1 + choose(most))

    def ready(self) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = [("ingest", key) for key in self.sources if self._has_more(*key)]
        found += [("node", key) for key, log in self.inputs.items() if log.waiting]
        found += [("relay", key) for key, log in self.backs.items() if log.waiting]
        found += [("sink", p) for p, log in self.out.items() if log.waiting]
        return found

    def _has_more(self, stream: str, partition: int) -> bool:
        log, reader = self.sources[stream, partition], self.readers[stream]
        if not isinstance(reader, TableReader):
            return log.waiting > 0
        reached = (
            len(log.records) >= reader.cut[partition]
        )  # also where there is nothing to read: a table must be said to be complete
        return (stream, partition) not in self.loaded and (reached or log.waiting > 0)

    def advance(self, actor: tuple[str, Any], count: int) -> None:
        kind, key = actor
        if kind == "ingest":
            self._ingest(key, count)
            return
        if kind == "relay":  # a node appends what it hears to its own input: one order of all it takes
            back = self.backs[key]
            stop = min(back.read + count, len(back.records))
            self.inputs[key].records += back.records[back.read : stop]
            back.read = stop
            return
        log = self.inputs[key] if kind == "node" else self.out[key]
        sends: list[Send] = []
        for _ in range(min(count, log.waiting)):
            block = decode_block(log.records[log.read])
            log.read += 1
            if kind == "node":
                sends += self.nodes[key].step(log.read - 1, block).sends
            elif (new := self.filters[key].unseen(block)) is not None and len(new):
                made = self.encoder.encode(new)
                self.results += [
                    (k, json.loads(v), t) for k, v, t in zip(made.keys, made.values, made.times, strict=True)
                ]
        self._deliver(bundled(sends))

    def _ingest(self, key: tuple[str, int], count: int) -> None:
        """Fetch so many records of one partition and let the real ingest read them."""
        stream, partition = key
        log, reader = self.sources[key], self.readers[stream]
        cut = reader.cut[partition] if isinstance(reader, TableReader) else len(log.records)
        stop = min(log.read + count, len(log.records), cut)
        place, offsets = (reader.stream.topic, partition), list(range(log.read, stop))
        deleted = self.deleted.get(key, {})
        if offsets:
            values = [None if at in deleted else log.records[at] for at in offsets]
            self.ingestion.fetched({place: Fetched(offsets, values, deleted)}, {})
        log.read = stop
        if isinstance(reader, TableReader) and stop == cut:  # its rows leave when the cut is reached
            self.loaded.add(key)
        self._take(self.ingestion.advance(place, count, 0.0))

    def _take(self, effects: Sequence[Effect]) -> None:
        """Do what ingest wants done: everything it sends has arrived at once."""
        for effect in effects:
            if isinstance(effect, Emit):
                self._deliver(effect.sends)
            elif isinstance(effect, SetAside):
                self.late += [(effect.stream, late) for late in effect.late]
                self.broken += [(effect.stream, effect.partition, at, reason) for at, reason, _ in effect.broken]

    def _deliver(self, sends: Sequence[Send]) -> None:
        for send in sends:
            inputs = self.backs if send.back else self.inputs
            log = self.out[send.partition] if send.target == "out" else inputs[send.target, send.partition]
            log.records.append(encode_block(send.block))
