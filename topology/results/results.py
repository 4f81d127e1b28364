"""What leaves the mesh: rows of the root join into result records.

Invariant: a record's key is the ids of its parts in FROM order, its value the flat JSON of the selected columns, its
timestamp the start of its validity. Repeated rows of the root are dropped by their sequence, so each result is made
once.
"""

from dataclasses import dataclass

import polars as pl

from schemas.block import Block, FromNode
from schemas.rows import Rows
from topology.message.bundle import unseen_of
from topology.plan.plan import Plan
from topology.query.conditions import to_frame
from topology.query.expression import columns_of, compile_expression
from topology.state.window import OFFSET_BITS, OFFSET_MASK, part_id, part_time


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

    def encode(self, rows: Rows) -> Results:
        frame = to_frame(rows, self._names)
        frame = frame.select(
            self._key.alias("#key"), self._time.alias("#time"), *self._outputs
        )  # a literal spreads over all rows
        values = frame.drop("#key", "#time").write_ndjson().split("\n")[: len(rows)]
        return Results(frame["#key"].to_list(), values, frame["#time"].to_list())


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
