"""Expected against found: by id, by value, by time.

Invariant: every record of the results topic and every expected row is counted in exactly one place: right, missing, extra,
duplicate (a surplus repeat), wrong, or outside the cut.
"""

from collections.abc import Mapping
from typing import Any

from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from schemas.mesh import Mesh
from services.audit.batches import result_mapper
from services.audit.log import Range, read_topic
from services.audit.scan import Scanned, spark_name
from services.audit.session import map_in_arrow
from services.audit.truth import SPARK_TYPE, Truth
from services.audit.verdict import SAMPLES, Interval

MAX_INTERVALS = 60
NICE_MS = [n * unit for unit in (1, 10, 100) for n in (1, 2, 5)] + [
    n * unit for unit, steps in ((1_000, (1, 2, 5, 10, 15, 30)), (60_000, (1, 2, 5, 10, 15, 30)), (3_600_000, (1, 2, 3, 6, 12)))
    for n in steps
]  # fmt: skip
DAY_MS = 86_400_000


def read_results(spark: SparkSession, mesh: Mesh, log: Range, topic: str, scanned: Scanned, truth: Truth) -> DataFrame:
    """The results topic: #id, #time, #problem, #inside, the outputs."""
    head = ["`#id` string", "`#time` bigint", "`#problem` string", "`#inside` boolean"]
    schema = ", ".join(head + [f"{spark_name(name)} {SPARK_TYPE[kind]}" for name, kind in truth.columns.items()])
    kafka = read_topic(spark, mesh, log, topic)
    if kafka is None:
        return spark.createDataFrame([], schema)
    streams = tuple(source.stream for source in scanned.sources)
    cut = {stream: log.of(mesh.streams[stream].topic) for stream in streams}
    frame = kafka.select("key", "value", F.expr("unix_millis(timestamp)").alias("time"))
    return map_in_arrow(frame, result_mapper(truth.columns, streams, cut), schema)


def compare(expected: DataFrame, found: DataFrame, columns: Mapping[str, str]) -> DataFrame:
    """One row per id: #id, #time, #expected (bool), #found (records), #wrong (the columns that differ, or why it cannot be read)."""
    left = expected.select("#id", F.col("#time").alias("e_time"), F.struct(*_columns(columns)).alias("e"), F.lit(True).alias("is_expected"))
    right = found.where("`#inside`").select(
        "#id", F.col("#time").alias("f_time"), F.struct(*_columns(columns)).alias("f"), "#problem", F.lit(True).alias("is_found")
    )
    both = left.join(right, "#id", "full_outer")
    differs = [F.when(~F.col(f"e.{spark_name(c)}").eqNullSafe(_found_value(c, kind)), F.lit(c)) for c, kind in columns.items()]
    named = F.concat_ws(", ", F.when(F.col("e_time") != F.col("f_time"), F.lit("(time)")), *differs)
    wrong = F.when(F.col("is_expected") & F.col("is_found"), F.coalesce(F.concat(F.lit("(unreadable) "), "#problem"), named))
    rows = both.select("#id", "e_time", "f_time", "is_expected", "is_found", F.nullif(wrong, F.lit("")).alias("wrong"))
    return rows.groupBy("#id").agg(
        F.coalesce(F.max("e_time"), F.max("f_time")).alias("#time"),
        F.coalesce(F.max("is_expected"), F.lit(False)).alias("#expected"),
        F.count("is_found").alias("#found"),
        F.max("wrong").alias("#wrong"),
    )


def _columns(columns: Mapping[str, str]) -> list[Column]:
    return [F.col(spark_name(name)) for name in columns]


def _found_value(name: str, kind: str) -> Column:
    column = F.col(f"f.{spark_name(name)}")
    return column + F.lit(0.0) if kind == "float64" else column  # -0.0 equals 0.0


