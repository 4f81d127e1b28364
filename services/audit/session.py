"""The Spark session of the audit: how it starts, what it is told of Kafka, and how our functions reach its workers.

Invariant: Spark's own chatter goes to a log file, never to the terminal; and the session's settings are those under
which Spark SQL agrees with the query language (three-valued logic, wrapping int64, null on a zero divisor, exact
names).
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.udf import UserDefinedFunction
from pyspark.util import PythonEvalType

from schemas.errors import MachineError
from schemas.mesh import Mesh
from services.audit import batches, decode
from services.runtime.security import for_java

CONNECTOR = "org.apache.spark:spark-sql-kafka-0-10_2.13:4.0.0"


def start_session(master: str, memory: str, log_file: Path, token_url: str | None = None) -> SparkSession:
    """A new session, or an error that says what is missing. `token_url`: where its Kafka client may fetch tokens."""
    local = master.startswith("local")
    if local:
        if shutil.which("java") is None and not os.environ.get("JAVA_HOME"):
            raise MachineError("the audit runs on Spark, which needs Java 17: install it, or set JAVA_HOME")
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    builder = SparkSession.builder.master(master).appName("joinmesh audit")
    for key, value in _settings(local, memory, token_url).items():
        builder = builder.config(key, value)
    try:
        with _stderr_to(log_file):
            session: SparkSession = builder.getOrCreate()
    except Exception as error:
        raise MachineError(
            f"Spark did not start on {master}: see {log_file} ({str(error).splitlines()[0][:120]})"
        ) from None
    session.sparkContext.setLogLevel("ERROR")
    _forget_jars(session)
    return session


def _forget_jars(session: SparkSession) -> None:
    """Spark puts the connector's jars on every Python worker's import path, and a worker reads the index of each anew
    for every task: a third of a second of work, to find no Python in them."""
    included = session.sparkContext._python_includes or []
    included[:] = [name for name in included if not name.endswith(".jar")]
    sys.path[:] = [entry for entry in sys.path if not entry.endswith(".jar")]


def _settings(local: bool, memory: str, token_url: str | None) -> dict[str, str]:
    allowed = f"-D{for_java.ALLOWED_URLS}={token_url}" if token_url else ""
    settings = {
        **connector_settings(),
        "spark.redaction.regex": for_java.SECRET_KEYS,
        "spark.sql.redaction.options.regex": f"{for_java.SECRET_KEYS}|url",
        "spark.executor.extraJavaOptions": allowed,
        "spark.driver.extraJavaOptions": allowed,
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.ansi.enabled": "false",
        "spark.sql.caseSensitive": "true",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "5000",  # a few thousand large records must still fit a worker
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": memory,
    }
    if local:
        cores = os.cpu_count() or 2
        settings |= {
            # short jobs: compiling harder costs more than it gains
            "spark.driver.extraJavaOptions": f"-XX:TieredStopAtLevel=1 -XX:+UseParallelGC -Xshare:auto {allowed}",
            "spark.ui.enabled": "false",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.sql.shuffle.partitions": str(max(4, 2 * cores)),
            "spark.shuffle.compress": "true",
            "spark.io.compression.codec": "lz4",
        }
    return settings


def connector_settings() -> dict[str, str]:
    """Spark's Kafka connector: the jars in the folder JOINMESH_CONNECTOR, as an image has them; else Spark fetches
    it."""
    folder = os.environ.get("JOINMESH_CONNECTOR")
    if not folder:
        return {"spark.jars.packages": CONNECTOR}
    jars = sorted(str(jar) for jar in Path(folder).glob("*.jar"))
    name = CONNECTOR.split(":")[1]
    if not any(Path(jar).name.startswith(name) for jar in jars):
        raise MachineError(
            f"JOINMESH_CONNECTOR={folder} holds no {name}-*.jar; correct it, or unset it to fetch the jars"
        )
    return {"spark.jars": ",".join(jars)}


@contextmanager
def _stderr_to(log_file: Path) -> Iterator[None]:
    """The JVM inherits our error stream when it starts and keeps it: give it a file instead of the terminal."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr.flush()
    saved = os.dup(2)
    with open(log_file, "ab") as log:
        os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)


def ship() -> None:
    """Send our functions to workers as code, not as names to import: workers need no installation of ours."""
    for module in (batches, decode):
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]


def map_in_arrow(frame: DataFrame, function: Callable[[Iterator[Any]], Iterator[Any]], schema: str) -> DataFrame:
    """`DataFrame.mapInArrow` without its check for pandas, which neither side of it uses (PySpark is pinned
    exactly)."""
    udf = UserDefinedFunction(function, schema, name="audit", evalType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF)
    column = udf(*[frame["`" + name + "`"] for name in frame.columns])
    return DataFrame(frame._jdf.mapInArrow(column._jc, False, None), frame.sparkSession)


def reader_settings(mesh: Mesh) -> dict[str, str]:
    """Options of Spark's Kafka reader for this mesh."""
    settings = {
        **for_java.java_settings(mesh),
        "isolation.level": "read_committed",
        "max.poll.records": "20000",
    }
    return {f"kafka.{key}": value for key, value in settings.items()}
