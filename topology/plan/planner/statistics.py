"""What is known about the streams when a query is planned: how fast events come and how many different values a field
takes.

Invariant: statistics steer the choice of a plan and nothing else; with wrong ones the result set is the same. What is
not known is filled in by a documented guess, so that half-known streams can be planned too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean

GUESSED_RATE_PER_S = 1_000.0
GUESSED_TABLE_ROWS = 10_000.0


@dataclass(frozen=True)
class Statistics:
    rates: Mapping[str, float] = field(default_factory=dict)  # stream -> events per second
    distinct: Mapping[str, float] = field(default_factory=dict)  # "stream.field" -> number of different values

    def __post_init__(self) -> None:
        for name, rate in self.rates.items():
            if not rate >= 0:
                raise ValueError(f"the rate of {name} is {rate}; it must be zero or more events per second")
        for name, count in self.distinct.items():
            if not count > 0:
                raise ValueError(f"{name} has {count} distinct values; it must be more than zero")

    def rate(self, stream: str) -> float:
        """Events per second; for an unknown stream the mean of the known ones.

        >>> Statistics(rates={"a": 10, "b": 30}).rate("c")
        20.0
        """
        known = self.rates.get(stream)
        return known if known is not None else fmean(self.rates.values()) if self.rates else GUESSED_RATE_PER_S

    def table_rows(self, table: str, key: str) -> float:
        """Rows of a static table: as many as its key has values."""
        return max(1.0, self.distinct.get(f"{table}.{key}", GUESSED_TABLE_ROWS))

    def distinct_values(self, stream: str, name: str, window_ms: int) -> float:
        """Different values of a field; for an unknown one, every event of a window has its own, as ids do."""
        known = self.distinct.get(f"{stream}.{name}")
        return max(1.0, known if known is not None else self.rate(stream) * window_ms / 1_000)