def totals(merged: DataFrame) -> Row:
    there, asked = F.col("#found") > 0, F.col("#expected")
    return merged.agg(
        F.count_if(asked).alias("expected"),
        F.coalesce(F.sum("#found"), F.lit(0)).alias("found"),
        F.count_if(asked & ~there).alias("missing"),
        F.count_if(~asked).alias("extra"),
        F.coalesce(F.sum(F.when(there, F.col("#found") - 1)), F.lit(0)).alias("duplicate"),
        F.count_if(F.col("#wrong").isNotNull()).alias("wrong"),
        F.min("#time").alias("first"),
        F.max("#time").alias("last"),
    ).collect()[0]


def interval_ms(first: int, last: int) -> int:
    """A round width that gives at most MAX_INTERVALS intervals.

    >>> interval_ms(0, 59), interval_ms(0, 600_000), interval_ms(5, 5)
    (1, 15000, 1)
    """
    for width in NICE_MS:
        if last // width - first // width < MAX_INTERVALS:
            return width
    return DAY_MS * -(-(last - first) // (DAY_MS * (MAX_INTERVALS - 2)))


def intervals(merged: DataFrame, width: int) -> tuple[Interval, ...]:
    there, asked, bad = F.col("#found") > 0, F.col("#expected"), F.col("#wrong").isNotNull()
    slot = F.floor(F.col("#time") / F.lit(width))
    rows = merged.groupBy(slot.alias("slot")).agg(
        F.count_if(asked).alias("expected"),
        F.count_if(asked & there & ~bad).alias("right"),
        F.count_if(asked & ~there).alias("missing"),
        F.count_if(bad).alias("wrong"),
        F.count_if(~asked).alias("extra"),
    )
    return tuple(
        Interval(int(r["slot"]) * width, r["expected"], r["right"], r["missing"], r["wrong"], r["extra"])
        for r in sorted(rows.collect(), key=lambda row: int(row["slot"]))
    )


def digest(columns: Mapping[str, str]) -> Column:
    """An aggregate that names a multiset of rows whatever their order: two sums modulo 2^64 over pieces of each row's SHA-256."""
    parts = [F.col("#id"), F.col("#time").cast("string")]
    for name, kind in columns.items():
        column = F.col(spark_name(name))
        column = column + F.lit(0.0) if kind == "float64" else column
        parts.append(F.coalesce(F.concat(F.lit("="), column.cast("string")), F.lit("null")))
    sha = F.sha2(F.concat_ws("\x1f", *parts), 256)
    sums = [F.sum(F.conv(F.substring(sha, start, 15), 16, 10).cast("bigint")) for start in (1, 16)]
    return F.concat_ws(":", F.count(F.lit(1)).cast("string"), *[F.lpad(F.hex(F.coalesce(s, F.lit(0))), 16, "0") for s in sums])


def samples(merged: DataFrame, expected: DataFrame, found: DataFrame) -> dict[str, list[dict[str, Any]]]:
    """The first few ids of each kind of difference, with what was expected and what was found."""
    kinds = {
        "missing": "`#expected` AND `#found` = 0",
        "extra": "NOT `#expected`",
        "duplicate": "`#found` > 1",
        "wrong": "`#wrong` IS NOT NULL",
    }
    picked = {kind: merged.where(test).orderBy("#time", "#id").limit(SAMPLES).collect() for kind, test in kinds.items()}
    ids = sorted({row["#id"] for rows in picked.values() for row in rows})
    truth, records = _values(expected, ids), _values(found.where("`#inside`"), ids)
    return {
        kind: [
            {"id": row["#id"], "records": row["#found"], "differs": row["#wrong"], "expected": truth.get(row["#id"], [None])[0], "found": records.get(row["#id"], [])}
            for row in rows
        ]
        for kind, rows in picked.items()
        if rows
    }  # fmt: skip


def _values(frame: DataFrame, ids: list[str]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in frame.where(F.col("#id").isin(ids)).limit(10 * len(ids)).collect() if ids else []:
        values = {k.replace("#", ""): v for k, v in row.asDict().items() if k not in ("#id", "#inside") and not (k == "#problem" and v is None)}
        found.setdefault(row["#id"], []).append(values)
    return found
