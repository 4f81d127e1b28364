"""Bytes of a record to typed values, strictly, with nothing but Python's own json. Written from the specification, not
from the engine.

Invariant: a record either decodes to exactly one row or is broken with one reason; nothing is repaired or guessed.
"""

import datetime
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

Value = int | float | str | bool | None

MAX_EVENT_BYTES = 1_048_576
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
EVENT_TIME_MIN, EVENT_TIME_MAX = 1, 253_402_300_799_999  # up to the last millisecond of the year 9999

_EPOCH_DAY = datetime.date(1970, 1, 1).toordinal()
_RFC3339 = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})[Tt"
    r" ]([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.([0-9]+))?(?:[Zz]|([+-])([0-9]{2}):([0-9]{2}))"
)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)


class Broken(ValueError):
    """Why a record cannot be used."""


class _Object(list):  # type: ignore[type-arg]
    """A JSON object as its (key, value) pairs: a dict would hide a repeated key, a plain list is a JSON array."""


def _constant(text: str) -> Any:
    raise Broken(f"{text} is not JSON")


def _integer(text: str) -> int | float:
    return (
        int(text) if len(text) < 4000 else float(text)
    )  # Python refuses to parse longer integers; far outside int64 anyway


class _Json(json.JSONDecoder):
    def __init__(self) -> None:
        super().__init__(object_pairs_hook=_Object, parse_constant=_constant, parse_int=_integer)

    def __reduce__(self) -> tuple[type["_Json"], tuple[()]]:
        return _Json, ()  # its scanner is C and cannot travel to a worker; a fresh one is the same


_JSON = _Json()


def parse_object(value: bytes | None) -> list[tuple[str, Any]]:
    """The pairs of the one JSON object that the bytes hold."""
    if not value:
        raise Broken("empty value")
    if len(value) > MAX_EVENT_BYTES:
        raise Broken("larger than 1 MiB")
    try:
        text = value.decode("utf-8")
    except UnicodeDecodeError:
        raise Broken("not UTF-8") from None
    try:
        document = _JSON.decode(text)
    except Broken:
        raise
    except (ValueError, RecursionError):
        raise Broken("not JSON") from None
    if type(document) is not _Object:
        raise Broken("not a JSON object")
    if "\\u" in text:
        _check_surrogates(text)
    return document


def _check_surrogates(text: str) -> None:
    """Half of a surrogate pair is no character. In valid JSON a backslash stands only inside strings, so escapes can be
    walked."""
    high_ends = -1  # where an unpaired high surrogate ended
    for match in _ESCAPE.finditer(text):
        code = int(match[1], 16) if match[1] else 0
        if high_ends >= 0 and not (0xDC00 <= code <= 0xDFFF and match.start() == high_ends):
            raise Broken("lone surrogate")
        if 0xDC00 <= code <= 0xDFFF and high_ends < 0:
            raise Broken("lone surrogate")
        high_ends = match.end() if 0xD800 <= code <= 0xDBFF else -1
    if high_ends >= 0:
        raise Broken("lone surrogate")


def to_int64(value: Any) -> int:
    if type(value) is not int or not INT64_MIN <= value <= INT64_MAX:
        raise Broken("not an int64")
    return value


def to_float64(value: Any) -> float:
    if type(value) is int:
        try:
            value = float(value)
        except OverflowError:
            raise Broken("not a finite float64") from None
    if type(value) is not float or not math.isfinite(value):
        raise Broken("not a finite float64")
    return value


def to_bool(value: Any) -> bool:
    if type(value) is not bool:
        raise Broken("not a bool")
    return value


def to_string(value: Any) -> str:
    if type(value) is not str:
        raise Broken("not a string")
    return value


