"""Ingest as a state machine: records and plans in, effects out. No Kafka, clock, logging or randomness.

A round decides which partitions may go on (alignment), reads them into columns, and gives blocks for the join nodes;
static tables come first: streams wait until those of this worker are loaded up to their cut, and nothing behind it is
read. Now and then `commit` tells every channel its positions and makes the source offsets durable, with each
partition's `Reading` as metadata. A new plan of a query begins at an offset of each partition that nobody has sent
anything of yet: it is announced, then that offset is durable; behind the last row before it the old plan's channels get
a barrier, and from it on rows go by the new plan.

Invariants
- A source offset is committed only after every block of the rows before it is delivered and every channel knows the
  position; so a restart repeats rows (dropped downstream by source offset) and never skips one.
- The offset at which an epoch begins is durable before the first row is routed by its plan, and not before anything
  that a process may have sent that ended before its commit (at most `ahead_most` offsets, and nothing behind the end
  that the topic has when its successor begins); so a row has one epoch.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from schemas.block import NO_WATERMARK
from schemas.control import PlanPublished
from schemas.errors import StateError
from schemas.mesh import Stream
from schemas.rows import Rows
from topology.ingest.alignment import Backlog, may_go
from topology.ingest.effects import Assign, Commit, Effect, Emit, Flush, Pause, Place, Resume, SetAside, Warn
from topology.ingest.epochs import Course, Published
from topology.ingest.reading import Read, Reading, StreamReader
from topology.ingest.settings import IngestSettings, RoundSize
from topology.ingest.table import TableReader, behind_cut
from topology.plan.plan import Plan
from topology.state.window import COMPLETE

Frames = dict[str, dict[int, Rows]]  # stream -> partition -> rows read now


@dataclass(frozen=True)
class Stored:
    """A partition that is ours now: what is committed of it, and what its topic holds."""

    topic: str
    partition: int
    offset: int  # below 0: nothing is committed
    metadata: str | None
    low: int
    high: int


@dataclass
class Fetched:
    """Records of one partition, in the order of their offsets."""

    offsets: list[int] = field(default_factory=list)
    values: list[bytes | None] = field(default_factory=list)
    keys: dict[int, bytes | None] = field(default_factory=dict)  # of those without a value


class Ingestion:
    """`plans`: of each query, those that are known, the newest last. `counts`: of each stream that some query reads,
    the partitions of its topic. `waits`: whether receivers say when they have room (`size.room`)."""

    def __init__(
        self,
        streams: Mapping[str, Stream],
        partitions: int,
        plans: Mapping[str, Sequence[Published]],
        counts: Mapping[str, int],
        settings: IngestSettings | None = None,
        waits: bool = False,
    ) -> None:
        self.settings = settings = settings or IngestSettings()
        self.size = RoundSize(settings, waits)
        self.courses: dict[str, Course] = {}
        for query, known in plans.items():
            self.courses[query] = course = Course(query, partitions, settings)
            for published, plan in known:
                course.add(published, plan)
        newest = [known[-1] for known in plans.values()]
        used = [stream for name, stream in streams.items() if name in counts]
        cuts = {table: cut for message, _ in newest for table, cut in message.table_cuts.items()}
        self.readers = {
            stream.name: (
                StreamReader(stream, counts[stream.name])
                if stream.table is None
                else TableReader(stream, counts[stream.name], cuts[stream.name])
            )
            for stream in used
        }
        self.by_topic = {stream.topic: stream.name for stream in used}
        self.slack_ms = self.longest_ms = 0
        self._measure()
        self.backlogs: dict[Place, Backlog] = {}  # of streams
        self.tables: dict[Place, Backlog] = {}
        self.unread: dict[Place, int] = {}  # records of tables behind their cut
        self.committed: dict[Place, int] = {}
        self.counts = dict.fromkeys(("events_in", "late", "dead", "rounds"), 0)
        self.per_stream = {name: {"events": 0, "late": 0, "dead": 0} for name in self.readers}
        self.wants_commit = False  # whether records wait for one
        self.has_more = False  # whether the last round left records that could go on
        self._held: set[Place] = set()  # in an epoch whose plan has not been heard of yet
        self._reach: dict[Place, int] = {}  # what was sent of a partition before it was ours lies before this offset
        self._ends: dict[Place, int] = {}  # where a partition that is behind it passes to its next epoch
        self._changed: set[Place] = set()  # readings with something to commit beside the offset
        self._unbegun = False  # whether some partition may lack an epoch that is known

    def _measure(self) -> None:
        newest = [course.plans[course.newest][1] for course in self.courses.values()]
        windows = [s.window_ms for plan in newest for s in plan.query.sources if not s.is_table]
        self.slack_ms, self.longest_ms = max(1_000, min(windows) // 4), max(windows)

    def reading(self, place: Place) -> Reading | None:
        return self.readers[self.by_topic[place[0]]].readings.get(place[1])

    @property
    def waiting(self) -> int:
        """Records of streams that were fetched and not read yet."""
        return sum(len(backlog) for backlog in self.backlogs.values())

    # -- partitions come and go

    def assigned(self, places: Sequence[Stored], now: float) -> list[Effect]:
        """These partitions are ours."""
        starts: list[tuple[str, int, int]] = []
        for place in places:
            reader, start = self.readers[self.by_topic[place.topic]], self._start(place)
            reading = (
                msgspec.json.decode(place.metadata, type=Reading)
                if place.offset >= 0 and place.metadata
                else Reading(start)
            )
            reading.next = start
            reader.readings[place.partition] = reading
            backlog = Backlog(fetched=start, end=place.high, moved_at=now)
            backlog.time = reading.max_time if reading.max_time != NO_WATERMARK else None
            at = (place.topic, place.partition)
            (self.tables if isinstance(reader, TableReader) else self.backlogs)[at] = backlog
            self.committed[at] = start
            self._reach[at] = (
                reader.cut[place.partition]
                if isinstance(reader, TableReader)
                else min(place.high, start + self.settings.ahead_most)
            )
            is_complete = reader.watermark(place.partition) == COMPLETE
            starts.append((*at, place.high if is_complete else start))
            self._settle(at)
        effects: list[Effect] = [Assign(starts)]
        for place in places:
            effects += self._watch_cut((place.topic, place.partition), place.high)
        self._unbegun = True
        return effects

    def _start(self, place: Stored) -> int:
        reader, low = self.readers[self.by_topic[place.topic]], place.low
        start = place.offset if place.offset >= 0 else low
        if isinstance(reader, TableReader) and start >= reader.cut[place.partition]:
            low = min(low, start)  # it is loaded: what became of its records since does not matter
        if start < low:
            raise StateError(
                f"source topic {place.topic} partition {place.partition}: next record to read is {start}, but the"
                f" topic now begins at {low}; {low - start:,} records were deleted before they were joined. Keep"
                " records longer, and use a new mesh name to join again from what the topics hold now"
            )
        return start

    def _settle(self, place: Place) -> None:
        """Find the epochs that the partition goes through; it is held while one of them is not known."""
        stream, partition = self.by_topic[place[0]], place[1]
        reading = self.readers[stream].readings[partition]
        found = [
            course.settle((stream, partition), reading)
            for course in self.courses.values()
            if stream in course.streams and (stream, partition) not in course.at
        ]
        (self._held.discard if all(found) else self._held.add)(place)

    def revoked(self, places: Sequence[Place]) -> list[Effect]:
        """These partitions are somebody else's from now on; what was read of them is committed first."""
        effects = self.commit()
        for topic, partition in places:
            stream = self.by_topic[topic]
            for course in self.courses.values():
                course.leave((stream, partition))
            self.readers[stream].forget(partition)
            for known in (self.backlogs, self.tables, self.unread, self._reach, self._ends):
                known.pop((topic, partition), None)
            self._held.discard((topic, partition))
            self._changed.discard((topic, partition))
        return effects

    # -- what was fetched

    def fetched(self, runs: Mapping[Place, Fetched], ends: Mapping[Place, int]) -> list[Effect]:
        """What one fetch brought: records, and where partitions were seen to end. Partitions that are not ours are
        passed over."""
        backlogs = {**self.backlogs, **self.tables}
        for place, end in ends.items():
            if (backlog := backlogs.get(place)) is not None:
                # Offsets before it that held no event are passed too: markers of the producers' transactions.
                backlog.end = backlog.fetched = end
        for place, run in runs.items():
            if (backlog := backlogs.get(place)) is not None:
                backlog.offsets.extend(run.offsets)
                backlog.values.extend(run.values)
                if run.keys and place in self.tables:
                    backlog.keys.update(run.keys)
                backlog.fetched = max(backlog.fetched, run.offsets[-1] + 1)
        effects: list[Effect] = []
        most = self.settings.backlog_most
        for place, backlog in backlogs.items():
            if len(backlog) > most and not backlog.paused:
                backlog.paused = True
                effects.append(Pause([place]))
            elif backlog.paused and len(backlog) < most // 4:
                backlog.paused = False
                effects.append(Resume([place]))
        return effects

    # -- a round

    def round(self, now: float) -> list[Effect]:
        """Read what may go on, and send what comes of it."""
        effects = self._begin()
        frames: Frames = {}
        for place in self.tables:
            if place not in self._held and not self._is_loaded(place):
                self._read_table(place, frames, effects)
        if all(map(self._is_loaded, self.tables)):
            for place in may_go(self.backlogs, self.slack_ms, now):
                if place not in self._held and (count := self._allowed(place)):
                    self._read(place, count, now, frames, effects)
        self._route(frames, effects)
        self.counts["rounds"] += bool(frames)
        if frames:
            self.size.sent()
        self.has_more = bool(frames) and any(map(len, self.backlogs.values()))
        return effects

    def _allowed(self, place: Place) -> int:
        """How many records of a partition this round takes: never more than a restart looks for."""
        offsets, count = self.backlogs[place].offsets, self.size.now
        bound = self.committed[place] + self.settings.ahead_most
        if offsets[min(count, len(offsets)) - 1] < bound:
            return count
        self.wants_commit = True
        if offsets[0] >= bound and (reading := self.reading(place)) is not None:
            reading.next = max(reading.next, bound)  # a hole, which is passed by commits
        return bisect_left(offsets, bound)

    def advance(self, place: Place, count: int, now: float) -> list[Effect]:
        """Read so many records of one partition that were fetched, whatever the others do, or load a table whose cut is
        reached: a round under somebody else's hand."""
        effects = self._begin()
        frames: Frames = {}
        if place in self.tables:
            self._read_table(place, frames, effects)
        elif len(self.backlogs[place]) and place not in self._held:
            self._read(place, count, now, frames, effects)
        self._route(frames, effects)
        return effects

    def _read(self, place: Place, count: int, now: float, frames: Frames, effects: list[Effect]) -> None:
        (topic, partition), backlog = place, self.backlogs[place]
        stream = self.by_topic[topic]
        reader = self.readers[stream]
        if place in self._ends:  # rows of two epochs are never read together
            count = min(count, bisect_left(backlog.offsets, self._ends[place]))
        offsets, values = backlog.take(count)
        read = reader.read(partition, offsets, values)
        backlog.moved_at = now
        reading = reader.readings[partition]
        backlog.time = reading.max_time if reading.max_time != NO_WATERMARK else None
        self._count(stream, topic, partition, values, read, effects)
        frames.setdefault(stream, {})[partition] = read.rows

    def _read_table(self, place: Place, frames: Frames, effects: list[Effect]) -> None:
        """Take what was fetched of a table; gives its rows when its cut is reached."""
        (topic, partition), backlog = place, self.tables[place]
        stream = self.by_topic[topic]
        reader = self.readers[stream]
        assert isinstance(reader, TableReader)
        offsets, values = backlog.take(len(backlog))
        before = bisect_left(offsets, reader.cut[partition])
        if before:
            read = reader.read(partition, offsets[:before], values[:before], backlog.keys)
            self._count(stream, topic, partition, values[:before], read, effects)
        backlog.keys.clear()
        if backlog.fetched >= reader.cut[partition]:
            frames.setdefault(stream, {})[partition] = reader.load(partition)
            effects += self._watch_cut(place, max(backlog.end or 0, backlog.fetched))

    def _count(
        self, stream: str, topic: str, partition: int, values: list[bytes | None], read: Read, effects: list[Effect]
    ) -> None:
        counted = self.per_stream[stream]
        self.counts["events_in"] += len(values)
        counted["events"] += len(values)
        if read.late or read.broken:
            for name, found in (("late", len(read.late)), ("dead", len(read.broken))):
                self.counts[name] += found
                counted[name] += found
            broken = [(offset, b.reason, values[b.index]) for offset, b in read.broken]
            effects.append(SetAside(stream, topic, partition, read.late, broken))

    def _route(self, frames: Frames, effects: list[Effect]) -> None:
        together = {stream: Rows.concat(list(parts.values())) for stream, parts in frames.items()}
        for heralds in (True, False):  # of all streams before the rows of any
            for stream, parts in frames.items():
                reader = self.readers[stream]
                for course in self.courses.values():
                    for epoch, router in course.live(stream):
                        if router.is_herald != heralds:
                            continue
                        rows: Rows | None = together[stream]
                        if course.is_passing:
                            mine = [part for p, part in parts.items() if course.at[stream, p] == epoch]
                            rows = Rows.concat(mine) if mine else None
                        if rows is not None:
                            effects.append(Emit(course.query, router.send(rows, reader)))
        if self._ends:
            effects += self._pass_on()

    # -- tables

    def _is_loaded(self, place: Place) -> bool:
        reader = self.readers[self.by_topic[place[0]]]
        assert isinstance(reader, TableReader)
        return reader.is_loaded(place[1])

    def is_loaded_table(self, place: Place) -> bool:
        return place in self.tables and self._is_loaded(place)

    def ended(self, place: Place, end: int) -> list[Effect]:
        """Where a table's topic ends now, as its broker says."""
        return self._watch_cut(place, end)

    def _watch_cut(self, place: Place, end: int) -> list[Effect]:
        """A loaded table is not read on; what stands behind its cut is said once."""
        if not self.is_loaded_table(place):
            return []
        reader = self.readers[self.by_topic[place[0]]]
        assert isinstance(reader, TableReader)
        self.tables[place].paused = False  # that was for a full backlog, and would be undone
        told = self.unread.get(place, 0)
        self.unread[place] = unread = max(told, end - reader.cut[place[1]])
        effects: list[Effect] = [Pause([place])]
        if unread and not told:
            effects.append(Warn(behind_cut(reader.stream.name, place[1], unread)))
        return effects

    # -- commits

    def commit(self) -> list[Effect]:
        """Tell every channel its positions; when that is delivered, make them durable."""
        effects: list[Effect] = []
        for stream, reader in self.readers.items():
            for course in self.courses.values():
                effects += [Emit(course.query, router.tell_all(reader)) for _, router in course.live(stream)]
        for place in (*self.backlogs, *self.tables):
            stream, partition = self.by_topic[place[0]], place[1]
            reading = self.readers[stream].readings[partition]
            for course in self.courses.values():
                if reading.epochs and course.forget((stream, partition), reading):
                    self._changed.add(place)
        effects += [Flush(), Commit(self._offsets())]
        self.wants_commit = False
        return effects

    def _offsets(self, force: bool = False) -> list[tuple[str, int, int, str]]:
        offsets = []
        for place, committed in self.committed.items():
            reading = self.reading(place)
            if reading is not None and (force or reading.next > committed or place in self._changed):
                offsets.append((*place, reading.next, msgspec.json.encode(reading).decode()))
                self.committed[place] = reading.next
        self._changed.clear()
        return offsets

    def idle(self, now: float) -> list[Effect]:
        """Raise the floor of partitions silent longer than their stream allows; durable before anyone is told.

        Called right after a commit, so that offset, largest time and floor are of one moment.
        """
        active = [
            self.readers[self.by_topic[topic]].watermark(partition)
            for (topic, partition), b in self.backlogs.items()
            if now - b.moved_at < self._idle_after_s(topic)
        ]
        floor = min(active, default=NO_WATERMARK)
        raised = False
        for (topic, partition), backlog in self.backlogs.items():
            reader = self.readers[self.by_topic[topic]]
            silent = backlog.at_end and not len(backlog) and now - backlog.moved_at >= self._idle_after_s(topic)
            if silent and floor > reader.watermark(partition):
                reader.readings[partition].floor = floor
                raised = True
        return [Commit(self._offsets(force=True), is_floor=True)] if raised else []

    def _idle_after_s(self, topic: str) -> float:
        idle = self.readers[self.by_topic[topic]].stream.idle_after_ms
        return idle / 1000 if idle is not None else float("inf")

    # -- epochs

    def change_plan(self, published: PlanPublished, plan: Plan) -> list[Effect]:
        """Begin a new epoch of a query: at each partition's next offset, or behind what an earlier process may have
        sent of it. An epoch that is not newer than what is known changes nothing."""
        course = self.courses[published.query]
        if published.epoch <= course.newest:
            return []
        missing = {source.stream for source in plan.query.sources} - self.readers.keys()
        if missing:
            raise StateError(
                f"query {published.query}: its new plan reads {', '.join(sorted(missing))}; starting again"
            )
        course.add(published, plan)
        self._measure()
        for place in sorted(self._held):
            self._settle(place)
        self._unbegun = True
        return self._begin()

    def _begin(self) -> list[Effect]:
        """Begin what plans ask for and readings lack: announced, then durable, then barriers; then rows go by it."""
        if not self._unbegun:
            return self._skip_to_ends()
        self._unbegun = False
        effects: list[Effect] = []
        for course in self.courses.values():
            begun: set[int] = set()
            for (stream, partition), _ in list(course.at.items()):
                reader = self.readers[stream]
                reading = reader.readings[partition]
                if lacking := course.lacking((stream, partition), reading):
                    place = (reader.stream.topic, partition)
                    course.begin((stream, partition), reading, lacking, max(reading.next, self._reach[place]))
                    self._changed.add(place)
                    begun.update(lacking)
            effects += [Emit(course.query, course.announcements(epoch)) for epoch in sorted(begun)]
        if effects:
            effects += self.commit()
        return [*effects, *self._pass_on(), *self._skip_to_ends()]

    def _skip_to_ends(self) -> list[Effect]:
        """Pass on partitions that have no record left before the end of their epoch."""
        effects: list[Effect] = []
        if not self._ends:
            return effects
        moving = self.backlogs.keys() - self._held
        while reached := [p for p, end in self._ends.items() if p in moving and self.backlogs[p].first >= end]:
            for topic, partition in reached:
                self.readers[self.by_topic[topic]].readings[partition].next = self._ends[topic, partition]
            effects += self._pass_on()
        return effects

    def _pass_on(self) -> list[Effect]:
        """Barriers of partitions that have reached the end of their epoch, which go through the next from now on."""
        passed = [(course.query, course.passing(self.readers)) for course in self.courses.values()]
        self._ends = {}
        for course in self.courses.values():
            for (stream, partition), _ in course.at.items():
                reader = self.readers[stream]
                end = course.end((stream, partition), reader.readings[partition])
                if end is not None:
                    place = (reader.stream.topic, partition)
                    self._ends[place] = min(end, self._ends.get(place, end))
        return [Emit(query, sends) for query, sends in passed if sends]
