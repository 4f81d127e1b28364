"""What Spark's Python workers do with Arrow batches of Kafka records: events, results and notices to typed columns.

Invariant: one row in, one row out, in the same order; what cannot be read is marked, never dropped. Lateness is decided
here, because it is a function of a partition's rows in offset order and of nothing else.

Functions of this file and of `decode` travel to the workers by value (`session.ship`), so a cluster's workers need
nothing of ours installed, only pyarrow.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from services.audit.decode import CONVERT, Broken, Value, event_decoder, parse_object, table_decoder

OK, LATE, BROKEN = "ok", "late", "broken"
# of a table: a record that takes its key away, and one with a later of its key
DELETED = "deleted"
REPLACED = "replaced"
ARROW: dict[str, pa.DataType] = {
    "int64": pa.int64(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
    "string": pa.string(),
    "timestamp": pa.int64(),
}
Batches = Iterator["pa.RecordBatch"]


def _forget_jars() -> None:
    """Spark has its own jar on a worker's import path, whose index is read anew for every task; no Python is in it."""
    sys.path[:] = [entry for entry in sys.path if not entry.endswith(".jar")]
    for entry in [entry for entry in sys.path_importer_cache if entry.endswith(".jar")]:
        del sys.path_importer_cache[entry]


def _transposed(rows: Sequence[Sequence[Any]], width: int) -> list[tuple[Any, ...]]:
    return list(zip(*rows, strict=True)) if rows else [() for _ in range(width)]


def _schema(head: dict[str, pa.DataType], fields: Mapping[str, str]) -> pa.Schema:
    return pa.schema([*head.items(), *((name, ARROW[kind]) for name, kind in fields.items())])


