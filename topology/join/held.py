"""What a node partition holds and is told, for reports.

Invariant: it only reads.
"""

from typing import Any

from topology.join.partition import Partition
from topology.plan.plan import side_name


def describe_state(node: Partition) -> list[dict[str, Any]]:
    """What each side holds, for reports."""
    held = []
    for number, (side, state, given) in enumerate(zip(node.node.inputs, node.states, node.windows, strict=True)):
        segments, static = list(state.segments()), node.is_static[number]
        held.append(
            {
                "side": side_name(node.node, number),
                "name": side.name,
                "rows": state.rows,
                "bytes": sum(s.bytes for s in segments),
                "segments": len(segments),
                "oldest_ms": None if static else min((s.min_start for s in segments), default=None),
                "newest_ms": None if static else max((s.max_start for s in segments), default=None),
                "window_ms": -1 if static else min(given.values()),
            }
        )
    return held


def describe_heralds(node: Partition) -> list[dict[str, Any]]:
    """What the node is told of streams further down, and what came of it."""
    return [
        {
            "herald": str(told.herald),
            "heeded": int(told.memo.heeded),
            "blocks": told.memo.blocks + told.memo.skipped,
            "rows_held": told.state.rows,
            "composites_found": told.memo.tested,
            "not_made": told.memo.refused,
            "made_later": told.memo.made,
        }
        for told in node.told
    ]
