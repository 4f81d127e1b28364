"""What one small block costs in ingest: from the bytes of one fetched record to the bytes of its block, CPU time.

`python -m tests.benchmarks.steps_ingest` prints it; `small_block_us` is for other tools.
"""

import json
import time

from schemas.block import encode_block
from schemas.control import PlanPublished
from schemas.mesh import FieldType, Stream
from topology.ingest.effects import Emit
from topology.ingest.ingest import Fetched, Ingestion, Stored
from topology.plan.plan import build_plan
from topology.query.cql import parse_query

FIELDS = {
    "order_id": FieldType.INT64,
    "user_id": FieldType.INT64,
    "amount": FieldType.FLOAT64,
    "country": FieldType.STRING,
    "ts": FieldType.TIMESTAMP,
}
STREAMS = {name: Stream(name, name, FIELDS, "ts", lateness_ms=5_000) for name in ("orders", "payments")}
TEXT = (
    "SELECT o.order_id, o.country, p.amount AS paid FROM orders [RANGE 10 MINUTES] AS o, payments [RANGE 10 MINUTES]"
    " AS p WHERE o.order_id = p.order_id"
)


def small_block_us(repeats: int = 3_000, partitions: int = 4, rows: int = 1) -> float:
    """Microseconds of CPU time for each block, of rounds that bring `rows` records each; of ten parts of all the rounds
    the best, because others use the machine too."""
    query = parse_query("q", TEXT, STREAMS)
    plan = build_plan(query, ("o", "p"))
    published = PlanPublished("q", 1, TEXT, "(o p)", "", 0, {})
    ingestion = Ingestion(STREAMS, partitions, {"q": [(published, plan)]}, dict.fromkeys(STREAMS, 1), 1)
    ingestion.assigned([Stored(name, 0, -1, None, 0, 0) for name in STREAMS], 0.0)
    values: list[bytes | None] = [
        json.dumps(
            {"order_id": i, "user_id": i % 97, "amount": i / 7, "country": "de", "ts": 1_700_000_000_000 + i}
        ).encode()
        for i in range(repeats * rows)
    ]
    found: list[float] = []
    blocks, begun = 0, time.process_time()
    for k in range(repeats):
        if k and k % (repeats // 10) == 0:
            found.append((time.process_time() - begun) / blocks * 1e6)
            blocks, begun = 0, time.process_time()
        offsets = list(range(k * rows, (k + 1) * rows))
        ingestion.fetched({("orders", 0): Fetched(offsets, values[k * rows : (k + 1) * rows])}, {})
        for effect in ingestion.round(0.0):
            if isinstance(effect, Emit):
                for send in effect.sends:
                    encode_block(send.block)
                    blocks += 1
    return min(found)


if __name__ == "__main__":
    print(f"a block of one row: {small_block_us():.0f} us")
    print(f"a block of about four rows: {small_block_us(rows=16):.0f} us")
