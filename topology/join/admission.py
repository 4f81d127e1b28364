"""Whether a block is one that its receiver can take: from the right sender, of the right shape, within range.

A checksum keeps out damage; this keeps out blocks that are whole but wrong (another version's, another node's, forged).
What is refused here is set aside with its reason and changes no state.

Invariant: a block that is admitted has exactly the columns and types the plan says for its side, so no step fails on
it.
"""

import numpy as np
import pyarrow as pa

from schemas.block import NO_WATERMARK, Block, Header, Position
from schemas.errors import BlockError
from schemas.mesh import FieldType
from schemas.rows import I64, Column, Rows
from topology.ingest.decode import ARROW_TYPES, MAX_TIME_MS, MIN_TIME_MS
from topology.plan.heralds import Herald, part_hash
from topology.plan.plan import Input, Plan
from topology.state.hashing import combine, hash_key
from topology.state.window import ALWAYS_MS, COMPLETE, HASH, OFFSET_BITS, part_id, part_time

_SEQUENCE_MOST = 1 << 62


class Admission:
    """The rules for blocks of one sender."""

    def __init__(self, plan: Plan, input: Input, partition: int, partitions: int, hashed: bool = True) -> None:
        self.input, self.partition, self.partitions = input, partition, partitions
        types: dict[str, pa.DataType] = {name(a): pa.int64() for a in input.aliases for name in (part_id, part_time)}
        types |= {str(column): ARROW_TYPES[plan.query.types[column]] for column in input.columns}
        if hashed:
            types[HASH] = pa.uint64()
        self.types = types
        self._tables = {alias for alias in input.aliases if plan.query.source(alias).is_table}
        self._never_null = {n for n in types if n[0] in "#@"} | {str(c) for c in (*input.key, *input.linked)}

    def check(self, block: Block, epoch: int) -> None:
        header = block.header
        if header.sender != self.input.name:
            raise BlockError(f"sent by {header.sender!r}, but this side is fed by {self.input.name!r}")
        _check_epoch(header, epoch)
        if header.kind not in ("rows", "watermark"):
            raise BlockError(f"of kind {header.kind!r}, which nothing sends yet")
        self._check_place(header)
        _check_steps(header, 0 if block.rows is None else len(block.rows))
        if block.rows is not None:
            self._check_rows(block.rows)
            if self.input.is_source and len(block.rows):
                self._check_inside(block.rows[part_id(self.input.name)], header.positions)

    def _check_place(self, header: Header) -> None:
        if self.input.is_source != bool(header.positions):
            raise BlockError(
                "source positions are missing" if self.input.is_source else "source positions in a join node's block"
            )
        check_sender(header, None if self.input.is_source else self.partitions)
        for p in header.positions:
            if not (0 <= p.partition < header.sender_partitions and 0 <= p.first <= p.next < 1 << 48):
                raise BlockError(f"position {p.partition}:{p.first}-{p.next} is out of range")
            _check_time(p.watermark)

    def _check_inside(self, ids: I64, positions: tuple[Position, ...]) -> None:
        """Every row is one that the positions speak of, once: repeats are found by them."""
        inside = np.zeros(len(ids), np.bool_)
        for p in positions:
            base = p.partition << OFFSET_BITS
            inside |= (ids >= base + p.first) & (ids < base + p.next)
        if not inside.all() or len(np.unique(ids)) < len(ids):
            raise BlockError("holds rows outside its positions, or one twice")

    def _check_rows(self, rows: Rows) -> None:
        if rows.columns.keys() != self.types.keys():
            raise BlockError(f"has columns {sorted(rows.columns)}, the plan says {sorted(self.types)}")
        for name, column in rows.columns.items():
            if _type(column) != self.types[name]:
                raise BlockError(f"column {name} is {_type(column)}, the plan says {self.types[name]}")
            if name in self._never_null and not isinstance(column, np.ndarray) and column.null_count:
                raise BlockError(f"column {name} holds nulls")
        if len(rows) == 0:
            return
        for alias in self.input.aliases:
            times, ids = rows[part_time(alias)], rows[part_id(alias)]
            low, high = (ALWAYS_MS, ALWAYS_MS) if alias in self._tables else (MIN_TIME_MS, MAX_TIME_MS)
            if times.min() < low or times.max() > high:
                raise BlockError(f"event time of {alias} is out of range")
            if ids.min() < 0:
                raise BlockError(f"ids of {alias} are out of range")
        self._check_hashes(rows)

    def _check_hashes(self, rows: Rows) -> None:
        if HASH in self.types and (hash_key([rows[str(c)] for c in self.input.key]) != rows[HASH]).any():
            raise BlockError("a row's hash is not its key's")
        if HASH in self.types and (rows[HASH] % np.uint64(self.partitions) != self.partition).any():
            raise BlockError(f"holds rows of another partition than {self.partition}")


