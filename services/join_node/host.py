"""One partition of a join node on this worker: its database, its state machine, its sends.

Invariant: the order of a step. (1) `JoinNode.step` computes, (2) one WriteBatch makes segments, memo, offsets and outbox durable, (3) the outbox is
sent, (4) acknowledged entries are trimmed by the next batch. A crash between any two of these repeats sends that
receivers drop, and loses nothing.
"""

import logging
import time
from pathlib import Path

from schemas import topics
from schemas.block import decode_block, encode_block
from schemas.control import PlanPublished, decode_control
from schemas.errors import BlockError
from schemas.mesh import Mesh
from services.runtime.control import derive_plan
from services.runtime.producer import Sender
from services.runtime.report import Durations
from services.runtime.rocks import Cache, NodeDatabase, OutboxEntry, RocksStore
from topology.node import Effects, JoinNode, Memo

log = logging.getLogger("joinmesh.node")


class PartitionHost:
    def __init__(
        self, mesh: Mesh, query: str, node: str, partition: int, directory: Path, cache: Cache, sender: Sender, steps: Durations
    ) -> None:
        self.mesh, self.query, self.node_id, self.partition = mesh, query, node, partition
        self.sender, self.steps = sender, steps
        self.database = NodeDatabase(directory / f"p{partition}", partition, cache)
        self.memo = self.database.memo() or Memo()
        self.node: JoinNode | None = None
        self.stores: tuple[RocksStore, RocksStore] = (self.database.store(0), self.database.store(1))
        self.dead = 0
        stored = self.database.plan()
        if stored is not None:
            self._build(decode_control(stored))
        for key, entry in self.database.outbox():  # made durable before a crash, perhaps not sent
            self._transmit(key, entry)

    def next_offset(self, kind: str) -> int | None:
        return self.memo.offsets.get(kind)

    def _build(self, message: PlanPublished) -> None:
        plan = derive_plan(self.mesh, message)
        self.node = JoinNode(
            plan, self.node_id, self.partition, self.mesh.partitions, epoch=message.epoch,
            incarnation=self.database.incarnation, stores=self.stores, memo=self.memo,
        )  # fmt: skip
        self.node.restore(self.database.restore(self.node.windows))

    def control(self, offset: int, data: bytes) -> None:
        """Take a record of the control topic."""
        if offset < self.memo.offsets.get("control", 0):
            return
        self.memo.offsets["control"] = offset + 1
        message = decode_control(data)
        wanted = message.query == self.query and self.node is None
        if wanted:
            self._build(message)
            self.memo.offsets["control"] = offset + 1
        self.database.apply(Effects(), self.memo, [], data if wanted else None)

    def take(self, offset: int, data: bytes) -> None:
        """Take a record of the input topic: one step."""
        if offset < self.memo.offsets.get("in", 0):
            return  # fetched again after a rebalance
        begun = time.perf_counter()
        assert self.node is not None
        try:
            effects = self.node.step(offset, decode_block(data))
        except BlockError as error:
            effects = self._set_aside(offset, error)
        sends = [OutboxEntry(self._topic(s.target), s.partition, encode_block(s.block)) for s in effects.sends]
        entries = self.database.apply(effects, self.memo, sends)
        for store in self.stores:
            store.settle()
        for key, entry in entries:
            self._transmit(key, entry)
        self.steps.add((time.perf_counter() - begun) * 1000)

    def _set_aside(self, offset: int, error: BlockError) -> Effects:
        self.dead += 1
        log.error("block at offset %s of %s.%s partition %s set aside: %s", offset, self.query, self.node_id, self.partition, error)
        self.memo.offsets["in"] = offset + 1
        return Effects()

    def _topic(self, target: str) -> str:
        if target == "out":
            return topics.query_out(self.mesh.name, self.query)
        return topics.node_in(self.mesh.name, self.query, target)

    def _transmit(self, key: bytes, entry: OutboxEntry) -> None:
        self.sender.send(entry.topic, entry.partition, entry.value, done=lambda: self.database.acknowledged(key))

    def close(self) -> None:
        self.database.close()