def event_mapper(fields: Mapping[str, str], event_time: str, lateness_ms: int) -> Callable[[Batches], Batches]:
    """Spark batches of (partition, offset, value) to (#partition, #offset, #ts, #status, #reason, fields…).

    A task reads whole source partitions in offset order, so the largest earlier ts is known when a row is met.
    """
    schema = _schema(
        {
            "#partition": pa.int32(),
            "#offset": pa.int64(),
            "#ts": pa.int64(),
            "#status": pa.string(),
            "#reason": pa.string(),
        },
        fields,
    )
    width = len(fields)
    nothing: list[Value] = [None] * width

    def run(batches: Batches) -> Batches:
        _forget_jars()
        decode = event_decoder(fields, event_time)
        newest: dict[int, int] = {}
        last: dict[int, int] = {}
        for batch in batches:
            columns: list[list[Any]] = [column.to_pylist() for column in batch.columns]
            partitions, offsets, values = columns
            marks: list[tuple[int | None, str, str | None]] = []  # ts, status, reason
            rows: list[list[Value]] = []
            for partition, offset, value in zip(partitions, offsets, values, strict=True):
                if offset <= last.get(partition, -1):
                    raise AssertionError(f"partition {partition} was not read in offset order")
                last[partition] = offset
                try:
                    ts, row = decode(value)
                except Broken as error:
                    marks.append((None, BROKEN, str(error)))
                    rows.append(nothing)
                    continue
                largest = newest.get(partition, ts)
                marks.append((ts, LATE if ts < largest - lateness_ms else OK, None))
                rows.append(row)
                newest[partition] = max(largest, ts)
            data: list[Any] = [partitions, offsets, *_transposed(marks, 3), *_transposed(rows, width)]
            arrays = [pa.array(column, kind) for column, kind in zip(data, schema.types, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    return run


def table_mapper(fields: Mapping[str, str], key: str) -> Callable[[Batches], Batches]:
    """Spark batches of (partition, offset, key, value) of a static table to the columns of `event_mapper`; which row is
    a key's last is found later."""
    schema = _schema(
        {
            "#partition": pa.int32(),
            "#offset": pa.int64(),
            "#ts": pa.int64(),
            "#status": pa.string(),
            "#reason": pa.string(),
        },
        fields,
    )

    def run(batches: Batches) -> Batches:
        _forget_jars()
        decode = table_decoder(fields, key)
        for batch in batches:
            partitions, offsets, names, values = (column.to_pylist() for column in batch.columns)
            marks: list[tuple[None, str, str | None]] = []
            rows: list[list[Value]] = []
            for name, value in zip(names, values, strict=True):
                try:
                    there, row = decode(name, value)
                    marks.append((None, OK if there else DELETED, None))
                except Broken as error:
                    row = [None] * len(fields)
                    marks.append((None, BROKEN, str(error)))
                rows.append(row)
            data: list[Any] = [partitions, offsets, *_transposed(marks, 3), *_transposed(rows, len(fields))]
            arrays = [pa.array(column, kind) for column, kind in zip(data, schema.types, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    return run


Cut = Mapping[str, Mapping[int, tuple[int, int]]]  # stream -> partition -> [from, to) in offsets


def inside_cut(id: str, streams: tuple[str, ...], cut: Cut) -> bool:
    """False when a well-formed result id names an event outside the cut: of such a result this audit has no opinion.

    >>> cut = {"a": {0: (0, 5)}, "b": {0: (0, 5)}}
    >>> [inside_cut(id, ("a", "b"), cut) for id in ("a:0:4|b:0:1", "a:0:4|b:0:5", "nonsense", "a:0:x|b:0:9")]
    [True, False, True, True]
    """
    parts = id.split("|")
    if len(parts) != len(streams):
        return True
    inside = True
    for part, stream in zip(parts, streams, strict=True):
        name, _, rest = part.partition(":")
        partition, _, offset = rest.partition(":")
        if name != stream or not (
            partition.isdecimal() and partition.isascii() and offset.isdecimal() and offset.isascii()
        ):
            return True  # not an id of this query at all: it must be judged, as extra
        begin, end = cut[stream].get(int(partition), (0, -1))
        inside = inside and (end < 0 or begin <= int(offset) < end)
    return inside


def result_mapper(columns: Mapping[str, str], streams: tuple[str, ...], cut: Cut) -> Callable[[Batches], Batches]:
    """Spark batches of (key, value, time) to (#id, #time, #problem, #inside, columns…). A value that does not decode is
    a #problem."""
    schema = _schema({"#id": pa.string(), "#time": pa.int64(), "#problem": pa.string(), "#inside": pa.bool_()}, columns)
    place = {name: (i, CONVERT[kind]) for i, (name, kind) in enumerate(columns.items())}

    def decode(value: bytes | None) -> tuple[list[Value], str | None]:
        row: list[Value] = [None] * len(columns)
        try:
            pairs = parse_object(value)
        except Broken as error:
            return row, str(error)
        seen: set[str] = set()
        for key, raw in pairs:
            if key not in place:
                return row, f"column {key} was not asked for"
            if key in seen:
                return row, f"column {key} stands twice"
            seen.add(key)
            i, convert = place[key]
            try:
                row[i] = None if raw is None else convert(raw)
            except Broken as error:
                return row, f"{key}: {error}"
        missing = [name for name in columns if name not in seen]
        return row, f"column {missing[0]} is not there" if missing else None

    def run(batches: Batches) -> Batches:
        _forget_jars()
        for batch in batches:
            keys, values, times = (column.to_pylist() for column in batch.columns)
            ids = [(key or b"").decode("utf-8", "backslashreplace") for key in keys]
            decoded = [decode(value) for value in values]
            rows = _transposed([row for row, _ in decoded], len(columns))
            inside = [inside_cut(id, streams, cut) for id in ids]
            data: list[Any] = [ids, times, [problem for _, problem in decoded], inside, *rows]
            arrays = [pa.array(column, kind) for column, kind in zip(data, schema.types, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    return run


def notice_mapper(name: str) -> Callable[[Batches], Batches]:
    """Spark batches of (value) of the late or dead topic to (#name, #partition, #offset, #ts, #reason, #watermark).

    `name` is the key that says where the event came from: "stream" in the late topic, "topic" in the dead one.
    """
    kinds = {
        name: "string",
        "partition": "int64",
        "offset": "int64",
        "ts": "int64",
        "reason": "string",
        "watermark": "int64",
    }
    columns = ["#name", "#partition", "#offset", "#ts", "#reason", "#watermark"]
    schema = _schema({}, dict(zip(columns, kinds.values(), strict=True)))

    def decode(value: bytes | None) -> list[Value]:
        """What cannot be read becomes null, and so shows up as a notice about no known event."""
        try:
            pairs = dict(parse_object(value))
        except Broken:
            return [None] * len(kinds)
        row: list[Value] = []
        for key, kind in kinds.items():
            try:
                row.append(None if pairs.get(key) is None else CONVERT[kind](pairs[key]))
            except Broken:
                row.append(None)
        return row

    def run(batches: Batches) -> Batches:
        _forget_jars()
        for batch in batches:
            rows = [decode(value) for value in batch.column(0).to_pylist()]
            data = _transposed(rows, len(kinds))
            arrays = [pa.array(column, kind) for column, kind in zip(data, schema.types, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    return run
