"""Result records have the same bytes whether they are written row by row or as columns."""

import json
import math
import random
import struct
from collections import Counter
from typing import Any

import pyarrow as pa

from schemas.mesh import FieldType, Stream
from schemas.rows import Rows, as_column
from topology.plan.plan import build_plan
from topology.query.cql import parse_query
from topology.results.results import FEW, ResultEncoder
from topology.state.window import OFFSET_BITS

FIELDS = {
    "k": FieldType.INT64,
    "s": FieldType.STRING,
    "f": FieldType.FLOAT64,
    "b": FieldType.BOOL,
    "ts": FieldType.TIMESTAMP,
}
ARROW = {"k": pa.int64(), "s": pa.large_utf8(), "f": pa.float64(), "b": pa.bool_(), "ts": pa.int64()}
STREAMS = {n: Stream(n, n, FIELDS, "ts", lateness_ms=20) for n in ("r0", "r1")}
PLAIN = ["x.k AS k", "y.s AS s", "x.f AS f", "y.b AS b", "x.ts AS t", "y.f AS g", "x.s AS text", 'y.k AS "ké"']
CONSTANT = ["7 AS seven", "'it''s \"so\"' AS quoted", "2.5 AS half", "1e20 AS large"]
COMPUTED = ["x.f / y.f AS ratio", "x.k + y.k AS total", "x.s || y.s AS both", "x.f * 1e9 AS f9", "x.k = 1 AS one"]
COMPUTED += ["COALESCE(y.s, '?') AS s2", "3 + 4 AS sum", "-x.f AS minus"]


def drawn_float(rng: random.Random) -> float:
    return rng.choice(
        (
            rng.choice((0.0, -0.0, 1.0, 1e15, 9999999999999998.0, 1e16, 1e-4, 1e-5, 1.2e-5, 9.9e-6, 5e-324, 1e300)),
            rng.choice((math.nan, math.inf, -math.inf, 0.1, 1 / 3, 2**53 + 2.0, -123456.789)),
            struct.unpack("<d", rng.randbytes(8))[0],
            rng.uniform(-1e6, 1e6),
            rng.uniform(-1, 1) * 10.0 ** rng.randint(-12, 15),
        )
    )


def drawn_text(rng: random.Random) -> str:
    codes = (range(0x20), range(0x20, 0x80), range(0x80, 0x100), range(0x2020, 0x2030), range(0x1F600, 0x1F610))
    return "".join(chr(rng.choice(rng.choice(codes))) for _ in range(rng.choice((0, 1, 3, 12))))


def drawn(rng: random.Random, field: str) -> Any:
    match field:
        case "k" | "ts":
            return rng.choice((0, 1, -1, 2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63), rng.randrange(10**6)))
        case "s":
            return drawn_text(rng)
        case "b":
            return rng.random() < 0.5
        case _:
            return drawn_float(rng)


def drawn_rows(rng: random.Random) -> Rows:
    count, columns = rng.choice((0, 1, 1, 2, 5, 30)), {}
    for alias in "xy":
        ids = [rng.randrange(1 << 10) << OFFSET_BITS | rng.randrange(1 << OFFSET_BITS) for _ in range(count)]
        columns[f"#{alias}"] = as_column(pa.array(ids, pa.int64()))
        columns[f"@{alias}"] = as_column(pa.array([rng.randrange(1, 2**45) for _ in range(count)], pa.int64()))
        for field, type in ARROW.items():
            nulls = rng.choice((0.0, 0.0, 0.4, 1.0))
            values = [None if rng.random() < nulls else drawn(rng, field) for _ in range(count)]
            columns[f"{alias}.{field}"] = as_column(pa.array(values, type))
    return Rows(columns, count)


def test_few_are_written_as_many_are() -> None:
    done: Counter[str] = Counter()
    for seed in range(60):
        rng = random.Random(seed)
        selected = rng.sample(PLAIN, rng.randint(1, 5)) + rng.sample(COMPUTED, rng.choice((0, 0, 1, 3)))
        selected += rng.sample(CONSTANT, rng.choice((0, 0, 1, 2)))
        rng.shuffle(selected)
        text = f"SELECT {', '.join(selected)} FROM r0 [RANGE 1 SECOND] AS x, r1 [RANGE 1 SECOND] AS y WHERE x.k = y.k"
        encoder = ResultEncoder(build_plan(parse_query("q", text, STREAMS), ("x", "y")))
        for _ in range(40):
            rows = drawn_rows(rng)
            many, few = encoder.encode_many(rows), encoder.encode_few(rows)
            assert encoder.encode(rows) == many, f"seed {seed}: {text}"
            done["few" if few is not None else "large numbers"] += 1
            done["records"] += len(many)
            assert few is None or few == many, f"seed {seed}: {text}"
            assert all(isinstance(json.loads(value), dict) for value in many.values)
    assert done["few"] > 1_200
    assert done["large numbers"] > 300
    assert done["records"] > 10_000


def test_many_are_written_as_columns() -> None:
    rng = random.Random(1)
    text = "SELECT x.k AS k, y.s AS s FROM r0 [RANGE 1 SECOND] AS x, r1 [RANGE 1 SECOND] AS y WHERE x.k = y.k"
    encoder = ResultEncoder(build_plan(parse_query("q", text, STREAMS), ("x", "y")))
    rows = Rows.concat([drawn_rows(rng) for _ in range(100)])
    assert len(rows) > FEW
    assert encoder.encode(rows) == encoder.encode_few(rows)