class HeraldAdmission(Admission):
    """The rules for blocks that herald a stream: hashes without the columns they are of."""

    def __init__(self, plan: Plan, herald: Herald, partition: int, partitions: int) -> None:
        super().__init__(plan, Input(herald.alias, (herald.alias,), (), herald.columns), partition, partitions)
        self._parts = [part_hash(k) for k in range(len(herald.parts))] if len(herald.parts) > 1 else []
        self.types |= dict.fromkeys(self._parts, pa.uint64())
        self._never_null |= set(self._parts)

    def _check_hashes(self, rows: Rows) -> None:
        if self._parts and (combine([rows[name] for name in self._parts]) != rows[HASH]).any():
            raise BlockError("a herald's hash is not that of its parts")


def check_sender(header: Header, partitions: int | None) -> None:
    """Numbers within range; `partitions` is what the sender must have, if that is known."""
    if not 0 <= header.sequence < _SEQUENCE_MOST or not 0 <= header.sender_partition < header.sender_partitions:
        raise BlockError(f"sequence {header.sequence} of partition {header.sender_partition} is out of range")
    if not 0 <= header.incarnation < _SEQUENCE_MOST:
        raise BlockError(f"incarnation {header.incarnation} is out of range")
    if partitions is not None and header.sender_partitions != partitions:
        raise BlockError(f"sent by one of {header.sender_partitions} partitions, this mesh has {partitions}")
    _check_time(header.watermark)


def _check_steps(header: Header, rows: int) -> None:
    """Steps, if there are several, are those of a join node, in order, and make up all its rows."""
    sequences = [step.sequence for step in header.steps]
    ordered = sequences == sorted(set(sequences)) and (
        not sequences or 0 <= sequences[0] <= sequences[-1] <= header.sequence
    )
    whole = not header.steps or (
        all(step.rows > 0 for step in header.steps) and sum(step.rows for step in header.steps) == rows
    )
    if not ordered or not whole or (header.steps and header.positions):
        raise BlockError(
            f"steps {[(step.sequence, step.rows) for step in header.steps]} are not those of {rows} rows up to sequence"
            f" {header.sequence}"
        )


def check_node_header(header: Header, epoch: int, partitions: int) -> None:
    """The header of a block about demand: of this plan, from a join node."""
    _check_epoch(header, epoch)
    if header.positions:
        raise BlockError("source positions in a join node's block")
    if header.steps:
        raise BlockError("several steps in a block about demand")
    check_sender(header, partitions)


def _check_epoch(header: Header, epoch: int) -> None:
    if header.epoch != epoch:
        raise BlockError(f"of plan epoch {header.epoch}, but epoch {epoch} runs here")


def _check_time(time: int) -> None:
    if time != COMPLETE and not NO_WATERMARK - MAX_TIME_MS <= time <= MAX_TIME_MS:
        raise BlockError(f"watermark {time} is out of range")


def _type(column: Column) -> pa.DataType:
    if not isinstance(column, np.ndarray):
        return pa.large_utf8() if column.type == pa.utf8() else column.type
    return pa.from_numpy_dtype(column.dtype)


assert set(ARROW_TYPES) == set(FieldType)
