"""Feedback at the border of a node: which blocks about demand are admitted, and how its tables are stored.

Invariant: a block that this plan cannot have made is refused before anything changes; `restore_tables` gives back what
`changed_tables` gave, step by step.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from schemas.block import Block, Header
from schemas.errors import BlockError
from topology.join.admission import check_node_header
from topology.plan.shapes import Shape
from topology.restraint.suspension import suspended
from topology.state.lookup import SHAPE, TICKET, TYPES, unpack

if TYPE_CHECKING:
    from topology.restraint.suspension.feedback import Feedback

OF_PRODUCER = ("release", "resume-done", "poll")
OF_CONSUMER = ("suspend", "resume")


def is_feedback(header: Header, consumer: str) -> bool:
    """Whether a block of an input topic is about demand, and not rows or their time."""
    return header.kind in (*OF_CONSUMER, *OF_PRODUCER) or (header.kind == "watermark" and header.sender == consumer)


def check_feedback(feedback: "Feedback", block: Block) -> None:
    """Refuse what is no feedback for us."""
    header, rows = block.header, block.rows
    shapes: tuple[Shape, ...] | list[Shape]
    if header.kind in OF_PRODUCER:
        demand = feedback.demands[header.side]
        if demand is None or header.sender != feedback.join.node.inputs[header.side].name:
            raise BlockError(f"{header.kind} of {header.sender!r}, which makes nothing for this side")
        shapes = demand.shapes
    else:
        if header.sender != feedback.consumer:
            raise BlockError(
                f"{header.kind} of {header.sender!r}, but {feedback.consumer or 'nobody'} takes what this node makes"
            )
        if header.side != feedback.join.node.target_side:
            raise BlockError(
                f"{header.kind} about side {header.side} of {header.sender!r}, but this node feeds its side"
                f" {feedback.join.node.target_side}"
            )
        shapes = [t.shape for t in feedback.suspended.tables]
    check_node_header(header, feedback.join.memo.epoch, feedback.join.partitions)
    if rows is None:
        if header.kind != "watermark":
            raise BlockError(f"{header.kind} without values")
        return
    if (
        header.kind == "watermark"
        or {n: getattr(c, "dtype", None) for n, c in rows.columns.items()} != TYPES
        or not len(rows)
    ):
        raise BlockError(f"{header.kind} does not have the columns of feedback")
    at = rows.ints(SHAPE)
    if at.min() < -1 or at.max() >= len(shapes) or rows.ints(TICKET).min() < 0 or len(np.unique(rows[TICKET])) > 1:
        raise BlockError(f"{header.kind} speaks of sub-tuples that this plan does not have")
    if (at == -1).any() and header.kind != "resume-done":
        raise BlockError(f"{header.kind} without values")
    for i, entries in unpack(rows):
        if len(np.unique(entries["hash"])) < len(entries):
            raise BlockError(f"{header.kind} names a value twice")
        alone = shapes[i].authority and header.kind in OF_CONSUMER
        if alone and (entries["hash"] % np.uint64(feedback.join.partitions) != header.sender_partition).any():
            raise BlockError(f"{header.kind} of values that belong to another partition")


def changed_tables(feedback: "Feedback") -> dict[str, bytes | None]:
    """What changed in the tables, to be written with the step."""
    found: dict[str, bytes | None] = {}
    for side, demand in enumerate(feedback.demands):
        if demand is not None:
            found |= demand.written(f"d{side}")
    return found | suspended.written_tables("s", feedback.suspended.tables)


def restore_tables(feedback: "Feedback", stored: Mapping[str, bytes | None]) -> None:
    suspended.restore_tables("s", feedback.suspended.tables, stored)
    for side, demand in enumerate(feedback.demands):
        if demand is not None:
            demand.restore(f"d{side}", stored)
