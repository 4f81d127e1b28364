"""The late and dead topics against the log: does each event that was set aside have its notice, and each notice its
event?

Invariant: notices are compared as a set of (stream or topic, partition, offset), because those topics are written at
least once. Only notices about events inside the cut count.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from schemas import topics
from schemas.mesh import Mesh
from services.audit.batches import BROKEN, LATE, OK, notice_mapper
from services.audit.log import Range, read_topic
from services.audit.session import map_in_arrow
from services.audit.truth import IDLE, empty, in_cut
from services.audit.verdict import SAMPLES, StreamVerdict

SCHEMA = "`#name` string, `#partition` bigint, `#offset` bigint, `#ts` bigint, `#reason` string, `#watermark` bigint"
KEYS = ["kind", "#name", "#partition", "#offset"]


@dataclass(frozen=True)
class Notices:
    late: DataFrame | None
    dead: DataFrame | None


def read_notices(spark: SparkSession, mesh: Mesh, log: Range) -> Notices:
    def read(topic: str, name: str) -> DataFrame | None:
        kafka = read_topic(spark, mesh, log, topic)
        return None if kafka is None else map_in_arrow(kafka.select("value"), notice_mapper(name), SCHEMA).persist()

    return Notices(read(topics.late(mesh.name), "stream"), read(topics.dead(mesh.name), "topic"))


@dataclass(frozen=True)
class Streams:
    verdicts: Mapping[str, StreamVerdict]
    first_ms: int  # the time of every expected result lies between these: the earliest and latest usable event
    last_ms: int


def judge_streams(
    spark: SparkSession, mesh: Mesh, log: Range, events: Mapping[str, DataFrame], notices: Notices
) -> Streams:
    """Counts of every stream's events within the cut, and the differences between those set aside and their notices."""
    inside = {name: frame.where(in_cut(log, mesh.streams[name].topic)) for name, frame in events.items()}
    counts, first_ms, last_ms = _status_counts(inside)
    differences = _differences(spark, mesh, log, inside, notices)
    found: dict[str, StreamVerdict] = {}
    for name in events:
        topic = mesh.streams[name].topic
        mine = counts.get(name, {})
        per_status = {
            status: sum(n for (s, _), n in mine.items() if s == status) for status in (OK, LATE, IDLE, BROKEN)
        }
        late, dead = differences.get(("late", name), _Difference()), differences.get(("dead", topic), _Difference())
        samples = {
            "late events missing": late.unnoticed,
            "late events unexpected": late.unfounded,
            "dead letters missing": dead.unnoticed,
            "dead letters unexpected": dead.unfounded,
        }
        found[name] = StreamVerdict(
            stream=name,
            topic=topic,
            records=sum(mine.values()),
            usable=per_status[OK],
            late=per_status[LATE],
            idle=per_status[IDLE],
            broken=per_status[BROKEN],
            late_missing=late.missing,
            late_unexpected=late.unexpected,
            dead_missing=dead.missing,
            dead_unexpected=dead.unexpected,
            reasons={str(reason): n for (status, reason), n in sorted(mine.items(), key=str) if status == BROKEN},
            samples={kind: some for kind, some in samples.items() if some},
        )
    return Streams(found, first_ms, last_ms)


Counts = dict[str, dict[tuple[str, str | None], int]]  # stream -> (status, reason) -> records


def _status_counts(inside: Mapping[str, DataFrame]) -> tuple[Counts, int, int]:
    """One job over all streams: it also fills Spark's cache of them."""
    tagged = [frame.select(F.lit(name).alias("stream"), "#status", "#reason", "#ts") for name, frame in inside.items()]
    grouped = reduce(DataFrame.unionAll, tagged).groupBy("stream", "#status", "#reason")
    rows = grouped.agg(F.count(F.lit(1)).alias("n"), F.min("#ts").alias("first"), F.max("#ts").alias("last")).collect()
    found: Counts = {}
    for row in rows:
        found.setdefault(row["stream"], {})[row["#status"], row["#reason"]] = row["n"]
    usable = [row for row in rows if row["#status"] == OK]
    times = [row for row in usable if row["first"] is not None]  # a table's rows have none
    return found, min((row["first"] for row in times), default=0), max((row["last"] for row in times), default=0)


