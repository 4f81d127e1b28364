"""What a restraint is: someone who says of a pair "not now".

> A pair is made at the first moment when both its rows are there and no restraint holds it.

A moment is an offset of the partition's input topic. The join kernel has a tuple of restraints, empty for a plain join,
and knows nothing of their kinds; a restraint sees the `Ground` that the join stands on and nothing else of it.

Invariant: a restraint answers for its own moments alone. Whether a pair that it lets go is made now follows from what
all of them say (`free_from`), so each pair is made once, whoever waited for whom.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from schemas.block import NO_WATERMARK, Block, FromNode, Header
from schemas.rows import I64, Mask, Rows
from topology.plan.plan import Node, Plan
from topology.state.pairs import Pairs
from topology.state.window import COMPLETE, WATERMARKS_PER_WINDOW
from topology.state.window_state import Run, WindowState, count_matches

FOREVER = 2**62
FreeFrom = Callable[[I64], I64]  # moments -> the first ones from then on at which the pairs are not held


class Counts(msgspec.Struct):
    """What a node partition has done so far; part of its memo."""

    rows_in: list[int] = msgspec.field(default_factory=list)  # per input
    rows_out: int = 0
    blocks_in: int = 0
    composites: int = 0  # made on the way to a result, and not stored


class Voice(Protocol):
    """How a node speaks to its neighbours; what it says is numbered in order."""

    def to_producer(self, side: int, partition: int, kind: type[FromNode], rows: Rows | None, *said: int) -> None: ...
    def to_consumer(self, partition: int, kind: type[FromNode], rows: Rows | None, *said: int) -> None: ...


@dataclass
class Ground:
    """What a join and its restraints stand on."""

    plan: Plan
    node: Node
    partition: int
    partitions: int
    states: tuple[WindowState, ...]  # one an input
    times: list[int]  # watermarks: of the inputs, then of the heralds
    counts: Counts
    voice: Voice
    now: int = 0  # the moment
    restraints: Sequence["Restraint"] = ()
    windows: tuple[Mapping[str, int], ...] = field(init=False)  # per input: alias -> window
    is_static: tuple[bool, ...] = field(init=False)  # inputs of tables alone: their rows never end

    def __post_init__(self) -> None:
        query = self.plan.query
        windows = {source.alias: source.window_ms for source in query.sources}
        self.windows = tuple({a: windows[a] for a in edge.aliases} for edge in self.node.inputs)
        self.is_static = tuple(query.is_static(edge.aliases) for edge in self.node.inputs)
        self.window = min(windows.values())
        self.watermark_step = max(1, self.window // WATERMARKS_PER_WINDOW)

    @property
    def watermark(self) -> int:
        """No later output starts before this."""
        held = min(self.times)
        for restraint in self.restraints:
            held = min(held, restraint.hold)
        return held

    def others_reached(self, side: int) -> int:
        """Whatever comes on any other input begins here or later."""
        return min(time for other, time in enumerate(self.times) if other != side)

    def is_loading(self, side: int) -> bool:
        """Whether an input is a table that is not complete, so that it means nothing yet if something has no partner
        there."""
        return self.is_static[side] and self.times[side] != COMPLETE

    @property
    def is_silenced(self) -> bool:
        """Whether nothing at all may be made for now."""
        return any(restraint.silences for restraint in self.restraints)

    @property
    def avoided(self) -> int:
        """How many pairs were left out so far, about."""
        return sum(restraint.avoided for restraint in self.restraints)

    def estimate(self, side: int, probe: Run) -> int:
        """About how many composites these rows would make; cheap, because none is made."""
        if len(self.states) > 2:
            return len(probe) * max(1, self.counts.rows_out // max(1, sum(self.counts.rows_in)))
        if not len(probe):
            return 0
        reachable = self.states[1 - side].reachable(int(probe.starts.min()), int(probe.ends.max()))
        return sum(count_matches(probe, run) for run in reachable)

    def latest_start(self) -> int:
        return max((s.max_start for state in self.states for s in state.segments()), default=NO_WATERMARK)


@dataclass(frozen=True)
class Freed:
    """Pairs that a restraint may have let go: composites of these stored rows of one input."""

    side: int
    rows: Callable[[int, int], Run | None]  # those of epochs behind the one up to the other, sorted by hash
    partners: Callable[[], tuple[Run, Run] | None] | None = None  # pairs of rows of both inputs, if these are known
    wanted: Callable[[Pairs], Mask] | None = None  # which of the pairs, before they are built
    shows: Callable[[Rows], Mask] | None = None  # and after
    without_a_gap: bool = False  # it has held them at every moment since they came


class Restraint:
    """Holds nothing; what a kind of restraint does not say, it leaves as it is here."""

    keeps_moments = False  # whether rows are stored with the moment they came at
    notes_unmet = False  # whether it is told of composites that a half join finds no partner for
    silences = False  # whether it holds everything for now
    avoided = 0  # pairs held so far, about
    hold = FOREVER  # the clock stands still here, for its sake
    is_due = False  # whether it has something to do at the end of a step that brought nothing
    ripens = False  # whether it lets go by itself, without a message
    takes: tuple[type[Header], ...] = ()  # the messages that are for it

    # -- new rows of an input, in this order

    def arrive(self, side: int, run: Run) -> None:
        """They have come."""

    def probing(self, side: int, run: Run) -> Run:
        """Those that may make pairs now."""
        return run

    def hidden(self, side: int, run: Run, at: I64) -> Mask | None:
        """Which of the rows at these places of a stored run may not be met; None: all may."""
        return None

    def unmet(self, held: tuple[int, ...], to: int, alone: Run) -> None:
        """Composites of the inputs `held` that have no partner in `to`."""

    def allowed(self, pairs: Pairs) -> Mask | None:
        """Which pairs of a new row may be made now; None: all may."""
        return None

    def stored(self, side: int, run: Run, header: Header) -> None:
        """They are stored."""

    # -- pairs of rows that are all stored

    def free_from(self, pairs: Rows, starts: I64, ends: I64, came: I64) -> FreeFrom | None:
        """When these pairs were not held, whose later rows came at `came`; None: always."""
        return None

    def ripe(self) -> Generator[Freed, int, None]:
        """What it lets go because this moment has come, whatever message it brings; before that is taken."""
        yield from ()

    # -- messages of its own

    def check(self, block: Block) -> None:
        """Refuse what cannot be for us, before anything changes."""

    def reads(self, header: Header) -> bool:
        """Whether the rows of a block are to be read."""
        return True

    def take(self, block: Block, rows: Rows) -> Generator[Freed, int, None]:
        """Take a message; gives what it lets go, and hears how many pairs were made of it."""
        yield from ()

    # -- the end of a step

    def horizon(self, side: int, horizon: int) -> int:
        """Rows of an input that end before `horizon` the join needs no more; from where on we need them."""
        return horizon

    def purge(self, horizons: Sequence[int]) -> None:
        """Rows of the inputs that end before these are needed no more."""

    def finish(self) -> None:
        """Behind the rows of the step."""

    def weigh(self) -> None:
        """Behind all that the step said."""

    # -- what outlives the process, and what people are told

    def changed(self) -> dict[str, bytes | None]:
        """Records of its tables that are to be written; None: gone."""
        return {}

    def restore(self, stored: Mapping[str, bytes]) -> None:
        """Take over what `changed` gave."""

    def counts(self) -> dict[str, Any]:
        """For reports."""
        return {}
