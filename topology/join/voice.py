"""What a node partition says: composites cut by the partitions of the node it feeds, its time, and words about demand.

Invariants
- All it says is numbered in order. A sequence is (offset in the input topic + 1) << 20 | count, so a node that is
  rebuilt from its input topic repeats the same sequences.
- Output watermark = the least time of all inputs: a later output contains at least one later row. A block cut into
  several keeps the old watermark in all but the last.
"""

from collections.abc import Iterable

import numpy as np

from schemas.block import MAX_BLOCK_BYTES, NO_WATERMARK, Block, Composites, FromNode, NodeEnded
from schemas.rows import Rows
from topology.join.memo import Memo
from topology.message.effects import Send
from topology.plan.plan import Input, Node, Plan
from topology.state.hashing import hash_key
from topology.state.partitioning import partition_rows
from topology.state.window import HASH

SEQUENCE_BITS = 20


class Speaker:
    """One partition's voice."""

    def __init__(
        self, plan: Plan, node: Node, memo: Memo, place: tuple[int, int], incarnation: int, block_bytes: int
    ) -> None:
        self.node, self.memo, self.incarnation, self.block_bytes = node, memo, incarnation, block_bytes
        self.partition, self.partitions = place
        self.target: Input | None = None
        if node.target != "out":
            self.target = plan.node(node.target).inputs[node.target_side]
        self.sends: list[Send] = []  # of this step

    def begin(self, moment: int) -> None:
        self.memo.sequence = (moment + 1) << SEQUENCE_BITS
        self.sends = []

    # -- words about demand

    def to_producer(self, side: int, partition: int, kind: type[FromNode], rows: Rows | None, *said: int) -> None:
        header = self._header(kind, self.memo.live[0], *said)
        self.sends.append(Send(self.node.inputs[side].name, partition, Block(header, rows), back=True))

    def to_consumer(self, partition: int, kind: type[FromNode], rows: Rows | None, *said: int) -> None:
        self._send(partition, kind, self.memo.live[0], rows, *said)

    # -- what is made

    def emit(self, made: Iterable[tuple[int, Rows]], before: int, now: int, step: int) -> None:
        """Composites, each with its epoch; and how far we are, to those that have not heard of it for a while."""
        pieces: dict[int, list[tuple[int, Rows]]] = {}
        for epoch, output in made:
            self.memo.counts.rows_out += len(output)
            for partition, rows in self._partitioned(output).items():
                pieces.setdefault(partition, []).extend((epoch, piece) for piece in cut(rows, self.block_bytes))
        for partition, some in pieces.items():
            if self.target is not None:
                self.memo.time_sent[partition] = now
            for k, (epoch, piece) in enumerate(some, 1):
                self._composites(partition, epoch, piece, now if k == len(some) else before)
        if self.target is None or (not pieces and now == before):
            return
        for partition in range(self.partitions):
            if now - self.memo.time_sent.get(partition, NO_WATERMARK) >= step:
                self.memo.time_sent[partition] = now
                self._composites(partition, self.memo.live[-1], None, now)

    def end(self, epoch: int) -> None:
        """No more of an epoch."""
        for partition in range(self.partitions) if self.target is not None else (self.partition,):
            self._send(partition, NodeEnded, epoch, None)

    def _composites(self, partition: int, epoch: int, rows: Rows | None, watermark: int) -> None:
        self._send(partition, Composites, epoch, rows, watermark, self.memo.feedback.spared)

    def _partitioned(self, output: Rows) -> dict[int, Rows]:
        if self.target is None:
            return {self.partition: output}
        hashes = hash_key([output[str(column)] for column in self.target.key])
        return partition_rows(output.with_column(HASH, hashes), self.partitions)

    def _send(self, partition: int, kind: type[FromNode], epoch: int, rows: Rows | None, *said: int) -> None:
        self.sends.append(Send(self.node.target, partition, Block(self._header(kind, epoch, *said), rows)))

    def _header(self, kind: type[FromNode], epoch: int, *said: int) -> FromNode:
        self.memo.sequence += 1
        return kind(epoch, self.node.id, self.partition, self.partitions, self.incarnation, self.memo.sequence, *said)


def cut(rows: Rows, limit: int = MAX_BLOCK_BYTES) -> list[Rows]:
    """Pieces of at most about `limit` bytes; in a fixed order of rows, so that a repeat is cut the same way."""
    size = rows.nbytes
    if size <= limit or len(rows) == 1:
        return [rows]
    ids = [rows.ints(name) for name in sorted(rows.columns) if name.startswith("#") and name != HASH]
    rows = rows.take(np.lexsort(ids))
    count = max(1, len(rows) * limit // size)
    return [rows.slice(k, k + count) for k in range(0, len(rows), count)]
