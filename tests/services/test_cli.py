"""The command line: every command explains itself, and every failure is one clear line and a code that is not 0."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Producer

from schemas import topics
from schemas.mesh import Mesh
from services.cli.main import COMMANDS, main

CreateTopics = Callable[..., None]
Capture = pytest.CaptureFixture[str]


def test_help_lists_every_command(capsys: Capture) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, sentence in COMMANDS.items():
        assert name in text
        assert sentence in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_with_an_example(command: str, capsys: Capture) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "examples:" in text
    assert f"joinmesh {command}" in text
    assert "-f MESH" in text or command == "chaos"  # chaos brings its own mesh


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from services.cli.main import main; main(['--help']); print([m for m in ('polars', 'numpy',"
        " 'sqlglot', 'confluent_kafka', 'pyspark', 'faust', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("arguments", [["up"], ["topics"], ["status"], ["explain"], ["generate"], ["audit"]])
def test_a_missing_mesh_file_is_one_line(arguments: list[str], tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "no.yaml"
    assert main([*arguments, "-f", str(file)]) == 1
    assert (
        capsys.readouterr().err
        == f"joinmesh: {file}: no such file; write one (see README, 'The mesh file') or pass -f\n"
    )


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "services.cli.main", "explain", "--debug", "-f", str(tmp_path / "no.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "Traceback" in done.stderr


def test_a_typo_in_the_mesh_file_and_in_a_query(shop_file: Path, capsys: Capture) -> None:
    text = shop_file.read_text()
    shop_file.write_text(text.replace("partitions: 4", "partitons: 4"))
    assert main(["explain", "-f", str(shop_file)]) == 1
    assert (
        capsys.readouterr().err.rstrip()
        == f"joinmesh: {shop_file}:4: unknown key `partitons` in the mesh file; did you mean `partitions`?"
    )
    shop_file.write_text(text.replace("o.order_id, p.paid", "o.oder_id, p.paid"))
    assert main(["up", "-f", str(shop_file)]) == 1
    error = capsys.readouterr().err
    assert "query paid_orders, line 1" in error
    assert "did you mean `order_id`?" in error


def test_wrong_usage_is_code_2(capsys: Capture) -> None:
    assert main(["nonsense"]) == 2
    assert main([]) == 2
    assert main(["generate", "--count", "many"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_explain(shop_file: Path, capsys: Capture) -> None:
    assert main(["explain", "-f", str(shop_file), "--query", "paid_orders"]) == 0
    text = capsys.readouterr().out
    assert "plan of paid_orders" in text
    assert "j1.in" in text
    assert main(["explain", "-f", str(shop_file), "--query", "paid_oders"]) == 1
    assert "did you mean `paid_orders`?" in capsys.readouterr().err


def test_topics_and_generate(shop: Mesh, shop_file: Path, capsys: Capture) -> None:
    assert main(["topics", "-f", str(shop_file)]) == 1
    assert "missing" in capsys.readouterr().out
    assert main(["topics", "-f", str(shop_file), "--create"]) == 1  # the source topics are not ours to create
    assert f"{shop.name}-orders is missing" in capsys.readouterr().err
    assert main(["generate", "-f", str(shop_file), "--create", "2", "--count", "50", "--keys", "zipf"]) == 0
    assert "150 events in" in capsys.readouterr().out
    assert main(["topics", "-f", str(shop_file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"{shop.name}-orders 2 50 ever ok".split() in [line.split() for line in lines]
    assert not any("missing" in line or "wrong" in line for line in lines)


def test_up_without_source_topics(shop_file: Path, shop: Mesh, capsys: Capture) -> None:
    assert main(["up", "-f", str(shop_file)]) == 1
    assert capsys.readouterr().err.startswith(f"joinmesh: source topic {shop.name}-orders of stream orders is not on ")


def test_status_before_any_report(shop_file: Path, capsys: Capture) -> None:
    assert main(["status", "-f", str(shop_file)]) == 0
    text = capsys.readouterr().out
    assert "no report yet" in text
    assert "no service of this mesh has reported yet" in text


def test_status_shows_the_latest_report_of_each(
    shop: Mesh, shop_file: Path, create_topics: CreateTopics, capsys: Capture
) -> None:
    create_topics(topics.report(shop.name), partitions=1)
    now = int(time.time() * 1000)
    state = {
        "side": "left",
        "name": "o",
        "rows": 12_345,
        "bytes": 2_097_152,
        "segments": 3,
        "oldest_ms": now - 31_000,
        "newest_ms": now,
        "window_ms": 30_000,
    }
    reports = [("ingest-0", {"at_ms": now - 90_000, "events_in": 1, "lag": 99})]
    reports += [
        ("filler", {"at_ms": now, "n": n}) for n in range(4_000)
    ]  # ingest's report is further back than the tail
    reports += [
        ("paid_orders.j1-0", {"at_ms": now - 1, "rows_in": 5}),
        (
            "paid_orders.j1-0",
            {
                "at_ms": now,
                "rows_in": 7_000,
                "lag": 0,
                "watermark_ms": 1_735_689_600_000,
                "step_ms_p50": 1.5,
                "step_ms_p99": 9.25,
                "state": [state],
                "alarms": ["stream payments partition 2 is silent"],
                "odd": {"deep": 1},
            },
        ),
    ]
    producer = Producer({"bootstrap.servers": shop.bootstrap})
    for key, value in reports:
        producer.produce(topics.report(shop.name), json.dumps(value).encode(), key=key.encode(), partition=0)
    producer.produce(topics.report(shop.name), b"not json", key=b"x", partition=0)
    assert producer.flush(10) == 0

    assert main(["status", "-f", str(shop_file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    node = next(line for line in lines if line.startswith("paid_orders.j1-0"))
    for part in ("7,000", "2025-01-01 00:00:00", "1.5 ms", "9.2 ms"):
        assert part in node
    ingest = next(line for line in lines if line.startswith("ingest-0"))
    assert "1 min 3" in ingest
    assert "(not running?)" in ingest
    side = next(line for line in lines if "left o" in line)
    assert side.split() == ["paid_orders.j1-0", "left", "o", "12,345", "2.0", "MiB", "3", "31", "s", "30", "s"]
    assert "alarm: paid_orders.j1-0: stream payments partition 2 is silent" in lines
    assert any(line.startswith("paid_orders.sink") and "no report yet" in line for line in lines)

    assert main(["status", "-f", str(shop_file), "--json"]) == 0
    everything = json.loads(capsys.readouterr().out)
    assert everything["paid_orders.j1-0"]["odd"] == {"deep": 1}


def test_broker_command(tmp_path: Path, capsys: Capture) -> None:
    folder = ["--dir", str(tmp_path / "b")]
    assert main(["broker", "status", *folder]) == 1
    assert "no broker runs in" in capsys.readouterr().out
    try:
        assert main(["broker", "up", "--port", "0", *folder]) == 0
        assert "the broker is up at 127.0.0.1:" in capsys.readouterr().out
        assert main(["broker", "status", *folder]) == 0
        assert main(["broker", "up", "--port", "0", *folder]) == 0
        assert "already runs" in capsys.readouterr().out
    finally:
        assert main(["broker", "down", *folder]) == 0
    assert "the broker is stopped" in capsys.readouterr().out
    assert main(["broker", "down", *folder]) == 0
