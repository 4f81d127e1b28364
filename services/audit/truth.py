"""What the answer must be: the events of each stream as the log decides them, and the combinations a query asks for.

Invariant: a combination of one event per source is expected iff the query's own conditions hold in Spark SQL and its
validity is not empty, that is each ts <= each ts + window. Each is found once: every row stands in all the time buckets
its validity touches, and a combination counts only in the bucket of its start. A static table's rows are valid always,
so time asks nothing of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.types import (
    BooleanType,
    ByteType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
)

from schemas.errors import MachineError, QueryError
from schemas.mesh import Mesh, Stream
from services.audit.batches import BROKEN, OK, REPLACED, event_mapper, table_mapper
from services.audit.log import Range, read_topic
from services.audit.scan import Scanned, Source, spark_name
from services.audit.session import map_in_arrow

IDLE = "idle"
SPARK_TYPE = {"int64": "bigint", "float64": "double", "bool": "boolean", "string": "string", "timestamp": "bigint"}
MAX_COPIES = 8  # a row of the longest window stands in at most this many buckets, and one more


def read_events(spark: SparkSession, mesh: Mesh, log: Range, stream: Stream, idle: DataFrame | None) -> DataFrame:
    """Every record of the stream: #partition, #offset, #ts, #status (ok, late, idle, broken), #reason, its fields."""
    fields = {name: kind.value for name, kind in stream.fields.items()}
    columns = ["`#partition` int", "`#offset` bigint", "`#ts` bigint", "`#status` string", "`#reason` string"]
    schema = ", ".join(columns + [f"{spark_name(name)} {SPARK_TYPE[kind]}" for name, kind in fields.items()])
    kafka = read_topic(spark, mesh, log, stream.topic)
    if kafka is None:
        return empty(spark, schema)
    if kafka.rdd.getNumPartitions() > len(log.begin[stream.topic]):
        raise MachineError(
            f"Spark splits partitions of {stream.topic}: unset minPartitions, the audit needs them in offset order"
        )
    if stream.table is not None:
        rows = map_in_arrow(
            kafka.select("partition", "offset", "key", "value"), table_mapper(fields, stream.table), schema
        )
        return _last_of_each_key(rows, stream.table)
    mapper = event_mapper(fields, stream.event_time, stream.lateness_ms)
    events = map_in_arrow(kafka.select("partition", "offset", "value"), mapper, schema)
    if idle is not None:
        events = events.join(idle, ["#partition", "#offset"], "left")
        status = F.when((F.col("#status") == OK) & F.col("#idle").isNotNull(), F.lit(IDLE)).otherwise(F.col("#status"))
        events = events.withColumn("#status", status).drop("#idle")
    return events


def _last_of_each_key(rows: DataFrame, key: str) -> DataFrame:
    """Of each partition, the last record of each key stays what it is; earlier ones are replaced."""
    broken = F.col("#status") == BROKEN
    later = Window.partitionBy("#partition", broken, F.col(spark_name(key))).orderBy(F.col("#offset").desc())
    status = F.when(~broken & (F.col("#place") > 1), F.lit(REPLACED)).otherwise(F.col("#status"))
    return rows.withColumn("#place", F.row_number().over(later)).withColumn("#status", status).drop("#place")


def empty(spark: SparkSession, schema: str) -> DataFrame:
    return spark.range(0).select(F.from_json(F.lit("{}"), schema).alias("row")).select("row.*")


def idle_events(notices: DataFrame | None, stream: Stream) -> DataFrame | None:
    """Events that the late topic says came behind a watermark that an idle partition did not hold back.

    That is the one thing the log of the sources alone cannot tell; the notice must at least agree with itself (ts <
    watermark).
    """
    if notices is None or stream.idle_after_ms is None:
        return None
    mine = (F.col("#name") == stream.name) & (F.col("#reason") == IDLE) & (F.col("#ts") < F.col("#watermark"))
    keys = [F.col("#partition").cast("int").alias("#partition"), F.col("#offset"), F.lit(True).alias("#idle")]
    return notices.where(mine).select(*keys).distinct()


def in_cut(log: Range, topic: str) -> Column:
    """True for events that may join: those not before the cut's start."""
    late_starts = {p: at for p, at in log.cut_from[topic].items() if at > log.begin[topic][p]}
    condition = F.lit(True)
    for partition, at in late_starts.items():
        condition = condition & ((F.col("#partition") != partition) | (F.col("#offset") >= at))
    return condition


