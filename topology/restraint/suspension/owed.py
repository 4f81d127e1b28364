"""What a producer owes when values are resumed: Resume_Production of the JIT paper (section IV-B).

Invariant: given are exactly the pairs of stored rows that show a value which just ended, that nobody has suspended now,
and that were never free before: those that are missing.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from schemas.rows import U64, Rows
from topology.plan.shapes import Shape, shape_hash
from topology.restraint.suspension.suspended import ShapeTable, Suspended, among, never_free
from topology.state.lookup import rows_with
from topology.state.meeting import NEVER

if TYPE_CHECKING:
    from topology.join.partition import Partition


def owed_pairs(
    join: "Partition",
    suspended: Suspended,
    ended: Sequence[tuple[ShapeTable, npt.NDArray[Any]]],
    now: int,
    kept_from: int,
) -> Iterator[Rows]:
    """Pairs that show an entry which just ended and that were never free before; of rows that a consumer may still
    want."""
    earlier: list[tuple[Shape, U64]] = []
    for table, entries in ended:
        shape = table.shape
        # A row of one side shows it, or only several together do. The empty sub-tuple: every row of the first.
        lead, names = shape.lead(join.node.inputs)
        hashes = np.unique(entries["hash"] if any(shape.sides) else entries["left"])
        found = rows_with(join.states[lead], names, hashes)
        pairs, since = None, None
        if found is not None:
            pairs, since = join.join_again(lead, found.take(np.flatnonzero(found.ends >= kept_from)))
        if pairs is not None and since is not None:
            shown = [(t, shape_hash(pairs, t.shape.names)) for t in suspended.used]
            of_shape = {t.shape: h for t, h in shown}
            keep = among(of_shape[shape], entries["hash"]) & (since != NEVER)
            for other, done in earlier:
                keep &= ~among(of_shape[other], done)
            for t, h in shown:
                keep &= ~t.covers(h)
            pairs = pairs.filter(keep)
            pairs = pairs.filter(never_free([(t, h[keep]) for t, h in shown], since[keep], now))
            if len(pairs):
                yield pairs.select(join.carried)
        earlier.append((shape, entries["hash"]))
