"""What a partition has seen: each row once, and how far its senders are.

Invariants
- A block of ingest is deduplicated by source offset, one of a node by its sequence; a block of an earlier incarnation
  of a node is refused, because its successor sends the same rows.
- An input's watermark is the least over all partitions of its sender, and none before all of them have spoken.
"""

from schemas.block import NO_WATERMARK, Composites, FromNode, FromSource, Header
from schemas.errors import StateError
from schemas.rows import Rows
from topology.join.memo import Memo
from topology.message.bundle import unseen_of
from topology.state.window import OFFSET_BITS, OFFSET_MASK, part_id

NOTHING = Rows({}, 0)


def unseen(memo: Memo, header: Header, rows: Rows | None, where: str) -> Rows | None:
    """The rows not seen before; None if the whole block is a repeat. `where`: for errors."""
    rows = NOTHING if rows is None else rows
    if isinstance(header, FromNode):
        return _of_node(memo, header, rows)
    if isinstance(header, FromSource):
        return _of_source(memo, header, rows, where)
    return rows


def _of_node(memo: Memo, header: FromNode, rows: Rows) -> Rows | None:
    newest = memo.incarnations.setdefault(header.node, {})
    if header.incarnation < newest.get(header.partition, 0):
        memo.blocks_fenced += 1  # a worker that was taken for dead woke up; its successor sends the same rows
        return None
    newest[header.partition] = header.incarnation
    last = memo.seen_sequences.setdefault(header.node, {})
    new = unseen_of(header, rows, last.get(header.partition, -1))
    memo.rows_repeated += len(rows) - (0 if new is None else len(new))
    if new is not None:
        last[header.partition] = header.sequence
    return new


def _of_source(memo: Memo, header: FromSource, rows: Rows, where: str) -> Rows:
    seen = memo.seen_offsets.setdefault(header.alias, {})
    for position in header.positions:
        known = seen.get(position.partition)
        if known is not None:
            if position.first > known:
                raise StateError(
                    f"{where}: rows of {header.alias} partition {position.partition}, offsets {known} to"
                    f" {position.first - 1}, never arrived; stop the mesh, delete this node's state directory and start"
                    " again: it is rebuilt from the input topic"
                )
            if position.first < known and len(rows):
                ids = rows.ints(part_id(header.alias))
                new = (ids >> OFFSET_BITS != position.partition) | ((ids & OFFSET_MASK) >= known)
                if not new.all():
                    memo.rows_repeated += len(rows) - int(new.sum())
                    rows = rows.filter(new)
        seen[position.partition] = max(known or 0, position.next)
    return rows


def advance(memo: Memo, header: Header, number: int) -> None:
    """Take the time that a block of an input or herald of this number says."""
    times = memo.times.setdefault(header.sender, {})
    if isinstance(header, FromSource):
        partitions = header.partitions
        for p in header.positions:
            times[p.partition] = max(times.get(p.partition, NO_WATERMARK), p.watermark)
    else:
        assert isinstance(header, Composites)
        partitions = header.partitions
        times[header.partition] = max(times.get(header.partition, NO_WATERMARK), header.watermark)
    memo.senders[header.sender] = partitions
    if len(times) >= partitions:
        memo.watermarks[number] = max(memo.watermarks[number], min(times.values()))
