"""Expected against found: by id, by value, by time.

Invariant: every record of the results topic and every expected row is counted in exactly one place: right, missing,
extra, duplicate (a surplus repeat), wrong, or outside the cut.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from schemas.mesh import Mesh
from services.audit.batches import result_mapper
from services.audit.log import Range, read_topic
from services.audit.scan import Scanned, spark_name
from services.audit.session import map_in_arrow
from services.audit.truth import SPARK_TYPE, Truth, empty
from services.audit.verdict import SAMPLES, Interval

MAX_INTERVALS = 60
NICE_MS = [n * unit for unit in (1, 10, 100) for n in (1, 2, 5)] + [
    n * unit
    for unit, steps in ((1_000, (1, 2, 5, 10, 15, 30)), (60_000, (1, 2, 5, 10, 15, 30)), (3_600_000, (1, 2, 3, 6, 12)))
    for n in steps
]
DAY_MS = 86_400_000


def read_results(spark: SparkSession, mesh: Mesh, log: Range, topic: str, scanned: Scanned, truth: Truth) -> DataFrame:
    """The results topic: #id, #time, #problem, #inside, the outputs."""
    head = ["`#id` string", "`#time` bigint", "`#problem` string", "`#inside` boolean"]
    schema = ", ".join(head + [f"{spark_name(name)} {SPARK_TYPE[kind]}" for name, kind in truth.columns.items()])
    kafka = read_topic(spark, mesh, log, topic)
    if kafka is None:
        return empty(spark, schema)
    streams = tuple(source.stream for source in scanned.sources)
    # A table is judged whole: a result with a row behind its cut is not outside, it is wrong.
    cut = {
        stream: log.of(mesh.streams[stream].topic) if mesh.streams[stream].table is None else {} for stream in streams
    }
    frame = kafka.select("key", "value", F.expr("unix_millis(timestamp)").alias("time"))
    return map_in_arrow(frame, result_mapper(truth.columns, streams, cut), schema)


def compare(expected: DataFrame, found: DataFrame, columns: Mapping[str, str]) -> DataFrame:
    """One row per id: #id, #time, #expected (bool), #found (records), #outside (records), #wrong (what differs), and
    the digests' parts."""
    left = expected.select(
        "#id",
        F.col("#time").alias("e_time"),
        F.struct(*_columns(columns)).alias("e"),
        F.lit(True).alias("is_expected"),
        *hashes(columns, "e"),
    )
    inside = F.when(F.col("#inside"), F.lit(True))
    right = found.select(
        "#id",
        F.col("#time").alias("f_time"),
        F.struct(*_columns(columns)).alias("f"),
        "#problem",
        inside.alias("is_found"),
        *hashes(columns, "f"),
    )
    both = left.join(right, "#id", "full_outer")
    differs = [
        F.when(~F.col(f"e.{spark_name(c)}").eqNullSafe(_found_value(c, kind)), F.lit(c)) for c, kind in columns.items()
    ]
    named = F.concat_ws(", ", F.when(F.col("e_time") != F.col("f_time"), F.lit("(time)")), *differs)
    wrong = F.when(
        F.col("is_expected") & F.col("is_found"), F.coalesce(F.concat(F.lit("(unreadable) "), "#problem"), named)
    )
    rows = both.withColumn("wrong", F.nullif(wrong, F.lit("")))
    there = F.col("is_found").isNotNull()
    return rows.groupBy("#id").agg(
        F.coalesce(F.max("e_time"), F.max("f_time")).alias("#time"),
        F.coalesce(F.max("is_expected"), F.lit(False)).alias("#expected"),
        F.count("is_found").alias("#found"),
        F.count_if(F.col("f_time").isNotNull() & ~there).alias("#outside"),
        F.max("wrong").alias("#wrong"),
        *[F.max(name).alias(name) for name in ("e0", "e1")],  # an expected row is one row, however often it was found
        *[F.sum(F.when(there, F.col(name))).alias(name) for name in ("f0", "f1")],
    )


def hashes(columns: Mapping[str, str], prefix: str) -> list[Column]:
    """Two 60-bit pieces of the SHA-256 of a row: summed modulo 2^64 they name a multiset of rows whatever their
    order."""
    parts = [F.col("#id"), F.col("#time").cast("string")]
    for name, kind in columns.items():
        column = F.col(spark_name(name))
        column = column + F.lit(0.0) if kind == "float64" else column
        parts.append(F.coalesce(F.concat(F.lit("="), column.cast("string")), F.lit("null")))
    sha = F.sha2(F.concat_ws("\x1f", *parts), 256)
    return [
        F.conv(F.substring(sha, start, 15), 16, 10).cast("bigint").alias(f"{prefix}{i}")
        for i, start in enumerate((1, 16))
    ]


def _columns(columns: Mapping[str, str]) -> list[Column]:
    return [F.col(spark_name(name)) for name in columns]


