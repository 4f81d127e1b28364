"""What ingest wants done, as data: the shell does these things in the order they are given, and nothing else.

Invariant: a `Flush` stands before every `Commit` of a new position, and whatever that position vouches for stands
before the `Flush`. A shell that cannot do an effect ends; the next one begins from what is committed.
"""

from dataclasses import dataclass

from topology.ingest.blocks import Send
from topology.ingest.reading import Late

Place = tuple[str, int]  # topic, partition


@dataclass(frozen=True, slots=True)
class Emit:
    """Send blocks to nodes of a query, in this order."""

    query: str
    sends: list[Send]


@dataclass(frozen=True, slots=True)
class SetAside:
    """Put late and broken records on record."""

    stream: str
    topic: str
    partition: int
    late: list[Late]
    broken: list[tuple[int, str, bytes | None]]  # offset, reason, value


@dataclass(frozen=True, slots=True)
class Flush:
    """Wait until everything sent so far is delivered."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Make these positions durable, each with its reading."""

    offsets: list[tuple[str, int, int, str]]  # topic, partition, next offset, metadata
    is_floor: bool = False  # raises floors only: the offsets are those of the commit before


@dataclass(frozen=True, slots=True)
class Assign:
    """Read these partitions from these offsets on."""

    starts: list[tuple[str, int, int]]  # topic, partition, offset


@dataclass(frozen=True, slots=True)
class Pause:
    places: list[Place]


@dataclass(frozen=True, slots=True)
class Resume:
    places: list[Place]


@dataclass(frozen=True, slots=True)
class Warn:
    """Say it once in the log."""

    text: str


Effect = Emit | SetAside | Flush | Commit | Assign | Pause | Resume | Warn
