"""What an audit says: counts, samples and digests of one query, and of the streams it reads. Plain values, no Spark.

Invariant: `passed` is true iff the results topic holds exactly the expected rows and the late and dead topics name
exactly the events that the log says are late or broken.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

SAMPLES = 20


@dataclass(frozen=True)
class Interval:
    """Results whose time lies in [start, start + width)."""

    start_ms: int
    expected: int
    right: int
    missing: int
    wrong: int
    extra: int

    @property
    def recall(self) -> float | None:
        return self.right / self.expected if self.expected else None


@dataclass(frozen=True)
class StreamVerdict:
    """The events of one stream within the cut, and whether the late and dead topics name the right ones."""

    stream: str
    topic: str
    records: int
    usable: int
    late: int
    idle: int
    broken: int
    late_missing: int = 0  # late by the log, not in the late topic
    late_unexpected: int = 0  # in the late topic, not late by the log
    dead_missing: int = 0  # broken, not in the dead topic
    dead_unexpected: int = 0  # in the dead topic, not broken
    reasons: dict[str, int] = field(default_factory=dict)  # why records are broken
    samples: dict[str, list[str]] = field(default_factory=dict)

    @property
    def differences(self) -> dict[str, int]:
        return {
            "late events missing": self.late_missing,
            "late events unexpected": self.late_unexpected,
            "dead letters missing": self.dead_missing,
            "dead letters unexpected": self.dead_unexpected,
        }


@dataclass(frozen=True)
class Verdict:
    query: str
    text: str
    expected: int
    found: int  # records in the results topic, repeats included, results outside the cut not
    missing: int
    extra: int
    duplicate: int
    wrong: int
    outside: int  # results with an event outside the cut: not judged
    wrong_columns: dict[str, int]
    interval_ms: int
    intervals: tuple[Interval, ...]
    digest_expected: str
    digest_found: str
    streams: tuple[StreamVerdict, ...]
    samples: dict[str, list[dict[str, Any]]]
    seconds: float

    @property
    def differences(self) -> dict[str, int]:
        """Every kind of difference that was met, with its count."""
        own = {"missing": self.missing, "extra": self.extra, "duplicate": self.duplicate, "wrong value": self.wrong}
        own |= {f"{s.stream}: {kind}": count for s in self.streams for kind, count in s.differences.items()}
        return {kind: count for kind, count in own.items() if count}

    @property
    def passed(self) -> bool:
        return not self.differences and self.digest_expected == self.digest_found

    @property
    def recall(self) -> float:
        """The share of expected results that are there and right; 1 when none is expected."""
        return (self.expected - self.missing - self.wrong) / self.expected if self.expected else 1.0

    def as_json(self) -> dict[str, Any]:
        return {"passed": self.passed, "recall": self.recall, "differences": self.differences, **asdict(self)}
