"""What several steps of a node send to one place, as one block; and which rows of such a block are new to its receiver.

A step costs its receiver about the same however few rows it brings, and each join cuts what it sends by its consumer's
partitions. So what a node makes durable together it also sends together: blocks of rows that follow one another to the
same partition become one, whose header says which rows came from which step (`steps`).

Invariant: bundling changes neither the rows, nor their order, nor their sequences. A sender that starts again may
bundle other steps than before; its receiver still takes the rows of each step once, because it goes by the steps and
not by the block.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from schemas.block import MAX_BLOCK_BYTES, Block, Header, Step
from schemas.rows import Rows

if TYPE_CHECKING:
    from topology.join.partition import Send

_BUNDLED = ("rows", "watermark")


def bundled(sends: Sequence["Send"], limit: int = MAX_BLOCK_BYTES) -> list["Send"]:
    """The same, with blocks of rows to one place that nothing stands between bundled up to about `limit` bytes."""
    groups: list[list[Send]] = []
    sizes: list[int] = []
    open_at: dict[tuple[str, int, bool], int] = {}  # place -> the group that may still grow
    for send in sends:
        place, size = (send.target, send.partition, send.back), 0 if send.block.rows is None else send.block.rows.nbytes
        at = open_at.get(place)
        if at is not None and send.block.header.kind in _BUNDLED and sizes[at] + size <= limit:
            groups[at].append(send)
            sizes[at] += size
            continue
        if send.block.header.kind in _BUNDLED:
            open_at[place] = len(groups)
        else:
            open_at.pop(place, None)
        groups.append([send])
        sizes.append(size)
    return [group[0] if len(group) == 1 else _together(group) for group in groups]


def _together(group: list["Send"]) -> "Send":
    blocks = [(send.block.header, send.block.rows) for send in group]
    made = [(header, rows) for header, rows in blocks if rows is not None and len(rows)]
    last = msgspec.structs.replace(
        blocks[-1][0],
        kind="rows" if made else "watermark",
        steps=tuple(Step(header.sequence, len(rows)) for header, rows in made),
    )
    return replace(group[0], block=Block(last, Rows.concat([rows for _, rows in made]) if made else None))


def unseen_of(header: Header, rows: Rows, last: int) -> Rows | None:
    """The rows of a node's block that came from steps after `last`; None if the whole block is a repeat."""
    if header.sequence <= last:
        return None
    repeated = sum(step.rows for step in header.steps if step.sequence <= last)
    return rows.slice(repeated, len(rows)) if repeated else rows
