"""Source records into columns: which records are events, and what is wrong with the others.

Invariant: whether a record is an event or broken is a function of its bytes and the stream's declaration alone
(docs/events.md), never of the query, the batch it came in or the records around it. The audit has its own reader of the
same rules.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from typing import Annotated, Any

import msgspec
import numpy as np
import pyarrow as pa

from schemas.mesh import FieldType, Stream
from schemas.rows import Column, Rows, as_column
from topology.state.types import ARROW_TYPES, MAX_TIME_MS, MIN_TIME_MS

MAX_EVENT_BYTES = 1_048_576
_NUMPY_TYPES: dict[FieldType, Any] = {
    FieldType.INT64: np.int64,
    FieldType.TIMESTAMP: np.int64,
    FieldType.FLOAT64: np.float64,
    FieldType.BOOL: np.bool_,
}
FEW = 16  # rows: so few become columns faster without Arrow
_INT64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_TYPES: dict[FieldType, Any] = {
    FieldType.INT64: _INT64,
    FieldType.TIMESTAMP: _INT64 | str,
    FieldType.FLOAT64: float,
    FieldType.BOOL: bool,
    FieldType.STRING: str,
}
_EVENT_TIME = Annotated[int, msgspec.Meta(ge=MIN_TIME_MS, le=MAX_TIME_MS)]
_RFC3339 = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[Tt ](\d\d):(\d\d):(\d\d)(?:\.(\d+))?(?:[Zz]|([+-])(\d\d):(\d\d))\Z", re.ASCII
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Broken:
    index: int  # place in the batch
    reason: str


@dataclass(frozen=True)
class Decoded:
    rows: Rows  # one column per declared field
    kept: list[int] | None  # index in the batch of each row; None if every record is a row
    broken: list[Broken]


class Decoder:
    """Decodes batches of one stream's record values."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.names = list(stream.fields)
        self._places = {name: f"f{i}" for i, name in enumerate(self.names)}
        self._getters = {name: attrgetter(place) for name, place in self._places.items()}
        self._columns = [
            (name, self._getters[name], kind is FieldType.TIMESTAMP, _NUMPY_TYPES.get(kind), ARROW_TYPES[kind])
            for name, kind in stream.fields.items()
        ]
        self._times = [n for n, t in stream.fields.items() if t is FieldType.TIMESTAMP]
        self._decode: Callable[[bytes], Any] = msgspec.json.Decoder(self._struct()).decode

    def _struct(self) -> type[msgspec.Struct]:
        optional: list[tuple[str, Any, Any]] = []
        for name, kind in self.stream.fields.items():
            if name != self.stream.needed:
                optional.append((self._places[name], _TYPES[kind] | None, None))
        kind = self.stream.fields[self.stream.needed]
        when = _TYPES[kind] if self.stream.table else _EVENT_TIME if kind is FieldType.INT64 else _EVENT_TIME | str
        fields: list[Any] = [(self._places[self.stream.needed], when), *optional]
        names = {place: name for name, place in self._places.items()}
        return msgspec.defstruct("Event", fields, rename=names, gc=False)

    def decode(self, values: Sequence[bytes | None]) -> Decoded:
        decode = self._decode
        try:
            rows = [decode(value) for value in values]  # type: ignore[arg-type]
            together = b"".join(values)  # type: ignore[arg-type]
            if max(map(len, values)) > MAX_EVENT_BYTES or not (together.isascii() or _is_utf8(together)):  # type: ignore[arg-type]
                raise ValueError
            return Decoded(self._frame(rows), None, [])
        except (msgspec.MsgspecError, UnicodeDecodeError, TypeError, ValueError, RecursionError):
            return self._one_by_one(values)

    def _one_by_one(self, values: Sequence[bytes | None]) -> Decoded:
        rows: list[Any] = []
        kept: list[int] = []
        broken: list[Broken] = []
        times = [self._getters[name] for name in self._times]
        for index, value in enumerate(values):
            try:
                if not value:
                    raise ValueError("the value is empty")
                if len(value) > MAX_EVENT_BYTES:
                    raise ValueError(f"the value has {len(value):,} bytes; at most {MAX_EVENT_BYTES:,} are read")
                row = self._decode(value)
                value.decode()  # fields that are not declared are skipped by the decoder, whatever bytes they hold
                for get in times:
                    parse_time(get(row))
                if self.stream.event_time:
                    when = parse_time(self._getters[self.stream.event_time](row))
                    if when is None or not MIN_TIME_MS <= when <= MAX_TIME_MS:
                        raise ValueError(f"event time {when} is out of range")
            except UnicodeDecodeError:
                broken.append(Broken(index, "text is not UTF-8"))
            except RecursionError:
                broken.append(Broken(index, "JSON is malformed: nested too deeply"))
            except (msgspec.MsgspecError, ValueError) as error:
                broken.append(Broken(index, str(error)))
            else:
                rows.append(row)
                kept.append(index)
        return Decoded(self._frame(rows), kept, broken)

    def _frame(self, rows: list[Any]) -> Rows:
        columns: dict[str, Column] = {}
        few = 0 < len(rows) <= FEW
        for name, get, is_time, plain, arrow in self._columns:
            column = list(map(get, rows))
            if is_time and str in map(type, column):
                column = [parse_time(value) for value in column]
                if name == self.stream.event_time and not all(MIN_TIME_MS <= t <= MAX_TIME_MS for t in column):
                    raise ValueError("event time out of range")
            if plain is None:
                columns[name] = pa.array(column, arrow)
            elif few and None not in column:
                columns[name] = np.array(column, plain)
            else:
                columns[name] = as_column(pa.array(column, arrow))
        return Rows(columns, len(rows))


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def parse_time(value: int | str | None) -> int | None:
    """Epoch milliseconds of a timestamp field: an integer as it is, RFC 3339 text with an offset, floored to
    milliseconds.

    >>> parse_time("1970-01-01T00:00:01.0019Z"), parse_time("1970-01-01 02:00:00+02:00"), parse_time(7)
    (1001, 0, 7)
    """
    if not isinstance(value, str):
        return value
    match = _RFC3339.match(value)
    if match is None:
        raise ValueError(f"{value!r} is not an RFC 3339 time with an offset, such as 2024-05-01T10:00:00.123Z")
    *parts, fraction, sign, hours, minutes = match.groups()
    moment = datetime(*map(int, parts), tzinfo=UTC)  # type: ignore[misc, arg-type]
    if sign:
        if int(hours) > 23 or int(minutes) > 59:
            raise ValueError(f"{value!r} has an offset out of range")
        offset = timedelta(hours=int(hours), minutes=int(minutes))
        seconds = (moment - _EPOCH) + (-offset if sign == "+" else offset)
    else:
        seconds = moment - _EPOCH
    whole = seconds.days * 86_400_000 + seconds.seconds * 1000
    return whole + (int(fraction[:3].ljust(3, "0")) if fraction else 0)
