"""Which source partitions may go on: keeps streams together in event time while old topics are replayed.

Invariant: a partition that is further ahead of the slowest one that still has records to read than the slack waits, so
that states hold about a window however unevenly topics are read. A partition with nothing left to read holds nobody up,
and nobody waits for one that has not moved for a while.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

STUCK_S = 5.0
Place = tuple[str, int]  # topic, partition


@dataclass
class Backlog:
    """What was fetched of one partition and not yet processed."""

    offsets: deque[int] = field(default_factory=deque)
    values: deque[bytes | None] = field(default_factory=deque)
    # record keys of a table's records without a value: what they delete
    keys: dict[int, bytes | None] = field(default_factory=dict)
    time: int | None = None  # event time reached
    fetched: int = 0  # next offset to fetch
    end: int | None = None  # where the topic was last seen to end
    moved_at: float = 0.0  # when something of it was last processed, or it was assigned
    paused: bool = False

    @property
    def at_end(self) -> bool:
        """Nothing more to fetch, as far as known."""
        return self.end is not None and self.fetched >= self.end

    @property
    def first(self) -> int:
        """The next record's offset, or where the next one to be fetched may stand."""
        return self.offsets[0] if self.offsets else self.fetched

    def take(self, count: int) -> tuple[list[int], list[bytes | None]]:
        if count >= len(self.offsets):
            taken = list(self.offsets), list(self.values)
            self.offsets.clear()
            self.values.clear()
            return taken
        return [self.offsets.popleft() for _ in range(count)], [self.values.popleft() for _ in range(count)]

    def __len__(self) -> int:
        return len(self.offsets)


def may_go(backlogs: dict[Place, Backlog], slack_ms: int, now: float) -> Iterable[Place]:
    """The partitions with fetched records that are not too far ahead."""
    holding = [b for b in backlogs.values() if (len(b) or not b.at_end) and now - b.moved_at < STUCK_S]
    times = [b.time for b in holding]
    if None in times:  # a partition with records that nobody has looked at yet: everyone may show a first batch
        slowest = min((t for t in times if t is not None), default=None)
        if any(b.time is None and len(b) for b in holding):
            return [
                place
                for place, b in backlogs.items()
                if len(b) and (b.time is None or slowest is None or b.time <= slowest)
            ]
        return [
            place
            for place, b in backlogs.items()
            if len(b) and (slowest is None or b.time is None or b.time <= slowest + slack_ms)
        ]
    slowest = min((t for t in times if t is not None), default=None)
    return [
        p for p, b in backlogs.items() if len(b) and (slowest is None or b.time is None or b.time <= slowest + slack_ms)
    ]