@dataclass(frozen=True)
class Truth:
    frame: DataFrame  # #id, #time, the outputs
    columns: Mapping[str, str]  # output -> int64, float64, bool or string


def expected_results(
    spark: SparkSession, scanned: Scanned, events: Mapping[str, DataFrame], usable: Mapping[str, Column]
) -> Truth:
    """The rows a query must have. `events` and `usable` by stream."""
    width = bucket_ms(scanned.sources)
    for source in scanned.sources:
        _register(events[source.stream].where((F.col("#status") == OK) & usable[source.stream]), source, width)
    try:
        frame = spark.sql(_sql(scanned, width))
    except (ParseException, AnalysisException) as error:
        first = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
        raise QueryError(f"Spark SQL does not accept it: {first[:200]}", query=scanned.name) from None
    return _typed(frame, scanned)


def bucket_ms(sources: tuple[Source, ...]) -> int:
    """Narrow enough that a hot key's rows meet only their neighbours in time, wide enough that rows are copied a few
    times at most.

    >>> bucket_ms((Source("a", "a", 1_000), Source("b", "b", 80_000))), bucket_ms((Source("a", "a", 0),))
    (10000, 1)
    """
    windows = [source.window_ms for source in sources if source.window_ms is not None]
    longest, shortest = max(windows), min(windows)
    return max(shortest, -(-longest // MAX_COPIES), 1)


def _register(rows: DataFrame, source: Source, width: int) -> None:
    if source.window_ms is None:
        rows.drop("#status", "#reason", "#ts").createOrReplaceTempView(source.alias)
        return
    end = F.col("#ts") + F.lit(source.window_ms)
    buckets = F.expr(f"sequence(`#ts` div {width}L, (`#ts` + {source.window_ms}L) div {width}L)")
    view = rows.drop("#status", "#reason").withColumn("#end", end).withColumn("#bucket", F.explode(buckets))
    view.createOrReplaceTempView(source.alias)


def _sql(scanned: Scanned, width: int) -> str:
    def column(source: Source, name: str) -> str:
        return f"{spark_name(source.alias)}.{spark_name(name)}"

    every = scanned.join_order
    order = [source for source in every if source.window_ms is not None]
    start = f"greatest({', '.join(column(s, '#ts') for s in order)})"
    ids = [f"concat('{s.stream}:', {column(s, '#partition')}, ':', {column(s, '#offset')})" for s in scanned.sources]
    outputs = [f"{expression} AS {spark_name(name)}" for name, expression in scanned.outputs]
    conditions = [f"({condition})" for condition in scanned.conditions]
    conditions += [f"{column(order[0], '#bucket')} = {column(s, '#bucket')}" for s in order[1:]]
    conditions += [f"{column(a, '#ts')} <= {column(b, '#end')}" for a in order for b in order if a != b]
    if len(order) == 1:
        start = column(order[0], "#ts")
    conditions.append(f"{column(order[0], '#bucket')} = {start} div {width}L")
    return (
        f"SELECT concat_ws('|', {', '.join(ids)}) AS `#id`, {start} AS `#time`, {', '.join(outputs)}\n"
        f"FROM {', '.join(spark_name(s.alias) for s in every)}\nWHERE {' AND '.join(conditions)}"
    )


def _typed(frame: DataFrame, scanned: Scanned) -> Truth:
    """Outputs as one of the mesh's types. JSON knows no NaN and no infinity, so a float that is neither a number nor
    finite is null."""
    columns: dict[str, str] = {}
    selected = [F.col("#id"), F.col("#time")]
    for name, _ in scanned.outputs:
        kind, column = frame.schema[name].dataType, F.col(spark_name(name))
        if isinstance(kind, (LongType, IntegerType, ShortType, ByteType)):
            columns[name], column = "int64", column.cast("bigint")
        elif isinstance(kind, (DoubleType, FloatType, DecimalType)):
            columns[name], column = "float64", column.cast("double")
            column = F.when(
                F.abs(column) < float("inf"), column + F.lit(0.0)
            )  # NaN is above infinity in Spark; -0.0 becomes 0.0
        elif isinstance(kind, BooleanType):
            columns[name] = "bool"
        elif isinstance(kind, StringType) or kind.typeName() == "void":
            columns[name], column = "string", column.cast("string")
        else:
            raise QueryError(
                f"output `{name}` is of Spark type {kind.simpleString()}, which no result can hold", query=scanned.name
            )
        selected.append(column.alias(name))
    return Truth(frame.select(*selected), columns)
