"""RocksDB as a `KeyValue`, and which directory holds a partition's newest state.

A partition's state lives in `p<partition>` or, when a stopped-but-not-dead worker still holds that one's lock, in a
fresh `p<partition>@<number>` that is rebuilt from the input topic.

Invariant: the directory in use is the newest one, and nobody else has it open (RocksDB's lock). A full disk ends the
process: the handle stays unusable even when space returns, while what is stored is intact.
"""

import logging
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from rocksdict import AccessType, Options, Rdict, WriteBatch

from schemas.errors import MachineError

log = logging.getLogger("joinmesh.rocks")


class RocksKeyValue:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_write_buffer_size(32 << 20)
        options.set_max_background_jobs(2)
        options.set_keep_log_file_num(2)
        try:
            self._db = Rdict(str(directory), options=options, access_type=AccessType.read_write())
        except Exception as error:
            raise MachineError(f"state in {directory} cannot be opened: {error}") from None

    def get(self, key: bytes) -> bytes | None:
        found = self._db.get(key)
        return bytes(found) if found is not None else None

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        iterator = self._db.iter()
        iterator.seek(prefix)
        while iterator.valid():
            key = bytes(iterator.key())
            if not key.startswith(prefix):
                return
            yield key, bytes(iterator.value())
            iterator.next()

    def write(self, puts: Sequence[tuple[bytes, bytes]], deletes: Sequence[bytes]) -> None:
        batch = WriteBatch(raw_mode=True)
        for key in deletes:
            batch.delete(key)
        for key, value in puts:
            batch.put(key, value)
        try:
            self._db.write(batch)
        except Exception as error:
            hint = (
                "the disk is full: free some space, the service goes on from what is stored"
                if _is_full(error)
                else "see the message"
            )
            raise MachineError(f"state in {self.directory} cannot be written ({error}); {hint}") from None

    def close(self) -> None:
        self._db.close()


def _is_full(error: Exception) -> bool:
    return "no space" in str(error).lower() or "quota" in str(error).lower()


def open_newest(parent: Path, partition: int, now_ms: int) -> RocksKeyValue:
    """The newest state directory of a partition; a fresh one if another process still holds it."""
    name = re.compile(rf"p{partition}(?:@(\d+))?\Z")
    found = (
        [(int(m[1] or 0), path) for path in parent.glob(f"p{partition}*") if (m := name.match(path.name))]
        if parent.exists()
        else []
    )
    newest = max(found, default=(0, parent / f"p{partition}"))
    try:
        engine = RocksKeyValue(newest[1])
    except MachineError as error:
        if "lock" not in str(error).lower():
            raise
        fresh = parent / f"p{partition}@{now_ms}"
        log.warning(
            "%s is held by another worker that no longer owns the partition; rebuilding in %s",
            newest[1].name,
            fresh.name,
        )
        return RocksKeyValue(fresh)
    for number, path in found:
        if number < newest[0]:
            shutil.rmtree(path, ignore_errors=True)  # an older one, left by a worker that was taken for dead
    return engine
