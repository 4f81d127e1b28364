"""How much ingest takes and sends at a time.

Invariant: settings change when and in which pieces rows leave, never which rows.
"""

from dataclasses import dataclass

from schemas.block import MAX_BLOCK_BYTES


@dataclass(frozen=True)
class IngestSettings:
    per_partition: int = 4_000  # records of one partition a round, so that streams advance together
    per_partition_least: int = 250  # when receivers are slow: what is sent in one round cannot be called back
    block_bytes: int = MAX_BLOCK_BYTES  # what blocks are cut to
    backlog_most: int = 40_000  # fetched and waiting, per partition, before its fetching is paused
    ahead_most: int = 200_000  # offsets of one partition that are sent and not committed: where a restart may find rows
    silent_s: float = 30.0  # after which a partition that holds the watermark is an alarm


class RoundSize:
    """How many records of one partition a round takes: fewer the slower receivers that want short queues are. Half as
    many each time they have no room, a quarter more after each round that was sent."""

    def __init__(self, settings: IngestSettings, waits: bool) -> None:
        self.most, self.least = settings.per_partition, min(settings.per_partition, settings.per_partition_least)
        self.now = self.least if waits else self.most
        self._had_room = True

    def room(self, has_room: bool) -> bool:
        """Whether receivers have room now."""
        if self._had_room and not has_room:
            self.now = max(self.least, self.now // 2)
        self._had_room = has_room
        return has_room

    def sent(self) -> None:
        self.now = min(self.most, self.now + self.now // 4)
