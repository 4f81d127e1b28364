"""Feedback at the border of a node: which blocks about demand are admitted, and how its tables are stored.

Invariant: a block that this plan cannot have made is refused before anything changes; `restore_tables` gives back what
`changed_tables` gave, step by step.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from schemas.block import OF_CONSUMER, OF_PRODUCER, Block, FromNode, Reached, ResumeDone
from schemas.errors import BlockError
from schemas.rows import Rows
from topology.plan.shapes import Shape
from topology.restraint import tables
from topology.restraint.suspension.wire import SHAPE, TYPES, unpack

if TYPE_CHECKING:
    from topology.restraint.suspension.suspension import Suspension


def check_feedback(suspension: "Suspension", block: Block) -> None:
    """Refuse what is no feedback for us."""
    header, rows, node = block.header, block.rows, suspension.ground.node
    assert isinstance(header, FromNode)
    shapes: Sequence[Shape]
    if isinstance(header, OF_PRODUCER):
        demand = suspension.demands[suspension.side_of[header.node]] if header.node in suspension.side_of else None
        if demand is None:
            raise BlockError(f"{header.kind} of {header.node!r}, which makes nothing for this node")
        shapes = demand.shapes
    else:
        if header.node != node.target:
            raise BlockError(
                f"{header.kind} of {header.node!r}, but {'nobody' if node.target == 'out' else node.target} takes what"
                " this node makes"
            )
        shapes = [t.shape for t in suspension.suspended.tables]
    if isinstance(header, Reached | ResumeDone):
        if rows is not None:
            raise BlockError(f"{header.kind} with values")
        return
    if rows is None or not len(rows):
        raise BlockError(f"{header.kind} without values")
    if {n: getattr(c, "dtype", None) for n, c in rows.columns.items()} != TYPES:
        raise BlockError(f"{header.kind} does not have the columns of feedback")
    _check_values(header, rows, shapes, suspension.ground.partitions)


def _check_values(header: FromNode, rows: Rows, shapes: Sequence[Shape], partitions: int) -> None:
    at = rows.ints(SHAPE)
    if at.min() < 0 or at.max() >= len(shapes):
        raise BlockError(f"{header.kind} speaks of sub-tuples that this plan does not have")
    for i, entries in unpack(rows):
        if len(np.unique(entries["hash"])) < len(entries):
            raise BlockError(f"{header.kind} names a value twice")
        alone = shapes[i].authority and isinstance(header, OF_CONSUMER)
        if alone and (entries["hash"] % np.uint64(partitions) != header.partition).any():
            raise BlockError(f"{header.kind} of values that belong to another partition")


def changed_tables(suspension: "Suspension") -> dict[str, bytes | None]:
    """What changed in the tables, to be written with the step."""
    found: dict[str, bytes | None] = {}
    for side, demand in suspension.asking.speaking:
        if demand.changed:
            found |= demand.written(f"d{side}")
    return found | tables.written_tables("s", suspension.suspended.tables)


def restore_tables(suspension: "Suspension", stored: Mapping[str, bytes]) -> None:
    tables.restore_tables("s", suspension.suspended.tables, stored)
    for side, demand in suspension.asking.speaking:
        demand.restore(f"d{side}", stored)
