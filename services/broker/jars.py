"""Fetches the broker's jars once per user, with the Ivy that PySpark carries, so that Java and Python are the only
needs.

Invariant: a folder under its final name is complete. A download goes to a folder beside it and is renamed when Ivy has
said that it succeeded and every jar is there; a lock makes a second one wait, so a killed or parallel run leaves
nothing half-done.
"""

import contextlib
import fcntl
import importlib.util
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from schemas.errors import MachineError

KAFKA_VERSION = "4.3.0"
SLF4J_VERSION = "1.7.36"  # the binding must be of the same line as the slf4j-api that Kafka brings
Progress = Callable[[str], None]

_IVY_XML = f"""<ivy-module version="2.0">
  <info organisation="joinmesh" module="broker"/>
  <configurations><conf name="default"/></configurations>
  <dependencies>
    <dependency org="org.apache.kafka" name="kafka_2.13" rev="{KAFKA_VERSION}" conf="default->default"/>
    <dependency org="org.slf4j" name="slf4j-simple" rev="{SLF4J_VERSION}" conf="default->default"/>
  </dependencies>
</ivy-module>
"""


def cache_dir() -> Path:
    """Where downloads are kept for this user: $XDG_CACHE_HOME/joinmesh, else ~/.cache/joinmesh."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "joinmesh"


def broker_jars(java: str, progress: Progress) -> Path:
    """The folder with the broker's jars; fetched now if this user has none yet."""
    cache = cache_dir()
    libs = cache / f"kafka-{KAFKA_VERSION}"
    if libs.is_dir():
        return libs
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(
            f"cannot create {cache} for the broker's jars ({error.strerror}); set XDG_CACHE_HOME to a writable folder"
        ) from None
    with locked(
        cache / "fetch.lock", lambda: progress("waiting for another joinmesh that is fetching the broker's jars")
    ):
        if not libs.is_dir():
            _fetch(java, cache, libs, progress)
    return libs


def _fetch(java: str, cache: Path, libs: Path, progress: Progress) -> None:
    require_disk(cache)
    progress(f"fetching Apache Kafka {KAFKA_VERSION} (about 45 MB, once; kept in {cache})")
    staging = cache / f"{libs.name}.part"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    (staging / "ivy.xml").write_text(_IVY_XML)
    log = cache / "fetch.log"
    command = [
        java,
        f"-Divy.default.ivy.user.dir={cache / 'ivy'}",
        "-cp",
        str(_ivy_jar()),
        "org.apache.ivy.Main",
        "-cache",
        str(cache / "ivy"),
        "-ivy",
        str(staging / "ivy.xml"),
        "-confs",
        "default",
        "-retrieve",
        str(staging / "libs" / "[artifact]-[revision].[ext]"),
    ]
    started = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            code = _watch(process, log, progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    jars = list((staging / "libs").glob("*.jar"))
    complete = code == 0 and any(jar.name == f"kafka_2.13-{KAFKA_VERSION}.jar" for jar in jars)
    if not complete:
        shutil.rmtree(staging, ignore_errors=True)
        raise MachineError(
            f"could not fetch Apache Kafka {KAFKA_VERSION}: {_reason(log)} (whole log: {log}); check the network and"
            " run it again"
        )
    os.rename(staging / "libs", libs)
    shutil.rmtree(staging, ignore_errors=True)
    progress(f"fetched {len(jars)} jars in {time.monotonic() - started:.0f} s")


def _watch(process: "subprocess.Popen[bytes]", log: Path, progress: Progress) -> int:
    """Wait for Ivy, saying every few seconds how far it is."""
    said = time.monotonic()
    while True:
        try:
            return process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            if time.monotonic() - said >= 5:
                said = time.monotonic()
                text = log.read_text(errors="replace")
                progress(f"  {text.count('found ')} modules found, {text.count('[SUCCESSFUL ]')} jars fetched")


def _reason(log: Path) -> str:
    """The most telling line of Ivy's log."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    for words in (
        "UnknownHostException",
        "Connection refused",
        "timed out",
        "No space left",
        "not found",
        "Server access",
    ):
        for line in lines:
            if words.lower() in line.lower():
                return line[:200]
    return lines[-1][:200] if lines else "no output"


def _ivy_jar() -> Path:
    spec = importlib.util.find_spec("pyspark")  # located, not imported: importing it takes a second
    places = list(spec.submodule_search_locations or []) if spec else []
    for place in places:
        for jar in sorted((Path(place) / "jars").glob("ivy-*.jar")):
            return jar
    raise MachineError("the pyspark package with its jars/ivy-*.jar is not installed; run `make sync`")


def require_disk(folder: Path, needed_bytes: int = 2 * 1024**3) -> None:
    """Refuse to begin what would fill the disk."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise MachineError(
            f"too little disk at {folder}: {free / 1024**3:.1f} GiB free, {needed_bytes / 1024**3:.0f} GiB needed; free"
            " some or choose another folder"
        )


@contextlib.contextmanager
def locked(file: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold a lock file; the operating system lets go of it when the process ends, however it ends."""
    with file.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
