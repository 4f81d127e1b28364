"""What several steps of a node send to one place, as one block; and which rows of such a block are new to its receiver.

A step costs its receiver about the same however few rows it brings, and each join cuts what it sends by its consumer's
partitions. So what a node makes durable together it also sends together: composites of one epoch that follow one
another to the same partition become one block, whose header says which rows came from which step (`steps`).

Invariant: bundling changes neither the rows, nor their order, nor their sequences. A sender that starts again may
bundle other steps than before; its receiver still takes the rows of each step once, because it goes by the steps and
not by the block.
"""

from collections.abc import Sequence

import msgspec

from schemas.block import MAX_BLOCK_BYTES, Block, Composites, FromNode, Step
from schemas.rows import Rows
from topology.message.effects import Send


def bundled(sends: Sequence[Send], limit: int = MAX_BLOCK_BYTES) -> Sequence[Send]:
    """The same, with composites to one place that nothing stands between bundled up to about `limit` bytes."""
    if len(sends) < 2:
        return sends
    groups: list[list[Send]] = []
    sizes: list[int] = []
    open_at: dict[tuple[str, int, bool], int] = {}  # place -> the group that may still grow
    for send in sends:
        place, size = (send.target, send.partition, send.back), 0 if send.block.rows is None else send.block.rows.nbytes
        at, grows = open_at.get(place), isinstance(send.block.header, Composites)
        if at is not None and grows and sizes[at] + size <= limit and _epoch(groups[at][0]) == _epoch(send):
            groups[at].append(send)
            sizes[at] += size
            continue
        if grows:
            open_at[place] = len(groups)
        else:
            open_at.pop(place, None)
        groups.append([send])
        sizes.append(size)
    return [group[0] if len(group) == 1 else _together(group) for group in groups]


def _epoch(send: Send) -> int:
    return send.block.header.epoch


def _together(group: list[Send]) -> Send:
    blocks = [(send.block.header, send.block.rows) for send in group]
    made = [(header, rows) for header, rows in blocks if rows is not None and len(rows)]
    steps = tuple(Step(header.sequence, len(rows)) for header, rows in made if isinstance(header, FromNode))
    last = msgspec.structs.replace(blocks[-1][0], steps=steps)
    return group[0]._replace(block=Block(last, Rows.concat([rows for _, rows in made]) if made else None))


def unseen_of(header: FromNode, rows: Rows, last: int) -> Rows | None:
    """The rows of a node's block that came from steps after `last`; None if the whole block is a repeat."""
    if header.sequence <= last:
        return None
    steps = header.steps if isinstance(header, Composites) else ()
    repeated = sum(step.rows for step in steps if step.sequence <= last)
    return rows.slice(repeated, len(rows)) if repeated else rows
