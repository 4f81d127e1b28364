"""From rows to polars, for what polars is good at: evaluating compiled expressions on whole columns.

Invariant: only the columns an expression reads are converted, and a condition keeps a row only when it is true (null is
not).
"""

from collections.abc import Iterable, Sequence

import numpy as np
import polars as pl

from schemas.rows import Mask, Rows
from topology.query.expression import Expression, columns_of, compile_expression


def to_frame(rows: Rows, names: Iterable[str]) -> pl.DataFrame:
    """Some columns as a polars frame."""
    return pl.DataFrame([pl.Series(name, rows[name]) for name in dict.fromkeys(names)])


class Conditions:
    """Conjuncts that a row must fulfil."""

    def __init__(self, expressions: Sequence[Expression]) -> None:
        self._names = [str(column) for expression in expressions for column in columns_of(expression)]
        self._compiled = [compile_expression(expression) for expression in expressions]

    def __bool__(self) -> bool:
        return bool(self._compiled)

    def mask(self, rows: Rows) -> Mask:
        if not self._names:  # conditions without a column, such as 1 = 0
            holds = pl.select(pl.all_horizontal(self._compiled)).item() is True
            return np.full(len(rows), holds)
        held = to_frame(rows, self._names).select(pl.all_horizontal(self._compiled).fill_null(False)).to_series()
        return held.to_numpy()
