"""The whole audit on a real broker and a real Spark: right results pass, every kind of damage is found with its exact
count.

The expected results here come from a third, naive join written in this file: three loops and the definition of
validity.
"""

import argparse
import json
import random
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from schemas import topics
from schemas.errors import JoinmeshError, TopicError
from schemas.mesh import Mesh, parse_mesh
from services.audit import add_arguments, main, run_audit
from services.audit.session import start_session
from services.audit.verdict import Verdict

START, BIG = 1_700_000_000_000, 2**53 + 1
WINDOWS = {"orders": 10_000, "payments": 20_000, "shipments": 45_000}
LATENESS = {"orders": 2_000, "payments": 0, "shipments": 5_000}
QUERY = """SELECT o.order_id, p.amount AS paid, s.carrier, o.amount - p.amount AS rest, s.sent, o.vip
    FROM orders [RANGE 10 SECONDS] AS o, shipments [RANGE 45 s] s, payments [RANGE 20 SECONDS] AS p
    WHERE o.order_id = p.order_id AND p.pid = s.pid -- a chain: orders and shipments share nothing
      AND (o.amount > p.amount OR s.carrier LIKE 'it''s\\_%') AND p.amount >= -1.5"""
ORDER = ("orders", "shipments", "payments")
BROKEN = [
    b"",
    b"{",
    b"[1]",
    b'{"ts":"yesterday"}',
    b'{"ts":NaN}',
    b"\xff",
    b'{"order_id":"7","pid":1.5,"ts":1700000000000}',
    b'{"order_id":7}',
]
DAMAGE = ["good", "dropped", "added", "repeated", "altered", "empty"]

Row = dict[str, Any]


@dataclass(frozen=True)
class World:
    """Source topics, and what the naive join says."""

    tag: str
    bootstrap: str
    events: dict[str, list[tuple[str, int, Row]]]  # stream -> (id, ts, row), the usable ones
    late: list[tuple[str, int, int, int]]  # stream, partition, offset, ts
    broken: list[tuple[str, int, int]]

    def mesh(self, name: str, queries: list[str], idle: bool = False) -> Mesh:
        lines = [f"mesh: {name}-{self.tag}", f'kafka: {{bootstrap: "{self.bootstrap}"}}', "streams:"]
        fields = {
            "orders": "{order_id: int64, amount: float64, vip: bool, ts: timestamp}",
            "payments": "{order_id: int64, pid: string, amount: float64, ts: timestamp}",
            "shipments": "{pid: string, carrier: string, sent: timestamp, ts: int64}",
        }
        for stream, kinds in fields.items():
            waits = ", idle_after: 1s" if idle else ""
            lines.append(
                f"  {stream}: {{topic: {stream}-{self.tag}, event_time: ts, lateness: {LATENESS[stream]}ms{waits},"
                f" fields: {kinds}}}"
            )
        lines += ["queries:"] + [f"  {query}: |\n    {QUERY}" for query in queries]
        return parse_mesh("\n".join(lines))


def answer(events: dict[str, list[tuple[str, int, Row]]]) -> dict[str, tuple[int, Row]]:
    """The naive join: id -> (time, row)."""
    found = {}
    for o_id, o_ts, o in events["orders"]:
        for p_id, p_ts, p in events["payments"]:
            if (
                o["order_id"] is None
                or o["order_id"] != p["order_id"]
                or p["pid"] is None
                or p["amount"] is None
                or p["amount"] < -1.5
            ):
                continue
            for s_id, s_ts, s in events["shipments"]:
                start = max(o_ts, p_ts, s_ts)
                end = min(o_ts + WINDOWS["orders"], p_ts + WINDOWS["payments"], s_ts + WINDOWS["shipments"])
                dearer = o["amount"] is not None and o["amount"] > p["amount"]
                if p["pid"] != s["pid"] or start > end or not (dearer or (s["carrier"] or "").startswith("it's_")):
                    continue
                rest = None if o["amount"] is None else o["amount"] - p["amount"]
                row = {
                    "order_id": o["order_id"],
                    "paid": p["amount"],
                    "carrier": s["carrier"],
                    "rest": rest,
                    "sent": s["sent"],
                    "vip": o["vip"],
                }
                found[f"{o_id}|{s_id}|{p_id}"] = (start, row)
    return found


