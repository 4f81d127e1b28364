"""By which plan of a query each source partition's rows go: the one of the epoch that its next offset falls into.

A `Course` holds the plans of one query that are known, by epoch, and routers of those that some partition goes through.
A partition's durable `Reading` says at which offset each epoch begins.

Invariants
- A partition goes through one epoch at a time, in the order of epochs, and passes from one to the next exactly at the
  offset that its `Reading` names; so a row has one epoch, whoever reads it again.
- An epoch's entry leaves the `Reading` only when its barrier is delivered; until then a restart sends it again.
"""

from collections.abc import Iterator, Mapping

from schemas.control import PlanPublished
from schemas.errors import StateError
from topology.ingest.blocks import Send, announcement
from topology.ingest.reading import Reading, StreamReader
from topology.ingest.routing import Router, routers_of
from topology.ingest.settings import IngestSettings
from topology.plan.plan import Plan

Published = tuple[PlanPublished, Plan]
Source = tuple[str, int]  # stream, partition


class Course:
    """The plans of one query."""

    def __init__(self, query: str, partitions: int, settings: IngestSettings) -> None:
        self.query, self.partitions, self.settings = query, partitions, settings
        self.plans: dict[int, Published] = {}
        self.at: dict[Source, int] = {}  # the epoch each partition goes through
        self.streams: frozenset[str] = frozenset()
        self.counts = {"rows_out": 0, "null_keys": 0, "filtered": 0}  # of routers that are no more
        self._routers: dict[int, dict[str, list[Router]]] = {}

    def add(self, published: PlanPublished, plan: Plan) -> None:
        self.plans[published.epoch] = (published, plan)
        self.streams = frozenset(source.stream for source in plan.query.sources)

    @property
    def newest(self) -> int:
        return max(self.plans)

    def routers(self, epoch: int) -> dict[str, list[Router]]:
        """By stream; made when first wanted."""
        if epoch not in self._routers:
            published, plan = self.plans[epoch]
            found = routers_of(plan, self.partitions, epoch, published.heralds, self.settings.block_bytes)
            by_stream: dict[str, list[Router]] = {}
            for router in found:
                by_stream.setdefault(router.source.stream, []).append(router)
            self._routers[epoch] = by_stream
            self._routers = dict(sorted(self._routers.items()))
        return self._routers[epoch]

    def live(self, stream: str) -> Iterator[tuple[int, Router]]:
        """Every router of a stream that some partition goes through, older epochs first."""
        for epoch, by_stream in self._routers.items():
            for router in by_stream.get(stream, ()):
                yield epoch, router

    @property
    def is_passing(self) -> bool:
        """Whether some partition goes through another epoch than the rest."""
        return len(self._routers) > 1

    # -- partitions come and go

    def settle(self, source: Source, reading: Reading) -> bool:
        """A partition is ours: through which epoch it goes. False if its plan has not been heard of yet: then its rows
        must wait."""
        entries = reading.epochs.get(self.query)
        epoch = min(entries) if entries else min(self.plans)
        if epoch not in self.plans or any(later not in self.plans for later in entries or ()):
            if min(e for e in (epoch, *(entries or ())) if e not in self.plans) < self.newest:
                raise StateError(
                    f"query {self.query}: {source[0]} partition {source[1]} is in plan epoch {epoch}, which the control"
                    " topic does not hold or which cannot be derived any more; go back to the version that published it"
                )
            return False
        self._enter(source, epoch, reading.next)
        return True

    def leave(self, source: Source) -> None:
        stream, partition = source
        epoch = self.at.pop(source, None)
        if epoch is not None:
            for router in self.routers(epoch).get(stream, ()):
                router.revoke(partition)
            self._retire()

    def _enter(self, source: Source, epoch: int, offset: int) -> None:
        stream, partition = source
        self.at[source] = epoch
        for router in self.routers(epoch).get(stream, ()):
            router.assign(partition, offset)

    # -- from one epoch to the next

    def lacking(self, source: Source, reading: Reading) -> list[int]:
        """The known epochs that this partition has no beginning of yet."""
        entries = reading.epochs.get(self.query)
        last = max(entries) if entries else self.at[source]
        return sorted(epoch for epoch in self.plans if epoch > last)

    def begin(self, source: Source, reading: Reading, epochs: list[int], first: int) -> None:
        """Write down that these epochs begin at an offset of the partition, or where the epoch before them does if that
        lies behind it; nobody has been told yet."""
        entries = reading.epochs.get(self.query) or {self.at[source]: 0}
        first = max(first, *entries.values())
        reading.epochs = {**reading.epochs, self.query: {**entries, **dict.fromkeys(epochs, first)}}

    def announcements(self, epoch: int) -> list[Send]:
        """The plan, for every partition of every node of it."""
        published, plan = self.plans[epoch]
        return [
            announcement(published, node.id, partition) for node in plan.nodes for partition in range(self.partitions)
        ]

    def end(self, source: Source, reading: Reading) -> int | None:
        """The offset at which the partition passes to the next epoch; None if it stays where it is."""
        following = self._following(source, reading)
        return None if following is None else reading.epochs[self.query][following]

    def _following(self, source: Source, reading: Reading) -> int | None:
        entries, now = reading.epochs.get(self.query), self.at.get(source)
        if entries is None or now is None:
            return None
        return min((epoch for epoch in entries if epoch > now), default=None)

    def passing(self, readers: Mapping[str, StreamReader]) -> list[Send]:
        """Barriers of the partitions that have reached the end of their epoch; they go through the next from now on."""
        sends: list[Send] = []
        while ends := self._ended(readers):
            for (epoch, stream), partitions in ends.items():
                for router in self.routers(epoch).get(stream, ()):
                    sends += router.end(partitions, readers[stream])
                for partition in partitions:
                    reading = readers[stream].readings[partition]
                    following = self._following((stream, partition), reading)
                    assert following is not None
                    self._enter((stream, partition), following, reading.next)
        self._retire()
        return sends

    def _ended(self, readers: Mapping[str, StreamReader]) -> dict[tuple[int, str], dict[int, int]]:
        found: dict[tuple[int, str], dict[int, int]] = {}
        for (stream, partition), epoch in self.at.items():
            reading = readers[stream].readings[partition]
            end = self.end((stream, partition), reading)
            if end is not None and reading.next >= end:
                found.setdefault((epoch, stream), {})[partition] = end
        return found

    def forget(self, source: Source, reading: Reading) -> bool:
        """Drop the entries of epochs whose barriers are delivered; whether there were any."""
        entries, now = reading.epochs.get(self.query), self.at.get(source)
        if entries is None or now is None or min(entries) >= now:
            return False
        kept = {epoch: first for epoch, first in entries.items() if epoch >= now}
        reading.epochs = {**reading.epochs, self.query: kept}
        return True

    def _retire(self) -> None:
        used = {*self.at.values(), self.newest}
        for epoch in [e for e in self._routers if e not in used]:
            for router in (r for group in self._routers.pop(epoch).values() for r in group):
                _add(self.counts, router)

    def counted(self) -> dict[str, int]:
        """Rows sent and left out under all plans so far."""
        total = dict(self.counts)
        for router in (r for by_stream in self._routers.values() for group in by_stream.values() for r in group):
            _add(total, router)
        return total


def _add(counts: dict[str, int], router: Router) -> None:
    if not router.is_herald:
        counts["rows_out"] += router.rows_out
        counts["null_keys"] += router.dropped_null
        counts["filtered"] += router.dropped_selection