@dataclass
class _Difference:
    missing: int = 0
    unexpected: int = 0
    unnoticed: list[str] = field(default_factory=list)
    unfounded: list[str] = field(default_factory=list)


def _differences(
    spark: SparkSession, mesh: Mesh, log: Range, inside: Mapping[str, DataFrame], notices: Notices
) -> dict[tuple[str, str], _Difference]:
    aside = _set_aside(mesh, inside).withColumn("is_event", F.lit(True))
    noted = _noted(spark, mesh, log, inside, notices).withColumn("is_notice", F.lit(True))
    both = aside.join(noted, KEYS, "full_outer")
    unnoticed, unfounded = F.col("is_notice").isNull(), F.col("is_event").isNull()
    where = F.concat_ws(":", F.coalesce("#partition", F.lit(-1)), F.coalesce("#offset", F.lit(-1)))
    rows = (
        both.where(unnoticed | unfounded)
        .groupBy("kind", "#name")
        .agg(
            F.count_if(unnoticed).alias("missing"),
            F.count_if(unfounded).alias("unexpected"),
            F.slice(F.collect_list(F.when(unnoticed, where)), 1, SAMPLES).alias("unnoticed"),
            F.slice(F.collect_list(F.when(unfounded, where)), 1, SAMPLES).alias("unfounded"),
        )
    )
    return {
        (r["kind"], r["#name"]): _Difference(
            r["missing"], r["unexpected"], sorted(r["unnoticed"]), sorted(r["unfounded"])
        )
        for r in rows.collect()
    }


def _set_aside(mesh: Mesh, inside: Mapping[str, DataFrame]) -> DataFrame:
    """Late events by stream, broken ones by topic (two streams may read one topic)."""
    parts = []
    for name, frame in inside.items():
        keys = [F.col("#partition").cast("bigint").alias("#partition"), F.col("#offset")]
        parts.append(
            frame.where(F.col("#status").isin(LATE, IDLE)).select(
                F.lit("late").alias("kind"), F.lit(name).alias("#name"), *keys
            )
        )
        broken = frame.where(F.col("#status") == BROKEN)
        parts.append(broken.select(F.lit("dead").alias("kind"), F.lit(mesh.streams[name].topic).alias("#name"), *keys))
    return reduce(DataFrame.unionAll, parts).distinct()


def _noted(spark: SparkSession, mesh: Mesh, log: Range, inside: Mapping[str, DataFrame], notices: Notices) -> DataFrame:
    names = {("late", name): mesh.streams[name].topic for name in inside} | {
        ("dead", mesh.streams[n].topic): mesh.streams[n].topic for n in inside
    }
    bounds = spark.createDataFrame(
        [
            (kind, name, p, low, high)
            for (kind, name), topic in names.items()
            for p, (low, high) in log.of(topic).items()
        ],
        "kind string, `#name` string, `#partition` bigint, low bigint, high bigint",
    )
    parts = [
        frame.where(F.col("#name").isin([n for k, n in names if k == kind])).select(
            F.lit(kind).alias("kind"), "#name", "#partition", "#offset"
        )
        for kind, frame in (("late", notices.late), ("dead", notices.dead))
        if frame is not None
    ]
    if not parts:
        return empty(spark, "kind string, `#name` string, `#partition` bigint, `#offset` bigint")
    located = (
        reduce(DataFrame.unionAll, parts).distinct().join(F.broadcast(bounds), ["kind", "#name", "#partition"], "left")
    )
    known = F.col("low").isNull() | ((F.col("#offset") >= F.col("low")) & (F.col("#offset") < F.col("high")))
    return located.where(F.coalesce(known, F.lit(True))).select(*KEYS)
