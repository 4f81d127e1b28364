"""What a producer does not make for its consumer, and how far that is.

Invariant: rows are kept as long as a partition of the consumer that has something suspended may still want them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from schemas.block import NO_WATERMARK
from topology.plan.shapes import Shape
from topology.restraint.tables import ShapeTable, bits_of

NOTHING_KEPT = 2**62


@dataclass
class Suspended:
    """All shapes of one producer partition, and how far its consumer's partitions are."""

    tables: tuple[ShapeTable, ...]
    reached: dict[int, int]  # consumer partition -> the watermark of its other side, as last told; owned by the memo

    @staticmethod
    def of(shapes: Sequence[Shape], partitions: int, reached: dict[int, int]) -> "Suspended":
        return Suspended(tuple(ShapeTable(shape, (1 << partitions) - 1) for shape in shapes), reached)

    @property
    def is_empty(self) -> bool:
        return not any(map(len, self.tables))

    @property
    def kept_from(self) -> int:
        """Rows that end before this no consumer wants any more; `NOTHING_KEPT` while nothing is suspended."""
        votes = 0
        for table in self.tables:
            votes |= table.voters
        return min((self.reached.get(p, NO_WATERMARK) for p in bits_of(votes)), default=NOTHING_KEPT)

    @property
    def used(self) -> list[ShapeTable]:
        """The tables that cover anything, or did of late."""
        return [table for table in self.tables if table.is_used]
