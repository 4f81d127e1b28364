"""Whether a block is one that its receiver can take: from the right sender, of the right shape, within range.

A checksum keeps out damage; this keeps out blocks that are whole but wrong (another version's, another node's, forged).
What is refused here is set aside with its reason and changes no state.

Invariant: a block that is admitted has exactly the columns and types the plan says for its side, so no step fails on
it.
"""

import numpy as np
import pyarrow as pa

from schemas.block import (
    NO_WATERMARK,
    Block,
    Composites,
    Events,
    FromNode,
    FromSource,
    Header,
    Heralds,
    NodeEnded,
    Position,
    Reached,
    Resume,
    ResumeDone,
    SourceEnded,
    Suspend,
)
from schemas.errors import BlockError
from schemas.rows import I64, Column, Rows
from topology.plan.heralds import Herald, part_hash
from topology.plan.plan import Input, Plan
from topology.state.hashing import combine, hash_key
from topology.state.types import ARROW_TYPES, MAX_TIME_MS, MIN_TIME_MS
from topology.state.window import ALWAYS_MS, COMPLETE, HASH, OFFSET_BITS, OFFSET_MASK, part_id, part_time
from topology.state.window_state import least, most

_SEQUENCE_MOST = 1 << 62
_DTYPES = {pa.int64(): np.dtype(np.int64), pa.uint64(): np.dtype(np.uint64), pa.float64(): np.dtype(np.float64)}


class Admission:
    """The rules for the rows of one sender."""

    def __init__(self, plan: Plan, input: Input, partition: int, partitions: int, hashed: bool = True) -> None:
        self.input, self.partition, self.partitions = input, partition, partitions
        types: dict[str, pa.DataType] = {name(a): pa.int64() for a in input.aliases for name in (part_id, part_time)}
        types |= {str(column): ARROW_TYPES[plan.query.types[column]] for column in input.columns}
        if hashed:
            types[HASH] = pa.uint64()
        self.types = types
        self._tables = {alias for alias in input.aliases if plan.query.source(alias).is_table}
        self._never_null = {n for n in types if n[0] in "#@"} | {str(c) for c in (*input.key, *input.linked)}
        self._kind: type[Header] = Events if input.is_source else Composites
        self._dtypes = {name: _DTYPES.get(type) for name, type in types.items()}

    def check(self, block: Block) -> None:
        header, rows = block.header, block.rows
        if header.sender != self.input.name:
            raise BlockError(f"sent by {header.sender!r}, but this side is fed by {self.input.name!r}")
        if not isinstance(header, self._kind):
            raise BlockError(f"of kind {header.kind!r}, which {header.sender} does not send")
        check_header(header, self.partitions)
        if isinstance(header, Composites):
            _check_steps(header, 0 if rows is None else len(rows))
        if rows is not None:
            self._check_rows(rows)
            if isinstance(header, FromSource) and len(rows):
                self._check_inside(rows[part_id(self.input.name)], header.positions)

    def _check_inside(self, ids: I64, positions: tuple[Position, ...]) -> None:
        """Every row is one that the positions speak of, once: repeats are found by them."""
        if len(ids) == 1:
            partition, offset = int(ids[0]) >> OFFSET_BITS, int(ids[0]) & OFFSET_MASK
            good = any(p.partition == partition and p.first <= offset < p.next for p in positions)
        else:
            inside = np.zeros(len(ids), np.bool_)
            for p in positions:
                base = p.partition << OFFSET_BITS
                inside |= (ids >= base + p.first) & (ids < base + p.next)
            good = bool(inside.all()) and len(np.unique(ids)) == len(ids)
        if not good:
            raise BlockError("holds rows outside its positions, or one twice")

    def _check_rows(self, rows: Rows) -> None:
        if rows.columns.keys() != self.types.keys():
            raise BlockError(f"has columns {sorted(rows.columns)}, the plan says {sorted(self.types)}")
        for name, column in rows.columns.items():
            if isinstance(column, np.ndarray) and column.dtype == self._dtypes[name]:
                continue
            if _type(column) != self.types[name]:
                raise BlockError(f"column {name} is {_type(column)}, the plan says {self.types[name]}")
            if name in self._never_null and not isinstance(column, np.ndarray) and column.null_count:
                raise BlockError(f"column {name} holds nulls")
        if len(rows) == 0:
            return
        for alias in self.input.aliases:
            times, ids = rows[part_time(alias)], rows[part_id(alias)]
            low, high = (ALWAYS_MS, ALWAYS_MS) if alias in self._tables else (MIN_TIME_MS, MAX_TIME_MS)
            if least(times) < low or most(times) > high:
                raise BlockError(f"event time of {alias} is out of range")
            if least(ids) < 0:
                raise BlockError(f"ids of {alias} are out of range")
        self._check_hashes(rows)

    def _check_hashes(self, rows: Rows) -> None:
        if HASH in self.types and (hash_key([rows[str(c)] for c in self.input.key]) != rows[HASH]).any():
            raise BlockError("a row's hash is not its key's")
        if HASH in self.types and (rows[HASH] % np.uint64(self.partitions) != self.partition).any():
            raise BlockError(f"holds rows of another partition than {self.partition}")


