"""Tables in the mesh file: what is read, and every mistake with its line and what to do."""

import pytest

from schemas.errors import MeshFileError
from schemas.mesh import Mesh, parse_mesh

FILE = """
mesh: m
kafka: {bootstrap: "b:1"}
streams:
  orders: {event_time: ts, fields: {user_id: int64, ts: timestamp}}
  users:
    ENTRY
    fields: {user_id: int64, name: string, score: float64}
queries:
  q: SELECT o.ts FROM orders [RANGE 1 DAY] AS o, users AS u WHERE o.user_id = u.user_id
"""


def parse(entry: str) -> Mesh:
    return parse_mesh(FILE.replace("ENTRY", entry))


@pytest.mark.parametrize("key", ["user_id", "name"])
def test_a_table_has_a_key_and_no_time(key: str) -> None:
    users = parse(f"table: {key}").streams["users"]
    assert (users.table, users.event_time, users.needed, users.lateness_ms, users.idle_after_ms) == (
        key,
        "",
        key,
        0,
        None,
    )
    assert parse("table: name").streams["orders"].table is None


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("topic: u", "mesh.yaml:7: stream `users` needs `fields` and `event_time` (or `table`, if it is a table)"),
        ("table: usr_id", "mesh.yaml:7: `table` of stream `users` names no field: `usr_id`; did you mean `user_id`?"),
        ("table: score", "mesh.yaml:7: the key `score` of table `users` must be of type int64 or string"),
        (
            "table: user_id\n    lateness: 5s",
            "mesh.yaml:8: stream `users` is a table (`table:`), which is valid always: take out `lateness`, or `table`",
        ),
        (
            "table: user_id\n    event_time: user_id",
            (
                "mesh.yaml:8: stream `users` is a table (`table:`), which is valid always: take out `event_time`, or"
                " `table`"
            ),
        ),
        (
            "table: user_id\n    idle_after: 5s",
            (
                "mesh.yaml:8: stream `users` is a table (`table:`), which is valid always: take out `idle_after`, or"
                " `table`"
            ),
        ),
        (
            "table: user_id\n    topic: orders",
            "mesh.yaml:5: table `users` and `orders` read the same topic `orders`; give each its own",
        ),
        ("table: {by: user_id}", "mesh.yaml:7: `table` of stream `users` must be a text"),
    ],
)
def test_mistakes(entry: str, message: str) -> None:
    with pytest.raises(MeshFileError) as refused:
        parse(entry)
    assert str(refused.value) == message


def test_workers_and_placement() -> None:
    mesh = parse_mesh(
        FILE.replace("ENTRY", "table: name") + "workers: {ingest: 2, q.j1: 3, sink: 4}\nplacement: together\n"
    )
    assert mesh.placement == "together"
    assert [mesh.workers_of(name) for name in ("ingest", "q.j1", "q.j2", "q.sink", "controller")] == [2, 3, 1, 4, 1]
    assert parse("table: name").workers == {}
    assert parse("table: name").placement == "per-service"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("workers: {ingst: 2}", "`workers` names `ingst`, which is no service; did you mean `ingest`?"),
        ("workers: {q.ingest: 2}", "`workers` names `q.ingest`, which is no service; did you mean `ingest`?"),
        ("workers: {controller: 2}", "`workers` names the controller, of which there is one; take it out"),
        ("workers: {p.j1: 2}", "`workers` names a query `p` that is not there; use one of `q`"),
        ("workers: {ingest: 0}", "workers of `ingest` must be a whole number from 1 to 1024, not 0"),
        (
            "workers: {j1: 5}",
            "workers of `j1` must be a whole number from 1 to 4 (`partitions`: each is one worker's), not 5",
        ),
        (
            "workers: {sink: two}",
            "workers of `sink` must be a whole number from 1 to 4 (`partitions`: each is one worker's), not 'two'",
        ),
        ("workers: 3", "`workers` must be a table of `name: value` lines"),
        ("placement: one", "`placement` is `one`; write per-service or together"),
    ],
)
def test_mistakes_in_workers_and_placement(lines: str, message: str) -> None:
    with pytest.raises(MeshFileError) as refused:
        parse_mesh(FILE.replace("ENTRY", "table: name") + lines + "\n")
    assert str(refused.value) == f"mesh.yaml:11: {message}"
