"""One partition of a join node on this worker: its database, its state machine, its sends.

Invariant: the order of a step. (1) `Partition.step` computes, (2) one WriteBatch makes segments, memo, offsets and
outbox durable, (3) the outbox is sent, (4) acknowledged entries are trimmed by the next batch. A crash between any two
of these repeats sends that receivers drop, and loses nothing. Several steps may share (2) and (3): `take` and `relay`
compute, `commit` does the rest for all since the last one. Nothing of a step is on disk or under way before its
`commit`.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import msgspec

from schemas import topics
from schemas.block import OF_PRODUCER, Block, FromNode, decode_block, decode_header, encode_block
from schemas.control import PlanPublished, decode_control, encode_control
from schemas.errors import BlockError, PlanError, QueryError
from schemas.mesh import Mesh
from services.runtime.control import derive_plan
from services.runtime.dead import dead_letter
from services.runtime.failpoints import failpoint
from services.runtime.report import Durations
from services.runtime.store import NodeStore, OutboxEntry
from topology.join.memo import Memo
from topology.join.partition import Partition
from topology.join.settings import Settings
from topology.message.bundle import bundled
from topology.message.effects import Effects
from topology.plan.plan import Plan

log = logging.getLogger("joinmesh.node")


class Outlet(Protocol):
    """Sends records in order; `done` is called once the broker has one."""

    def send(
        self, topic: str, partition: int, value: bytes, key: bytes | None = None, done: Callable[[], None] | None = None
    ) -> None: ...


class PartitionHost:
    def __init__(
        self,
        mesh: Mesh,
        history: Sequence[PlanPublished],
        node: str,
        partition: int,
        store: NodeStore,
        sender: Outlet,
        steps: Durations,
        settings: Settings | None = None,
        start: int = 0,
        derive: Callable[[Mesh, PlanPublished], Plan] = derive_plan,
    ) -> None:
        """`history`: the query's plans, oldest first; `start`: where the input topic begins."""
        self.mesh, self.query, self.node_id, self.partition = mesh, history[0].query, node, partition
        self.sender, self.steps = sender, steps
        self.database = store
        self.memo = self.database.memo() or Memo()
        self.dead = 0
        self.waiting = 0  # records taken since the last commit
        self._effects, self._letters = Effects(), list[OutboxEntry]()  # what they want done
        stored = self.database.plan()
        published = history[0] if stored is None else decode_control(stored)
        plan = derive(mesh, published)
        self.node = Partition(
            plan,
            node,
            partition,
            mesh.partitions,
            epoch=published.epoch if start == 0 or stored is not None else None,
            incarnation=self.database.incarnation,
            stores=self.database.state,
            memo=self.memo,
            settings=settings_of(published, settings or Settings()),
            known={plan.epoch: encode_control(plan) for plan in history},
            derive=lambda data: _derived(derive, mesh, data),
        )
        self.node.restore(self.database.restore(self.node.stored_windows), self.database.tables())
        if stored is None:
            self.database.apply(Effects(), self.memo, [], encode_control(published))
        for key, entry in self.database.outbox():  # made durable before a crash, perhaps not sent
            self._transmit(key, self._as_of_now(entry))

    def _as_of_now(self, entry: OutboxEntry) -> OutboxEntry:
        """With this incarnation: receivers refuse earlier ones, and another worker may have spoken for this partition
        since it was made."""
        if entry.topic == topics.dead(self.mesh.name):
            return entry
        block = decode_block(entry.value)
        if not isinstance(block.header, FromNode) or block.header.node != self.node_id:
            return entry  # feedback that is passed on as it came
        header = msgspec.structs.replace(block.header, incarnation=self.database.incarnation)
        return OutboxEntry(entry.topic, entry.partition, encode_block(Block(header, block.rows)))

    def next_offset(self, kind: str) -> int | None:
        return self.memo.offsets.get(kind)

    def take(self, offset: int, data: bytes) -> None:
        """Take a record of the input topic: one step."""
        if offset < self.memo.offsets.get("in", 0):
            return  # fetched again after a rebalance
        begun = time.perf_counter()
        self.waiting += 1
        try:
            self._effects.add(self.node.step(offset, decode_block(data, self.node.reads)))
        except BlockError as error:
            self._set_aside("in", offset, data, error)
        self.steps.add((time.perf_counter() - begun) * 1000)

    def relay(self, offset: int, data: bytes | None) -> None:
        """Append a record of the feedback topic to the input topic: so all that a step depends on stands in one order,
        and a rebuild reads it again."""
        if offset < self.memo.offsets.get("feedback", 0):
            return
        self.waiting += 1
        try:
            decode_header(data)
        except BlockError as error:
            self._set_aside("feedback", offset, data, error)
            return
        assert data is not None
        self.memo.offsets["feedback"] = offset + 1
        self._letters.append(OutboxEntry(self._topic(self.node_id), self.partition, data))

    def commit(self) -> int:
        """Durable first, then sent: all that was taken since the last time; gives how many blocks that made."""
        if not self.waiting:
            return 0
        effects, letters = self._effects, self._letters
        self._effects, self._letters, self.waiting = Effects(), [], 0
        sends = [
            (s, OutboxEntry(self._topic(s.target, s.back), s.partition, encode_block(s.block)))
            for s in bundled(effects.sends)
        ]
        self.memo.feedback.bytes_sent += sum(
            len(entry.value) for s, entry in sends if s.back or isinstance(s.block.header, OF_PRODUCER)
        )
        failpoint("node.before_batch")
        entries = self.database.apply(effects, self.memo, [entry for _, entry in sends] + letters)
        failpoint("node.after_batch")
        self.database.settle()
        for key, entry in entries:
            self._transmit(key, entry)
        if entries:
            failpoint("node.after_send")
        return len(entries)

    def _set_aside(self, kind: str, offset: int, data: bytes | None, error: BlockError) -> None:
        """A dead letter, durable with the offset that passes it over."""
        self.dead += 1
        topic = self._topic(self.node_id, kind == "feedback")
        log.error("record at offset %s of %s partition %s set aside: %s", offset, topic, self.partition, error)
        self.memo.offsets[kind] = offset + 1
        letter = dead_letter(None, topic, self.partition, offset, str(error), data)
        self._letters.append(OutboxEntry(topics.dead(self.mesh.name), self.partition, letter))

    def _topic(self, target: str, back: bool = False) -> str:
        if target == "out":
            return topics.query_out(self.mesh.name, self.query)
        return (topics.node_feedback if back else topics.node_in)(self.mesh.name, self.query, target)

    def _transmit(self, key: bytes, entry: OutboxEntry) -> None:
        self.sender.send(entry.topic, entry.partition, entry.value, done=lambda: self.database.acknowledged(key))

    def close(self) -> None:
        self.database.close()


def _derived(derive: Callable[[Mesh, PlanPublished], Plan], mesh: Mesh, data: bytes) -> Plan:
    """The plan of an announcement; one that says nothing is set aside, one that means something else here stops us."""
    try:
        return derive(mesh, decode_control(data))
    except (QueryError, PlanError) as error:
        raise BlockError(f"a plan that cannot be derived: {error}") from None


def settings_of(published: PlanPublished, base: Settings) -> Settings:
    """As a plan says."""
    return replace(base, feedback=published.feedback, heralds=published.heralds, routing=published.routing)