class HeraldAdmission(Admission):
    """The rules for blocks that herald a stream: hashes without the columns they are of."""

    def __init__(self, plan: Plan, herald: Herald, number: int, partition: int, partitions: int) -> None:
        super().__init__(plan, Input(herald.alias, (herald.alias,), (), herald.columns), partition, partitions)
        self._parts = [part_hash(k) for k in range(len(herald.parts))] if len(herald.parts) > 1 else []
        self.types |= dict.fromkeys(self._parts, pa.uint64())
        self._dtypes |= dict.fromkeys(self._parts, np.dtype(np.uint64))
        self._never_null |= set(self._parts)
        self._kind, self._number = Heralds, number

    def check(self, block: Block) -> None:
        super().check(block)
        if isinstance(block.header, Heralds):
            if block.header.herald != self._number:
                raise BlockError(
                    f"of herald {block.header.herald}, but {self.input.name} is herald {self._number} here"
                )
            _check_time(block.header.latest)

    def _check_hashes(self, rows: Rows) -> None:
        if self._parts and (combine([rows[name] for name in self._parts]) != rows[HASH]).any():
            raise BlockError("a herald's hash is not that of its parts")


def check_header(header: Header, partitions: int) -> None:
    """Numbers within range; `partitions` is what a join node has."""
    if isinstance(header, FromSource):
        if not header.positions:
            raise BlockError("source positions are missing")
        for p in header.positions:
            if not (0 <= p.partition < header.partitions and 0 <= p.first <= p.next < 1 << 48):
                raise BlockError(f"position {p.partition}:{p.first}-{p.next} is out of range")
            _check_time(p.watermark)
    elif isinstance(header, FromNode):
        if not 0 <= header.sequence < _SEQUENCE_MOST or not 0 <= header.partition < header.partitions:
            raise BlockError(f"sequence {header.sequence} of partition {header.partition} is out of range")
        if not 0 <= header.incarnation < _SEQUENCE_MOST:
            raise BlockError(f"incarnation {header.incarnation} is out of range")
        if header.partitions != partitions:
            raise BlockError(f"sent by one of {header.partitions} partitions, this mesh has {partitions}")
        if isinstance(header, Composites):
            _check_time(header.watermark)
        if isinstance(header, Suspend | Resume | Reached):
            _check_time(header.reached)
        if isinstance(header, Resume | ResumeDone) and not 0 <= header.ticket < _SEQUENCE_MOST:
            raise BlockError(f"ticket {header.ticket} is out of range")


def check_barrier(block: Block, sender: Admission | None, partitions: int) -> None:
    """That a sender of ours has ended an epoch: ingest speaks for streams, a join for itself."""
    header = block.header
    assert isinstance(header, SourceEnded | NodeEnded)
    if sender is None or sender.input.is_source != isinstance(header, SourceEnded):
        raise BlockError(f"{header.kind} of {header.sender!r}, which sends nothing of that kind here")
    if block.rows is not None:
        raise BlockError(f"{header.kind} with rows")
    check_header(header, partitions)


def check_epoch(header: Header, newest: int) -> None:
    """A plan that is known; one that has retired may still be spoken of by a sender that repeats itself."""
    if not 0 < header.epoch <= newest:
        raise BlockError(f"of plan epoch {header.epoch}, but epoch {newest} is the newest here")


def _check_steps(header: Composites, rows: int) -> None:
    """Steps, if there are several, are in order and make up all its rows."""
    sequences = [step.sequence for step in header.steps]
    ordered = sequences == sorted(set(sequences)) and (
        not sequences or 0 <= sequences[0] <= sequences[-1] <= header.sequence
    )
    whole = not header.steps or (
        all(step.rows > 0 for step in header.steps) and sum(step.rows for step in header.steps) == rows
    )
    if not ordered or not whole:
        raise BlockError(
            f"steps {[(step.sequence, step.rows) for step in header.steps]} are not those of {rows} rows up to"
            f" sequence {header.sequence}"
        )


def _check_time(time: int) -> None:
    if time != COMPLETE and not NO_WATERMARK - MAX_TIME_MS <= time <= MAX_TIME_MS:
        raise BlockError(f"watermark {time} is out of range")


def _type(column: Column) -> pa.DataType:
    if not isinstance(column, np.ndarray):
        return pa.large_utf8() if column.type == pa.utf8() else column.type
    return pa.from_numpy_dtype(column.dtype)