def make_events(draw: random.Random, stream: str, i: int, ts: int) -> Row:
    key = draw.choice([None, *range(BIG, BIG + 30)])
    if stream == "orders":
        return {
            "order_id": key,
            "amount": draw.choice([None, 0, -0.0, 0.1, 7, 1e300]),
            "vip": draw.choice([True, False, None]),
            "ts": ts,
        }
    pid = None if draw.random() < 0.05 else f"pé{draw.randrange(30)}"
    if stream == "payments":
        return {"order_id": key, "pid": pid, "amount": draw.choice([None, -2, -0.0, 0.1, 6.9]), "ts": ts, "note": [i]}
    return {"pid": pid, "carrier": draw.choice([None, "it's_x", "it'sax", "\U0001f69a"]), "sent": ts - 5, "ts": ts}


@pytest.fixture(scope="module")
def world(bootstrap: str) -> World:
    """Three source topics of two partitions, with late, broken and null-keyed records, equal and out-of-order times."""
    draw, tag = random.Random(7), uuid.uuid4().hex[:8]
    create(bootstrap, {f"{stream}-{tag}": 2 for stream in WINDOWS})
    events: dict[str, list[tuple[str, int, Row]]] = {stream: [] for stream in WINDOWS}
    late, broken = [], []
    producer = Producer({"bootstrap.servers": bootstrap})
    for stream in WINDOWS:
        for partition in (0, 1):
            newest = 0
            for offset in range(220):
                ts = START + offset * 500 - draw.choice([0, 0, 0, 0, 1000, 2500, 6000])
                row = make_events(draw, stream, offset, ts)
                value = json.dumps(
                    row | ({"sent": "2023-11-14T22:13:20.0005Z"} if offset == 9 and stream == "shipments" else {})
                ).encode()
                if offset == 9 and stream == "shipments":
                    row["sent"] = START
                if draw.random() < 0.05:
                    value = draw.choice(BROKEN)
                    broken.append((f"{stream}-{tag}", partition, offset))
                elif ts < newest - LATENESS[stream]:
                    late.append((stream, partition, offset, ts))
                else:
                    events[stream].append((f"{stream}:{partition}:{offset}", ts, row))
                    newest = max(newest, ts)
                producer.produce(f"{stream}-{tag}", value, partition=partition, timestamp=START)
    assert producer.flush(30) == 0
    return World(tag, bootstrap, events, late, broken)


@pytest.fixture(scope="module")
def truth(world: World) -> dict[str, tuple[int, Row]]:
    found = answer(world.events)
    assert len(found) > 300
    assert len(world.late) > 20
    assert len(world.broken) > 20
    return found


