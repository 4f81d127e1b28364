"""The order of one stream's events: keys, event times, partitions, which are late, broken or null. All arrays, no loops
over events.

Invariant: everything is decided by (workload, stream's name, its place among the streams, partitions). Within a
partition events stand in the order they will be produced, so lateness, which is a function of that order, is counted
here exactly as a reader of the log counts it.
"""

import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schemas.mesh import Stream
from services.generator.workload import Domain, Shape, Workload

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
ZIPF_EXPONENT = 1.1
DEFAULT_KEYS = 10_000
DOMAIN_STEP = 1_000_000_000  # keeps the keys of two domains apart: a wrong join would show


@dataclass(frozen=True)
class Sequence:
    """One stream's events in producing order. Row i of every array is one event."""

    ts: Ints
    arrival: Ints  # when it is produced, on the event-time axis
    partition: Ints
    keys: dict[int, Ints]  # domain -> key index
    late: Bools  # as a reader of the log will find it
    broken: Bools
    null: Bools


def sequence(
    stream: Stream, place: int, domains: list[Domain], shape: Shape, work: Workload, event_rate: float, partitions: int
) -> Sequence:
    rng = np.random.default_rng([work.seed, zlib.crc32(stream.name.encode())])
    n = work.count
    index = np.arange(n, dtype=np.int64)
    ts = work.start_ms + (index * (1000.0 / event_rate)).astype(np.int64)
    if (
        work.keys == "related"
    ):  # each stream follows the one before it, and all parts of a chain meet within the shortest window
        hop_ms = min(shape.window_ms / (2 * max(len(shape.order), 1)), 5_000)
        ts += (place * hop_ms + rng.random(n) * hop_ms * (place > 0)).astype(np.int64)
    keys = {domain.number: _draw(rng, index, work, domain) for domain in domains}
    arrival = ts + (rng.random(n) * work.out_of_order_ms).astype(np.int64)
    first = keys[domains[0].number] if domains else index
    partition = (_mix(first) % np.uint64(partitions)).astype(np.int64)
    broken = rng.random(n) < work.broken
    null = (rng.random(n) < work.null) & ~broken
    wanted_late = (rng.random(n) < work.late) & ~broken
    back = 1 + (rng.random(n) * (2 * stream.lateness_ms + 10_000)).astype(np.int64)

    order = np.argsort(arrival, kind="stable")
    ts, arrival, partition, back = ts[order], arrival[order], partition[order], back[order]
    broken, null, wanted_late = broken[order], null[order], wanted_late[order]
    keys = {number: values[order] for number, values in keys.items()}
    ts = _set_back(ts, partition, broken, wanted_late, back + stream.lateness_ms, partitions)
    late = late_events(ts, partition, broken, stream.lateness_ms, partitions)
    return Sequence(ts, arrival, partition, keys, late, broken, null)


def late_events(ts: Ints, partition: Ints, broken: Bools, lateness_ms: int, partitions: int) -> Bools:
    """Which events a reader finds late: below (largest earlier ts of the partition) - lateness."""
    late = np.zeros(len(ts), np.bool_)
    for p in range(partitions):
        rows = np.flatnonzero((partition == p) & ~broken)
        if len(rows) > 1:
            largest = np.maximum.accumulate(ts[rows])
            late[rows[1:]] = ts[rows[1:]] < largest[:-1] - lateness_ms
    return late


def _set_back(ts: Ints, partition: Ints, broken: Bools, wanted: Bools, back: Ints, partitions: int) -> Ints:
    """Move the wanted events to before what their partition has already seen; a partition's first event cannot be
    late."""
    ts = ts.copy()
    for p in range(partitions):
        rows = np.flatnonzero((partition == p) & ~broken)
        if len(rows) > 1:
            seen = np.where(wanted[rows], np.iinfo(np.int64).min, ts[rows])
            seen[0] = ts[rows[0]]
            largest = np.maximum.accumulate(seen)[:-1]
            late = rows[1:][wanted[rows[1:]]]
            ts[late] = largest[wanted[rows[1:]]] - back[late]
    return ts


def _draw(rng: np.random.Generator, index: Ints, work: Workload, domain: Domain) -> Ints:
    n, k = len(index), work.key_count or DEFAULT_KEYS
    offset = domain.number * DOMAIN_STEP
    if work.keys == "uniform":
        return offset + rng.integers(0, k, n)
    if work.keys == "zipf":
        weights = np.cumsum(np.arange(1, k + 1, dtype=np.float64) ** -ZIPF_EXPONENT)
        ranks: Ints = np.searchsorted(weights, rng.random(n) * weights[-1]).astype(np.int64)
        return offset + ranks
    if work.keys == "sequential":
        return offset + index % k
    # related: one each, but a few take their neighbour's key, so that some find two partners and some none
    keys: Ints = index + (rng.random(n) < 0.03)
    return offset + (keys % work.key_count if work.key_count else keys)


def _mix(values: Ints) -> NDArray[np.uint64]:
    """splitmix64's finaliser: neighbouring keys go to unrelated partitions, the same in every run."""
    x = values.astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
