"""The whole tree of joinmesh errors, sorted by what the caller does next.

    JoinmeshError                 one clear line for a person; `joinmesh` prints it and exits 1
    ├── MeshFileError             stop: the mesh file is wrong (file, line, what would be accepted)
    ├── QueryError                stop: a query is wrong (query, line, column, what would be accepted)
    ├── PlanError                 stop: a pinned plan does not fit its query
    ├── TopicError                stop: a topic is missing or has wrong settings
    ├── MachineError         stop: the machine lacks something (Java, disk, a free port, a broker)
    │   └── AccessError           stop: Kafka refuses who asks (password, certificate, a missing right)
    ├── StateError                stop: stored state does not fit the log any more; says what to do
    └── BlockError                set aside: bytes in an inner topic that are not ours

Invariant: the message alone is enough to act on; it starts lower-case and says what was tried.
"""


class JoinmeshError(Exception):
    """Root of every error that is meant for a person."""


class MeshFileError(JoinmeshError):
    """The mesh file cannot be used as it is."""

    def __init__(self, message: str, *, file: str = "mesh.yaml", line: int | None = None) -> None:
        where = f"{file}:{line}" if line is not None else file
        super().__init__(f"{where}: {message}")
        self.file, self.line = file, line


class QueryError(JoinmeshError):
    """A query cannot be used as it is. Line and column count from 1 within the query's own text."""

    def __init__(self, message: str, *, query: str, line: int | None = None, column: int | None = None) -> None:
        where = f"query {query}"
        if line is not None:
            where += f", line {line}" + (f", column {column}" if column is not None else "")
        super().__init__(f"{where}: {message}")
        self.query, self.line, self.column = query, line, column


class PlanError(JoinmeshError):
    """A plan does not answer its query."""


class TopicError(JoinmeshError):
    """A Kafka topic is missing, or is there with settings that would lose data."""


class MachineError(JoinmeshError):
    """The machine lacks something the command needs."""


class AccessError(MachineError):
    """Kafka refuses who asks; the same start may work once that is mended."""


class StateError(JoinmeshError):
    """Stored state and the log do not fit together any more."""


class BlockError(JoinmeshError):
    """Bytes that were read as a block or a control message are not one."""