def to_timestamp(value: Any) -> int:
    """Epoch milliseconds, from an integer or from RFC 3339 text; a finer fraction is cut, which is the floor.

    >>> to_timestamp("1970-01-01T01:00:00.0019+01:00"), to_timestamp("1969-12-31 23:59:59.9999z"), to_timestamp(7)
    (1, -1, 7)
    """
    if type(value) is not str:
        return to_int64(value)
    match = _RFC3339.fullmatch(value)
    if match is None:
        raise Broken("not a timestamp")
    year, month, day, hour, minute, second = (int(part) for part in match.groups()[:6])
    fraction, sign, ahead_hours, ahead_minutes = match.groups()[6:]
    ahead = int(ahead_hours or 0) * 60 + int(ahead_minutes or 0)
    if hour > 23 or minute > 59 or second > 59 or int(ahead_hours or 0) > 23 or int(ahead_minutes or 0) > 59:
        raise Broken("not a timestamp")
    try:
        days = datetime.date(year, month, day).toordinal() - _EPOCH_DAY
    except ValueError:
        raise Broken("not a timestamp") from None
    minutes = (days * 24 + hour) * 60 + minute - (-ahead if sign == "-" else ahead)
    return (minutes * 60 + second) * 1000 + int(((fraction or "") + "000")[:3])


CONVERT: dict[str, Callable[[Any], Value]] = {
    "int64": to_int64,
    "float64": to_float64,
    "bool": to_bool,
    "string": to_string,
    "timestamp": to_timestamp,
}


def table_decoder(
    fields: Mapping[str, str], key: str
) -> Callable[[bytes | None, bytes | None], tuple[bool, list[Value]]]:
    """A function from a record's key and value to (whether it is a row, the declared fields in order); it raises
    Broken.

    A record without a value deletes the table's key that its own key names: the text itself, or the digits of an int64.
    """
    place = {name: (i, CONVERT[kind]) for i, (name, kind) in enumerate(fields.items())}
    at, is_text = list(fields).index(key), fields[key] == "string"

    def deleted(name: bytes | None) -> Value:
        try:
            text = None if name is None else name.decode("utf-8")
        except UnicodeDecodeError:
            text = None
        if text is None:
            raise Broken("a deletion without a key")
        if is_text:
            return text
        if not re.fullmatch(r"-?(0|[1-9][0-9]{0,18})", text) or not INT64_MIN <= int(text) <= INT64_MAX:
            raise Broken("a deletion whose key is not an int64")
        return int(text)

    def decode(name: bytes | None, value: bytes | None) -> tuple[bool, list[Value]]:
        row: list[Value] = [None] * len(fields)
        if value is None:
            row[at] = deleted(name)
            return False, row
        for field, raw in parse_object(value):
            if field in place:
                i, convert = place[field]
                if raw is None and i == at:
                    raise Broken(f"{field}: the table's key is null")
                try:
                    row[i] = None if raw is None else convert(raw)
                except Broken as error:
                    raise Broken(f"{field}: {error}") from None
        if row[at] is None:
            raise Broken(f"{key}: the table's key is missing")
        return True, row

    return decode


def event_decoder(fields: Mapping[str, str], event_time: str) -> Callable[[bytes | None], tuple[int, list[Value]]]:
    """A function from a record's value to (event time, the declared fields in order); it raises Broken."""
    place = {name: (i, CONVERT[kind]) for i, (name, kind) in enumerate(fields.items())}
    at, width = list(fields).index(event_time), len(fields)

    def decode(value: bytes | None) -> tuple[int, list[Value]]:
        row: list[Value] = [None] * width
        for key, raw in parse_object(value):  # a repeated key: each must fit, the last one counts
            found = place.get(key)
            if found is None:
                continue
            i, convert = found
            if raw is None:
                if i == at:
                    raise Broken(f"{key}: event time is null")
                row[i] = None
                continue
            try:
                row[i] = converted = convert(raw)
            except Broken as error:
                raise Broken(f"{key}: {error}") from None
            if i == at and isinstance(raw, int) and not EVENT_TIME_MIN <= cast(int, converted) <= EVENT_TIME_MAX:
                raise Broken(f"{key}: event time is out of range")
        ts = row[at]
        if ts is None:
            raise Broken(f"{event_time}: event time is missing")
        assert isinstance(ts, int)
        if not EVENT_TIME_MIN <= ts <= EVENT_TIME_MAX:
            raise Broken(f"{event_time}: event time is out of range")
        return ts, row

    return decode
