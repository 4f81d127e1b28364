"""From a sequence to Kafka messages, a slice at a time: columns, then JSON lines, then the broken ones.

Invariant: a record that is not marked broken decodes to exactly the stream's fields and types; one that is marked
cannot be decoded, in one of four ways in turn (cut JSON, wrong type, no event time, empty value).
"""

import zlib
from typing import Any

import numpy as np
import polars as pl

from schemas.mesh import FieldType, Stream
from services.generator.sequence import Sequence
from services.generator.workload import Domain, Shape, Workload

_WORDS = {
    "country": ("DE", "FR", "US", "JP", "BR", "IN"),
    "carrier": ("dhl", "ups", "fedex", "gls"),
    "currency": ("EUR", "USD", "JPY"),
    "method": ("card", "transfer", "cash"),
    "status": ("new", "open", "done"),
}
Message = tuple[int, dict[str, Any]]  # partition, and what the producer takes


class Encoder:
    """Encodes one stream. Values of plain fields come from a generator of random numbers of their own, in order of the
    slices."""

    def __init__(self, stream: Stream, domains: dict[str, Domain], shape: Shape, work: Workload) -> None:
        self.stream, self.domains, self.shape, self.work = stream, domains, shape, work
        self.key_field = next(iter(domains), None)
        self.rng = np.random.default_rng([work.seed, zlib.crc32(stream.name.encode()), 1])

    def messages(self, rows: Sequence, begin: int, end: int) -> list[Message]:
        part = slice(begin, end)
        n = len(rows.ts[part])
        frame = self._nulls(
            pl.DataFrame({name: self._column(name, rows, part, n) for name in self.stream.fields}), rows.null[part]
        )
        lines = frame.write_ndjson().encode().split(b"\n")[:n]
        keys: list[str | None]
        keys = frame[self.key_field].cast(pl.String).to_list() if self.key_field else [None] * n
        broken = np.flatnonzero(rows.broken[part]).tolist()
        for turn, i in enumerate(broken):
            lines[i] = self._break(lines[i], turn + begin)
        partitions = rows.partition[part].tolist()
        return [(p, {"value": line, "key": key}) for line, key, p in zip(lines, keys, partitions, strict=True)]

    def _column(self, name: str, rows: Sequence, part: slice, n: int) -> pl.Series:
        kind = self.stream.fields[name]
        if name == self.stream.event_time:
            return pl.Series(name, rows.ts[part])
        if name in self.domains:
            return self._key(name, kind, self.domains[name], rows.keys[self.domains[name].number][part])
        constants = self.shape.constants.get((self.stream.name, name), ())
        numbers = [abs(c) for c in constants if isinstance(c, int | float)]
        top = 2 * max(numbers, default=0) or 100  # around what the queries compare with, so that selections select
        match kind:
            case FieldType.INT64:
                return pl.Series(name, self.rng.integers(0, int(top) + 1, n))
            case FieldType.FLOAT64:
                return pl.Series(name, np.round(self.rng.random(n) * top, 2))
            case FieldType.BOOL:
                return pl.Series(name, self.rng.random(n) < 0.5)
            case FieldType.TIMESTAMP:
                return pl.Series(name, rows.ts[part] - self.rng.integers(0, 60_000, n))
            case FieldType.STRING:
                words = _WORDS.get(name, tuple(f"{name}-{i}" for i in range(8)))
                words = tuple(dict.fromkeys(words + tuple(c for c in constants if isinstance(c, str))))
                return pl.Series(
                    name, np.array(words, dtype=object)[self.rng.integers(0, len(words), n)], dtype=pl.String
                )

    def _key(self, name: str, kind: FieldType, domain: Domain, index: np.ndarray[Any, np.dtype[np.int64]]) -> pl.Series:
        series = pl.Series(name, index)
        if kind is FieldType.STRING:
            return series.cast(pl.String)
        if kind is FieldType.BOOL:
            return series % 2 == 0
        if domain.kind == "time":
            series = self.work.start_ms + series * 1000
        elif domain.kind == "bool":
            series = series % 2
        return series.cast(pl.Float64) if kind is FieldType.FLOAT64 else series

    def _nulls(self, frame: pl.DataFrame, null: np.ndarray[Any, np.dtype[np.bool_]]) -> pl.DataFrame:
        """Each chosen event loses one field, keys included, the event time never."""
        names = [name for name in frame.columns if name != self.stream.event_time]
        if not names or not null.any():
            return frame
        which = pl.Series(np.where(null, self.rng.integers(0, len(names), len(null)), -1))
        return frame.with_columns(pl.when(which != i).then(pl.col(name)).alias(name) for i, name in enumerate(names))

    def _break(self, line: bytes, turn: int) -> bytes:
        match turn % 4:
            case 0:
                return line[: len(line) // 2]
            case 1:
                return _replace(line, self.key_field or self.stream.event_time, self._wrong_type())
            case 2:
                return _replace(line, self.stream.event_time, None)
            case _:
                return b""

    def _wrong_type(self) -> object:
        kind = self.stream.fields[self.key_field or self.stream.event_time]
        return 17 if kind is FieldType.STRING else "seventeen"


def _replace(line: bytes, field: str, value: object) -> bytes:
    import msgspec

    record = msgspec.json.decode(line)
    record.pop(field, None)
    return msgspec.json.encode(record if value is None else {**record, field: value})
