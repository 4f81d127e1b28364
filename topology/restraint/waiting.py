"""Which rows wait because they show a value that is suspended or hidden.

Invariant: a stored run is looked through once for every change of what is suspended, or only those of its rows that are
asked about, if they are few.
"""

from collections.abc import Sequence

import numpy as np

from schemas.rows import I64, Mask
from topology.restraint.tables import ShapeTable
from topology.state.hashing import shape_hash
from topology.state.lookup import shown_by
from topology.state.window_state import Run

_HIDDEN = ("hidden",)


def waiting_rows(tables: Sequence[ShapeTable], side: int, run: Run) -> Mask:
    """Which new rows of a side show a suspended value; the tables take note of them."""
    waits = np.zeros(len(run), np.bool_)
    for table in tables:
        if table.shape.sides[side] and table.count_active:
            shown = shape_hash(run.rows, table.shape.names)
            covered = table.covers(shown)
            if covered.any():
                waits |= covered
                table.waits(shown[covered], run.ends[covered])
    return waits


def hidden_rows(tables: Sequence[ShapeTable], side: int, run: Run, at: I64) -> Mask | None:
    """Which of the rows at these places of a stored run of a side show a suspended value; None if no value is.

    If they are few, each is looked up; else all rows of the run are, once for every change of what is suspended.
    """
    mine = [t for t in tables if t.shape.sides[side] and t.count_active]
    if not mine:
        return None
    version = tuple(t.version for t in tables)
    known = run.indexes.get(_HIDDEN)
    if (
        known is None or known[0] is not tables or known[1] != version
    ):  # a node that starts again counts its versions from the beginning
        few = 2 * len(at) < len(run)
        mask = np.zeros(len(at) if few else len(run), np.bool_)
        for table in mine:
            shown = shown_by(run, table.shape.names)
            mask |= table.covers(shown[at] if few else shown)
        if few:
            return mask
        known = run.indexes[_HIDDEN] = (tables, version, mask)
    found: Mask = known[2][at]
    return found
