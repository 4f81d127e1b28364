"""What ingest says of itself: how much there is to read, the time it has reached, what it sent, what is wrong.

Invariant: nothing here changes anything.
"""

from schemas.block import NO_WATERMARK
from topology.ingest.effects import Place
from topology.ingest.ingest import Ingestion
from topology.ingest.table import TableReader, behind_cut


def lag(ingestion: Ingestion, place: Place, high: int, quiet: bool) -> int:
    """How many records wait in a partition whose topic ends at `high`; `quiet`: its broker was asked for that now."""
    backlog = {**ingestion.backlogs, **ingestion.tables}[place]
    reading = ingestion.reading(place)
    if high < 0 or reading is None or (backlog.at_end and not len(backlog) and not quiet):
        return 0
    # Offsets up to `fetched` are known, also those that hold no event (markers of transactions).
    return max(0, high - max(reading.next, backlog.fetched)) if quiet else max(1, high - reading.next)


def watermark(ingestion: Ingestion) -> int | None:
    """The time that every stream has reached."""
    found = [
        min((r.watermark(p) for p in range(r.partitions)), default=NO_WATERMARK)
        for r in ingestion.readers.values()
        if not isinstance(r, TableReader)
    ]
    low = min(found, default=NO_WATERMARK)
    return low if low != NO_WATERMARK else None


def sent(ingestion: Ingestion) -> dict[str, int]:
    """Rows sent and left out so far, over all queries."""
    counted = [course.counted() for course in ingestion.courses.values()]
    return {name: sum(c[name] for c in counted) for name in ("rows_out", "null_keys", "filtered")}


def alarms(ingestion: Ingestion, now: float) -> list[str]:
    """What somebody should look at."""
    backlogs, by_topic = ingestion.backlogs, ingestion.by_topic
    found = [behind_cut(by_topic[topic], partition, n) for (topic, partition), n in ingestion.unread.items() if n]
    newest = max((b.time for b in backlogs.values() if b.time is not None), default=None)
    for (topic, partition), backlog in backlogs.items():
        silent_s, stream = now - backlog.moved_at, ingestion.readers[by_topic[topic]].stream
        if newest is None or silent_s < ingestion.settings.silent_s or stream.idle_after_ms is not None:
            continue
        told = f"stream {stream.name} partition {partition}"
        grows = "state grows; send it events or set idle_after on the stream"
        if backlog.time is None:
            found.append(f"{told} has never had an event and holds the watermark: {grows}")
        elif newest - backlog.time > ingestion.longest_ms:
            found.append(f"{told} is silent since {silent_s:.0f} s and holds the watermark: {grows}")
    return found
