"""What leaves the mesh: rows of the root join into result records.

Invariant: a record's key is the ids of its parts in FROM order, its value the flat JSON of the selected columns, its
timestamp the start of its validity. Repeated rows of the root are dropped by their sequence, so each result is made
once. Few rows are written one by one and many as columns, because polars takes about a millisecond for any number of
them; a record has the same bytes either way.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import polars as pl

from schemas.block import Block, FromNode
from schemas.rows import Column as ColumnOfRows
from schemas.rows import Rows
from topology.message.bundle import unseen_of
from topology.plan.plan import Plan
from topology.query.conditions import to_frame
from topology.query.expression import Column, Literal, columns_of, compile_expression
from topology.state.window import OFFSET_BITS, OFFSET_MASK, part_id, part_time

FEW = 200  # rows for which one by one is the quicker way
_SIGNED_EXPONENT = 1e16  # from here on polars writes 1e+16 where msgspec writes 1e16
_encode_json = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Results:
    keys: list[str]
    values: list[str]
    times: list[int]

    def __len__(self) -> int:
        return len(self.keys)


class ResultEncoder:
    """Turns the root's rows into records, a block at a time."""

    def __init__(self, plan: Plan) -> None:
        query = plan.query
        ids: list[pl.Expr] = []
        for source in query.sources:
            id = pl.col(part_id(source.alias))
            lead = "" if not ids else "|"
            ids += [
                pl.lit(f"{lead}{source.stream}:"),
                (id.cast(pl.UInt64) // (1 << OFFSET_BITS)).cast(pl.String),
                pl.lit(":"),
                (id & OFFSET_MASK).cast(pl.String),
            ]
        self._key = pl.concat_str(ids)
        self._time = pl.max_horizontal([part_time(alias) for alias in query.aliases])
        self._names = [name(alias) for alias in query.aliases for name in (part_id, part_time)]
        self._names += [str(column) for output in query.outputs for column in columns_of(output.expression)]
        self._outputs = [compile_expression(o.expression).alias(o.name) for o in query.outputs]

        self._parts = [(f"{s.stream}:", part_id(s.alias), part_time(s.alias)) for s in query.sources]
        self._given = [(o.name, o.expression) for o in query.outputs]
        computed = [o for o in query.outputs if not isinstance(o.expression, Column | Literal)]
        self._computed = [compile_expression(o.expression).alias(o.name) for o in computed]
        self._read = [str(column) for o in computed for column in columns_of(o.expression)] or self._names[:1]

    def encode(self, rows: Rows) -> Results:
        return (self.encode_few(rows) if len(rows) <= FEW else None) or self.encode_many(rows)

    def encode_few(self, rows: Rows) -> Results | None:
        """Row by row; nothing if there is a number that would be written otherwise."""
        outputs = self._values(rows)
        if any(type(v) is float and abs(v) >= _SIGNED_EXPONENT for column in outputs.values() for v in column):
            return None
        values = [
            _encode_json(dict(zip(outputs, row, strict=True))).decode() for row in zip(*outputs.values(), strict=True)
        ]
        ids = [
            [f"{lead}{id >> OFFSET_BITS}:{id & OFFSET_MASK}" for id in rows.ints(name).tolist()]
            for lead, name, _ in self._parts
        ]
        times = [rows.ints(name).tolist() for _, _, name in self._parts]
        return Results(
            ["|".join(parts) for parts in zip(*ids, strict=True)],
            values,
            [max(parts) for parts in zip(*times, strict=True)],
        )

    def _values(self, rows: Rows) -> dict[str, list[Any]]:
        """Each selected column; only those that have to be computed go through polars."""
        made = (
            to_frame(rows, self._read).select(pl.col(self._read[0]).alias("#"), *self._computed)
            if self._computed
            else None
        )
        found: dict[str, list[Any]] = {}
        for name, expression in self._given:
            if isinstance(expression, Column):
                found[name] = _listed(rows[str(expression)])
            elif isinstance(expression, Literal):
                found[name] = [expression.value] * len(rows)
            else:
                assert made is not None
                found[name] = made[name].to_list()
        return found

    def encode_many(self, rows: Rows) -> Results:
        frame = to_frame(rows, self._names)
        frame = frame.select(
            self._key.alias("#key"), self._time.alias("#time"), *self._outputs
        )  # a literal spreads over all rows
        values = frame.drop("#key", "#time").write_ndjson().split("\n")[: len(rows)]
        return Results(frame["#key"].to_list(), values, frame["#time"].to_list())


def _listed(column: ColumnOfRows) -> list[Any]:
    return column.tolist() if isinstance(column, np.ndarray) else column.to_pylist()  # type: ignore[no-any-return]


class SequenceFilter:
    """Lets each row of the root through once. `last` is what must survive a restart."""

    def __init__(self, last: int = -1) -> None:
        self.last = last

    def unseen(self, block: Block) -> Rows | None:
        """The rows of a block that are new."""
        header = block.header
        assert isinstance(header, FromNode)
        new = None if block.rows is None else unseen_of(header, block.rows, self.last)
        self.last = max(self.last, header.sequence)
        return new
