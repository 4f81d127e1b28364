"""Which processes run a mesh: how many workers, who shares a process, and how a worker learns its number."""

import argparse
from dataclasses import replace

import pytest

from schemas.errors import JoinmeshError, MeshFileError
from schemas.mesh import Mesh
from services.host.run import chosen
from services.runtime.placement import processes_of, with_workers
from services.runtime.queries import parse_queries, services_of
from services.runtime.service import ordinal


def names(mesh: Mesh) -> list[str]:
    return [process.name for process in processes_of(mesh, services_of(mesh, parse_queries(mesh)))]


def test_one_process_a_worker(shop: Mesh) -> None:
    mesh = replace(shop, workers={"ingest": 2, "paid_orders.j2": 3})
    assert names(shop) == ["controller", "ingest", "paid_orders.j1", "paid_orders.j2", "paid_orders.sink"]
    assert names(mesh) == [
        *("controller", "ingest", "ingest-1", "paid_orders.j1"),
        *("paid_orders.j2", "paid_orders.j2-1", "paid_orders.j2-2", "paid_orders.sink"),
    ]
    processes = {p.name: p for p in processes_of(mesh, services_of(mesh, parse_queries(mesh)))}
    assert processes["paid_orders.j2-2"].command() == [
        *("-m", "services.join_node", "--query", "paid_orders", "--node", "j2", "--instance", "2")
    ]
    assert processes["paid_orders.j2-2"].workers == ["paid_orders.j2-2"]
    assert processes["ingest"].workers == ["ingest-0"]
    assert processes["controller"].workers == ["controller"]


def test_together_is_one_process_and_one_more_for_each_further_worker(shop: Mesh) -> None:
    one = replace(shop, placement="together")
    assert names(one) == ["host"]
    several = processes_of(replace(one, workers={"ingest": 2, "j1": 3}), services_of(shop, parse_queries(shop)))
    assert [p.name for p in several] == ["host", "host-1", "host-2"]
    assert several[1].command() == ["-m", "services.host", "--run", "ingest,paid_orders.j1", "--instance", "1"]
    assert several[2].workers == ["paid_orders.j1-2"]
    assert "controller" in several[0].workers


def test_workers_of_a_command_line(shop: Mesh) -> None:
    mesh = replace(shop, workers={"paid_orders.j1": 2, "sink": 2})
    assert with_workers(mesh, ["j1=3"]).workers == {"sink": 2, "j1": 3}
    assert with_workers(mesh, []).workers == mesh.workers
    for wrong in ("j1", "j1=", "j1=x", "=3", "j1=0", "j1=5", "jay=2"):
        with pytest.raises(ValueError, match="workers"):
            with_workers(mesh, [wrong])


def test_a_node_that_no_plan_has(shop: Mesh) -> None:
    with pytest.raises(MeshFileError, match=r"`workers` names `paid_orders.j3`, but no plan has such a service"):
        names(replace(shop, workers={"paid_orders.j3": 2}))


def test_what_a_host_runs(shop: Mesh) -> None:
    assert [s.name for s in chosen(shop, "all")] == names(shop)
    assert [s.name for s in chosen(shop, "paid_orders.sink,ingest")] == ["ingest", "paid_orders.sink"]
    with pytest.raises(JoinmeshError, match=r"--run names `paid_orders.j9`, which is no service"):
        chosen(shop, "paid_orders.j9")


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("12", 12), ("shop-orders-j1-2", 2), ("a-10", 10)])
def test_a_worker_learns_its_number(text: str, number: int) -> None:
    assert ordinal(text) == number


@pytest.mark.parametrize("text", ["", "shop", "shop-", "j1", "-"])
def test_a_name_without_a_number(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="neither a number nor a name"):
        ordinal(text)