@pytest.fixture(scope="module", autouse=True)
def _spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One Spark for all: an audit uses the session that is there."""
    session = start_session("local[2]", "1g", tmp_path_factory.mktemp("spark") / "spark.log")
    yield
    session.stop()


def create(bootstrap: str, wanted: dict[str, int]) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})  # a name of its own: it must live until the answers are there
    made = admin.create_topics([NewTopic(name, n, 1, config={"retention.ms": "-1"}) for name, n in wanted.items()])
    for future in made.values():
        future.result(30)


def write_results(bootstrap: str, topic: str, records: list[tuple[str, int, Row | bytes]]) -> None:
    """Inside a transaction, after another one that is aborted: what it wrote must not count."""
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": topic})
    producer.init_transactions(30)
    for last in (False, True):
        producer.begin_transaction()
        for i, (key, time, row) in enumerate(records if last else records[:10]):
            producer.produce(
                topic,
                row if isinstance(row, bytes) else json.dumps(row).encode(),
                key=key.encode(),
                timestamp=time,
                partition=i % 2,
            )
        producer.flush(30)
        producer.commit_transaction(30) if last else producer.abort_transaction(30)


def write_mesh(
    world: World, mesh: Mesh, results: dict[str, list[tuple[str, int, Row | bytes]]], late: list[Row], dead: list[Row]
) -> None:
    name = mesh.name
    wanted = {topics.results(name, query): 2 for query in results} | {
        topics.late(name): 2,
        topics.dead(name): 2,
        topics.control(name): 2,
    }
    create(world.bootstrap, wanted)
    for query, records in results.items():
        if records:
            write_results(world.bootstrap, topics.results(name, query), records)
    producer = Producer({"bootstrap.servers": world.bootstrap})
    for topic, notices in ((topics.late(name), late), (topics.dead(name), dead)):
        for i, notice in enumerate(notices):
            producer.produce(topic, json.dumps(notice).encode(), partition=i % 2)
    for partition in (0, 1):
        producer.produce(
            topics.control(name),
            json.dumps({"epoch": 1, "query": "good", "tree": "((o p) s)"}).encode(),
            partition=partition,
        )
    assert producer.flush(30) == 0


def late_notices(world: World) -> list[Row]:
    return [
        {"stream": s, "partition": p, "offset": o, "ts": ts, "reason": "late", "watermark": ts + 1}
        for s, p, o, ts in world.late
    ]


def dead_notices(world: World) -> list[Row]:
    return [{"topic": t, "partition": p, "offset": o, "reason": "not JSON"} for t, p, o in world.broken]


def damaged(truth: dict[str, tuple[int, Row]]) -> dict[str, list[tuple[str, int, Row | bytes]]]:
    good: list[tuple[str, int, Row | bytes]] = [(id, time, row) for id, (time, row) in truth.items()]
    random.Random(3).shuffle(good)
    rows = [dict(truth[id][1]) for id, *_ in good]
    alien = [(f"orders:0:{n}|shipments:0:0|payments:0:0", START, rows[0]) for n in (1, 2, 3)]
    assert not {id for id, *_ in alien} & set(truth)
    altered = [
        (good[0][0], good[0][1], rows[0] | {"order_id": rows[0]["order_id"] + 1}),
        (good[1][0], good[1][1], rows[1] | {"carrier": "x", "paid": 6.900000000000001}),
    ]
    moved = [(id, time + 1, row) for id, time, row in good[2:5]]
    garbled = [(good[5][0], good[5][1], b"{"), (good[6][0], good[6][1], rows[6] | {"z": 1})]
    return {
        "good": good,
        "dropped": good[7:],
        "added": [*good, *alien, ("", START, rows[0]), ("nonsense", START, b"?")],
        "repeated": [*good, *good[:4], *good[:2]],
        "altered": [*altered, *moved, *garbled, *good[7:]],
        "empty": [],
    }


@pytest.fixture(scope="module")
def shop(world: World, truth: dict[str, tuple[int, Row]]) -> Mesh:
    mesh = world.mesh("shop", DAMAGE)
    notices = late_notices(world)
    write_mesh(world, mesh, damaged(truth), notices + notices[:5], dead_notices(world))  # repeats are allowed there
    return mesh


@pytest.fixture(scope="module")
def verdicts(shop: Mesh, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Verdict], Path]:
    report = tmp_path_factory.mktemp("report")
    found = run_audit(shop, report_dir=report, progress=lambda _: None)
    return {verdict.query: verdict for verdict in found}, report


WRONG = {
    "order_id": 1,
    "paid, carrier": 1,
    "(time)": 3,
    "(unreadable) not JSON": 1,
    "(unreadable) column z was not asked for": 1,
}


@pytest.mark.parametrize(
    ("query", "missing", "extra", "duplicate", "wrong", "columns"),
    [
        ("good", 0, 0, 0, 0, {}),
        ("dropped", 7, 0, 0, 0, {}),
        ("added", 0, 5, 0, 0, {}),
        ("repeated", 0, 0, 6, 0, {}),
        ("altered", 0, 0, 0, 7, WRONG),
    ],
)
def test_each_damage_is_counted(
    query: str,
    missing: int,
    extra: int,
    duplicate: int,
    wrong: int,
    columns: dict[str, int],
    verdicts: tuple[dict[str, Verdict], Path],
    truth: dict[str, tuple[int, Row]],
) -> None:
    v = verdicts[0][query]
    assert (v.missing, v.extra, v.duplicate, v.wrong, v.wrong_columns) == (missing, extra, duplicate, wrong, columns)
    assert v.expected == len(truth)
    assert v.found == len(truth) - missing + extra + duplicate
    assert v.passed is (query == "good")
    assert (v.digest_expected == v.digest_found) is v.passed
    assert v.outside == 0
    totals = [sum(getattr(i, name) for i in v.intervals) for name in ("expected", "right", "missing", "wrong", "extra")]
    assert totals == [len(truth), len(truth) - missing - wrong, missing, wrong, extra]
    assert v.recall == (len(truth) - missing - wrong) / len(truth)
    kinds = {
        "missing": missing,
        "extra": extra,
        "duplicate": min(duplicate, 4),
        "wrong": wrong,
    }  # six repeats of four ids
    assert {kind: len(rows) for kind, rows in v.samples.items()} == {kind: n for kind, n in kinds.items() if n}


def test_no_results_at_all(verdicts: tuple[dict[str, Verdict], Path], truth: dict[str, tuple[int, Row]]) -> None:
    v = verdicts[0]["empty"]
    assert (v.expected, v.found, v.missing, v.recall, v.passed) == (len(truth), 0, len(truth), 0.0, False)
    assert len(v.samples["missing"]) == 20


def test_streams_are_counted(verdicts: tuple[dict[str, Verdict], Path], world: World) -> None:
    for s in verdicts[0]["good"].streams:
        assert s.records == 440
        assert s.usable == len(world.events[s.stream])
        assert s.late == sum(stream == s.stream for stream, *_ in world.late)
        assert s.broken == sum(topic == s.topic for topic, *_ in world.broken) == sum(s.reasons.values())
        assert not any(s.differences.values())


def test_samples_show_what_was_expected_and_found(
    verdicts: tuple[dict[str, Verdict], Path], truth: dict[str, tuple[int, Row]]
) -> None:
    for row in verdicts[0]["altered"].samples["wrong"]:
        time, values = truth[row["id"]]
        assert row["expected"] == {"time": time, **values}
        assert row["found"][0] != row["expected"]


def test_report_and_record(verdicts: tuple[dict[str, Verdict], Path], shop: Mesh) -> None:
    found, report = verdicts
    proof = json.loads((report / "audit.json").read_text())
    assert proof["passed"] is False
    assert proof["queries"]["good"]["passed"] is True
    assert proof["queries"]["good"]["text"].strip().startswith("SELECT o.order_id")
    assert proof["queries"]["dropped"]["digest_expected"] == found["good"].digest_found
    assert proof["cut"]["to"][shop.streams["orders"].topic] == {"0": 220, "1": 220}
    assert [(e["epoch"], e["tree"]) for e in proof["plans"]] == [(1, "((o p) s)")]
    page = (report / "audit.html").read_text()
    assert page.count("<svg") == 2 * len(DAMAGE)
    assert "it&#x27;&#x27;s" in page
    assert "<script" not in page
    assert "http" not in page
    consumer = Consumer({"bootstrap.servers": shop.bootstrap, "group.id": "test"})
    consumer.assign([TopicPartition(topics.audit(shop.name), 0, 0)])
    message = consumer.poll(20)
    consumer.close()
    record = json.loads(message.value() or b"" if message else b"")
    assert record["queries"]["dropped"]["missing"] == 7
    assert record["queries"]["good"]["digest_found"] == found["good"].digest_expected


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def test_a_cut_judges_only_what_lies_inside_and_can_be_repeated(
    shop: Mesh, truth: dict[str, tuple[int, Row]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    orders, payments = shop.streams["orders"].topic, shop.streams["payments"].topic
    (tmp_path / "to.json").write_text(json.dumps({orders: {"0": 150}}))
    (tmp_path / "from.json").write_text(json.dumps({payments: {"1": 60}}))

    def inside(id: str) -> bool:
        parts = [part.split(":") for part in id.split("|")]
        return not any(
            ((s, p) == ("orders", "0") and int(o) >= 150) or ((s, p) == ("payments", "1") and int(o) < 60)
            for s, p, o in parts
        )

    kept = sum(inside(id) for id in truth)
    assert 0 < kept < len(truth)
    code = main(
        arguments(
            "--query",
            "good",
            "--report",
            str(tmp_path / "r"),
            "--from",
            str(tmp_path / "from.json"),
            "--to",
            str(tmp_path / "to.json"),
        ),
        shop,
    )
    proof = json.loads((tmp_path / "r" / "audit.json").read_text())["queries"]["good"]
    assert code == 0, capsys.readouterr().out
    assert (proof["expected"], proof["found"], proof["outside"]) == (kept, kept, len(truth) - kept)
    again = str(tmp_path / "r" / "audit.json")
    code = main(arguments("--query", "dropped", "--report", str(tmp_path / "r2"), "--from", again, "--to", again), shop)
    proof = json.loads((tmp_path / "r2" / "audit.json").read_text())["queries"]["dropped"]
    assert code == 1
    assert proof["expected"] == kept
    assert "FAILED" in capsys.readouterr().out


def test_idle_events_are_believed_and_wrong_notices_found(
    world: World, truth: dict[str, tuple[int, Row]], tmp_path: Path
) -> None:
    mesh = world.mesh("idle", ["q"], idle=True)
    gone = [id for id, *_ in world.events["payments"][40:80]]
    rest = answer(world.events | {"payments": [e for e in world.events["payments"] if e[0] not in gone]})
    assert 0 < len(rest) < len(truth)
    times = {id: ts for id, ts, _ in world.events["payments"]}
    idle = [
        {
            "stream": id.split(":")[0],
            "partition": int(id.split(":")[1]),
            "offset": int(id.split(":")[2]),
            "ts": times[id],
            "reason": "idle",
            "watermark": times[id] + 1,
        }
        for id in gone
    ]
    liar = {
        "stream": "orders",
        "partition": 0,
        "offset": int(world.events["orders"][0][0].split(":")[2]),
        "ts": START,
        "reason": "idle",
        "watermark": START,
    }
    late = late_notices(world)
    cheated = [
        {
            "topic": mesh.streams["orders"].topic,
            "partition": 0,
            "offset": int(world.events["orders"][1][0].split(":")[2]),
            "reason": "x",
        }
    ]
    write_mesh(
        world,
        mesh,
        {"q": [(id, time, row) for id, (time, row) in rest.items()]},
        late[3:] + idle + [liar],
        dead_notices(world)[:-2] + cheated,
    )
    [verdict] = run_audit(mesh, "q", report_dir=tmp_path, progress=lambda _: None)
    assert (verdict.expected, verdict.found, verdict.missing, verdict.extra) == (len(rest), len(rest), 0, 0)
    assert {s.stream: s.idle for s in verdict.streams} == {"orders": 0, "payments": len(gone), "shipments": 0}
    streams = {s.stream: s for s in verdict.streams}
    assert sum(s.late_missing for s in streams.values()) == 3
    assert streams["orders"].late_unexpected == 1
    assert streams["orders"].samples["late events unexpected"] == [f"0:{liar['offset']}"]
    assert sum(s.dead_missing for s in streams.values()) == 2
    assert streams["orders"].dead_unexpected == 1
    assert not verdict.passed


def test_nothing_to_audit_is_said_plainly(world: World, shop: Mesh, tmp_path: Path) -> None:
    with pytest.raises(TopicError, match=r"topic .*\.good\.results is not on"):
        run_audit(world.mesh("nobody", ["good"]), report_dir=tmp_path, progress=lambda _: None)
    with pytest.raises(JoinmeshError, match=r"no query `goood`.*did you mean `good`"):
        run_audit(shop, "goood", report_dir=tmp_path, progress=lambda _: None)
    with pytest.raises(TopicError, match="the log holds 0 to 220"):
        run_audit(
            shop,
            "good",
            cut={"to": {shop.streams["orders"].topic: {"0": 1000}}},
            report_dir=tmp_path,
            progress=lambda _: None,
        )
    bad = replace(shop, queries={"good": QUERY.replace("p.pid", "p.nope")})
    with pytest.raises(JoinmeshError, match="query good: Spark SQL does not accept it"):
        run_audit(bad, "good", report_dir=tmp_path, progress=lambda _: None)
