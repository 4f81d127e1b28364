"""What a static table changes about feedback (JIT, section V, figure 9b).

Invariant: a consumer says nothing for want of a partner while the table it looks into is still loading, so it never has
to take that back; and a producer's values are not kept for the sake of a table's rows, which never end, unless those
rows show them.
"""

from typing import TYPE_CHECKING

from schemas.block import NO_WATERMARK
from topology.plan.shapes import Shape
from topology.state.window import COMPLETE

if TYPE_CHECKING:
    from topology.join.partition import Partition


def is_loading(join: "Partition", side: int) -> bool:
    """Whether a side is a table that is not complete, so that it means nothing yet if something has no partner
    there."""
    return join.is_static[side] and join.memo.watermarks[side] != COMPLETE


def latest_end(join: "Partition", shape: Shape) -> int:
    """The end of the longest-lived row that a suspended value may be about.

    Rows of a table count only for what they show themselves. Opposite a complete table rows are not stored, so there it
    is the end of a row that comes now.
    """
    ends = [NO_WATERMARK]
    for side, state in enumerate(join.states):
        beside_tables = all(static for other, static in enumerate(join.is_static) if other != side)
        if not join.is_static[side] or beside_tables or shape.sides[side]:
            ends += [segment.max_end for segment in state.segments()]
        if beside_tables and not join.is_static[side]:
            ends.append(join.memo.watermarks[side] + min(join.windows[side].values()))
    return max(ends)