def _found_value(name: str, kind: str) -> Column:
    column = F.col(f"f.{spark_name(name)}")
    return column + F.lit(0.0) if kind == "float64" else column  # -0.0 equals 0.0


def interval_ms(first: int, last: int) -> int:
    """A round width that gives at most MAX_INTERVALS intervals.

    >>> interval_ms(0, 59), interval_ms(0, 600_000), interval_ms(5, 5)
    (1, 15000, 1)
    """
    for width in NICE_MS:
        if last // width - first // width < MAX_INTERVALS:
            return width
    return DAY_MS * -(-(last - first) // (DAY_MS * (MAX_INTERVALS - 2)))


@dataclass(frozen=True)
class Summary:
    expected: int
    found: int
    missing: int
    extra: int
    duplicate: int
    wrong: int
    outside: int
    digest_expected: str
    digest_found: str
    intervals: tuple[Interval, ...]

    @property
    def differs(self) -> bool:
        return bool(self.missing or self.extra or self.duplicate or self.wrong)


def summarize(merged: DataFrame, width: int, first: int, last: int) -> Summary:
    """All counts in one pass, per interval. The times of right results lie in [first, last]; others are put at the edge
    they are beyond."""
    there, asked, bad = F.col("#found") > 0, F.col("#expected"), F.col("#wrong").isNotNull()
    time = F.greatest(F.lit(first), F.least(F.lit(last), F.col("#time")))
    counts = {
        "expected": F.count_if(asked),
        "found": F.sum("#found"),
        "right": F.count_if(asked & there & ~bad),
        "missing": F.count_if(asked & ~there),
        "wrong": F.count_if(bad),
        "extra": F.count_if(~asked & there),
        "duplicate": F.sum(F.when(there, F.col("#found") - 1)),
        "outside": F.sum("#outside"),
        "e0": F.sum("e0"),
        "e1": F.sum("e1"),
        "f0": F.sum("f0"),
        "f1": F.sum("f1"),
    }
    slot = F.floor(time / F.lit(width)).cast("bigint")
    grouped = merged.groupBy(slot.alias("slot")).agg(
        *[F.coalesce(column, F.lit(0)).alias(name) for name, column in counts.items()]
    )
    rows = sorted(grouped.collect(), key=lambda row: int(row["slot"]))
    total = {name: sum(int(row[name]) for row in rows) for name in counts}
    shown = [r for r in rows if r["expected"] or r["extra"]]
    return Summary(
        **{name: total[name] for name in ("expected", "found", "missing", "extra", "duplicate", "wrong", "outside")},
        digest_expected=digest(total["expected"], total["e0"], total["e1"]),
        digest_found=digest(total["found"], total["f0"], total["f1"]),
        intervals=tuple(
            Interval(int(r["slot"]) * width, r["expected"], r["right"], r["missing"], r["wrong"], r["extra"])
            for r in shown
        ),
    )


def digest(count: int, *sums: int) -> str:
    """
    >>> digest(2, 2**64 + 5, -1)
    '2:0000000000000005:ffffffffffffffff'
    """
    return ":".join([str(count), *[f"{value % 2**64:016x}" for value in sums]])


def samples(merged: DataFrame, expected: DataFrame, found: DataFrame) -> dict[str, list[dict[str, Any]]]:
    """The first few ids of each kind of difference, with what was expected and what was found."""
    kinds = {
        "missing": "`#expected` AND `#found` = 0",
        "extra": "NOT `#expected` AND `#found` > 0",
        "duplicate": "`#found` > 1",
        "wrong": "`#wrong` IS NOT NULL",
    }
    named = F.array_compact(F.array(*[F.when(F.expr(test), F.lit(kind)) for kind, test in kinds.items()]))
    place = F.row_number().over(Window.partitionBy("kind").orderBy("#time", "#id"))
    picked = (
        merged.select("*", F.explode(named).alias("kind")).withColumn("place", place).where(F.col("place") <= SAMPLES)
    )
    rows = sorted(picked.collect(), key=lambda row: int(row["place"]))
    ids = sorted({row["#id"] for row in rows})
    truth, records = _values(expected, ids), _values(found.where("`#inside`"), ids)
    chosen: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        id = row["#id"]
        sample = {
            "id": id,
            "records": row["#found"],
            "differs": row["#wrong"],
            "expected": truth.get(id, [None])[0],
            "found": records.get(id, []),
        }
        chosen.setdefault(row["kind"], []).append(sample)
    return chosen


def wrong_columns(merged: DataFrame) -> dict[str, int]:
    return {
        row["#wrong"]: row["count"] for row in merged.where("`#wrong` IS NOT NULL").groupBy("#wrong").count().collect()
    }


def _values(frame: DataFrame, ids: list[str]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in frame.where(F.col("#id").isin(ids)).limit(10 * len(ids)).collect() if ids else []:
        values = {
            k.replace("#", ""): v
            for k, v in row.asDict().items()
            if k not in ("#id", "#inside") and not (k == "#problem" and v is None)
        }
        found.setdefault(row["#id"], []).append(values)
    return found
