"""What a step wants done, as data.

Invariant: effects carry their order: segments, tables and memo are durable before a send leaves, and a send leaves
before it is trimmed. Adding a later step's effects to an earlier one's gives those of both steps done together.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from schemas.block import Block
from topology.state.window_state import Run, Segment, StateName


class Send(NamedTuple):
    target: str  # node id, or "out"
    partition: int
    block: Block
    back: bool = False  # to the node's feedback topic instead of its input


@dataclass
class Effects:
    """Done in this order: store `puts`, `drops`, `tables` and the memo, then send `sends`."""

    puts: list[tuple[StateName, Segment, Run]] = field(default_factory=list)
    drops: list[tuple[StateName, int]] = field(default_factory=list)  # of a state, the segment of this id
    sends: list[Send] = field(default_factory=list)
    tables: dict[str, bytes | None] = field(default_factory=dict)  # records of restraints' tables; None: gone

    def add(self, then: "Effects") -> None:
        """What a later step wants done, too."""
        if then.puts or then.drops:
            put = {(name, segment.id): (name, segment, run) for name, segment, run in self.puts}
            for place in then.drops:
                if put.pop(place, None) is None:  # else made and merged before it was ever written
                    self.drops.append(place)
            self.puts = [*put.values(), *then.puts]
        self.sends += then.sends
        self.tables |= then.tables
