"""What the chart makes of each supported shape: manifests that Kubernetes takes, a pod for every service of the mesh,
and a mesh file that joinmesh reads as it was written."""

import copy
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas.mesh import parse_mesh
from services.runtime.queries import parse_queries, services_of
from tests.helm.chart import CHART, CI, faults, helm, mesh_of, of_kind, pods, rendered, values_of

BACKFILL = ("backfill.enabled=true", "backfill.query=paid_orders")


@pytest.mark.parametrize("file", CI, ids=lambda file: file.stem)
def test_kubernetes_takes_every_manifest(file: Path) -> None:
    manifests = rendered(file)
    assert len(manifests) > 10
    assert [fault for manifest in manifests for fault in faults(manifest)] == []
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests]
    assert len(names) == len(set(names))
    assert all(len(name) <= 52 for _, name in names)


def test_kubernetes_takes_the_backfill() -> None:
    assert [fault for manifest in rendered(CI[0], *BACKFILL) for fault in faults(manifest)] == []


def test_every_kind_is_met() -> None:
    """Guards the tests above: each template is rendered by some shape."""
    kinds = {manifest["kind"] for file in CI for manifest in rendered(file)}
    assert kinds == {
        "ConfigMap", "CronJob", "Deployment", "Job", "NetworkPolicy", "Pod", "PodDisruptionBudget", "PrometheusRule",
        "Service", "ServiceAccount", "ServiceMonitor", "StatefulSet",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "path", "value", "said"),
    [
        ("StatefulSet", ("spec", "replica"), 1, "replica"),
        ("StatefulSet", ("spec", "template", "spec", "containers", 0, "livenessprobe"), {}, "livenessprobe"),
        ("StatefulSet", ("spec", "replicas"), "1", "integer"),
        ("Service", ("spec", "ports", 0, "targetport"), 1, "targetport"),
        ("NetworkPolicy", ("spec", "egress", 0, "port"), [], "port"),
        ("PodDisruptionBudget", ("spec", "maxUnavailable"), [1], "maxUnavailable"),
        ("CronJob", ("spec", "jobTemplate", "spec", "backOffLimit"), 1, "backOffLimit"),
        ("Deployment", ("spec", "strategy", "kind"), "Recreate", "kind"),
        ("ServiceMonitor", ("spec", "endpoints", 0, "paths"), "/", "paths"),
        ("PrometheusRule", ("spec", "groups", 0, "rules", 0, "expression"), "1", "expression"),
    ],
)
def test_a_wrong_field_fails(kind: str, path: tuple[Any, ...], value: Any, said: str) -> None:
    manifests = rendered(next(file for file in CI if file.stem == "secured-cluster-values"))
    manifest = copy.deepcopy(next(iter(of_kind(manifests, kind).values())))
    place: Any = manifest
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert said in " ".join(faults(manifest))


@pytest.mark.parametrize("file", CI, ids=lambda file: file.stem)
def test_every_service_runs_once(file: Path) -> None:
    """The chart counts join nodes as the planner makes them, and gives each service the pods that the mesh asks for."""
    manifests = rendered(file)
    mesh = mesh_of(manifests)
    queries = parse_queries(mesh)
    wanted = {service.name for service in services_of(mesh, queries)}
    found: list[str] = []
    for name, pod in pods(manifests):
        if name.startswith(("StatefulSet/", "Deployment/")):
            run = pod["metadata"]["annotations"]["joinmesh/service"]
            found += sorted(wanted) if run == "all" else run.split(",")
    assert sorted(found) == sorted(wanted)


def test_workers_are_replicas() -> None:
    sets = of_kind(rendered(CHART / "ci/many-workers-values.yaml"), "StatefulSet")
    assert {name.removeprefix("shop-joinmesh-"): made["spec"]["replicas"] for name, made in sets.items()} == {
        "ingest": 2,
        "paid-orders-j1": 4,
        "paid-orders-j2": 4,
        "paid-orders-sink": 3,
        "together-j1": 3,
        "together-sink": 2,
    }
    for made in sets.values():
        assert made["spec"]["podManagementPolicy"] == "Parallel"
        assert "--instance=$(POD_NAME)" in made["spec"]["template"]["spec"]["containers"][0]["args"]


@pytest.mark.parametrize("file", CI, ids=lambda file: file.stem)
def test_the_mesh_file_is_the_value(file: Path) -> None:
    """Helm reads YAML its own way (`on` is true, numbers are floats); joinmesh must read the mesh as it was written."""
    mesh = _words(values_of(file.stem.removesuffix("-values"))["mesh"])
    written = parse_mesh(yaml.safe_dump(mesh, sort_keys=False))
    read = mesh_of(rendered(file))
    for name in (
        "name",
        "kafka",
        "partitions",
        "streams",
        "queries",
        "plans",
        "feedback",
        "heralds",
        "routing",
        "workers",
        "placement",
    ):
        assert getattr(read, name) == getattr(written, name)


def _words(mesh: dict[str, Any]) -> dict[str, Any]:
    """Python's YAML, too, reads `on` as true."""
    for key in ("feedback", "heralds"):
        for query, value in mesh.get(key, {}).items():
            mesh[key][query] = {True: "on", False: "off"}.get(value, value)
    return mesh


def test_a_changed_mesh_rolls_pods_and_a_scaled_one_does_not() -> None:
    file = CHART / "ci/many-workers-values.yaml"

    def templates(*settings: str) -> dict[str, Any]:
        made = pods(rendered(file, *settings))
        return {name: pod for name, pod in made if name.startswith(("StatefulSet/", "Deployment/"))}

    before, rolled = templates(), templates("mesh.streams.orders.lateness=6s")
    assert before == templates("mesh.workers.ingest=1", "mesh.workers.paid_orders\\.j1=1")
    assert all(before[name] != rolled[name] for name in before)


ORD, PAY, SHIP = (f"{stream} [RANGE 1 HOUR]" for stream in ("orders", "payments", "shipments"))
SELF = f"SELECT a.order_id FROM {ORD} AS a, orders [RANGE 0 SECONDS] AS b WHERE a.user_id = b.user_id"
QUERIES = {  # layouts that a person might write; the planner says how many nodes each has
    "plain": f"SELECT o.order_id FROM {ORD} AS o, {PAY} AS p WHERE o.order_id = p.order_id",
    "join": f"SELECT o.order_id FROM {ORD} o\n INNER JOIN {PAY} p ON o.order_id = p.order_id",
    "mixed": f"select o.order_id from {ORD} o, {PAY} p join {SHIP} s on s.order_id = p.order_id"
    " where o.order_id = p.order_id and s.carrier in ('a, b', 'from x, y')",
    "comment": f"SELECT o.order_id -- from here, and there\nFROM {ORD} AS o, /* a, b */ {PAY} AS p\n"
    "WHERE o.order_id = p.order_id -- , x",
    "table": f"SELECT o.order_id, u.name FROM {ORD} AS o, users AS u WHERE o.user_id = u.user_id",
    "words": f"SELECT o.order_id AS from_here, s.carrier AS joined FROM {ORD} AS o, {PAY} AS p, {SHIP} AS s, users AS u"
    " WHERE o.order_id = p.order_id AND s.order_id = o.order_id AND u.user_id = o.user_id AND s.carrier <> 'where'",
    "_Odd_": SELF,
    "odd": SELF,
    "ODD": SELF,
    "a" * 63: SELF,
    "flat": f"SELECT o.order_id FROM {ORD} o, {PAY} p, {SHIP} s"
    " WHERE o.order_id = p.order_id AND s.order_id = o.order_id",
}


def test_nodes_are_counted_as_the_planner_makes_them(tmp_path: Path) -> None:
    values = values_of("laptop")
    values["mesh"]["streams"]["users"] = {"table": "user_id", "fields": {"user_id": "int64", "name": "string"}}
    values["mesh"] |= {"queries": QUERIES, "plans": {"flat": "(o p s)"}}
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    manifests = rendered(file)
    assert [fault for manifest in manifests for fault in faults(manifest)] == []
    mesh = mesh_of(manifests)
    made = [pod["metadata"]["annotations"]["joinmesh/service"] for name, pod in pods(manifests) if "Set/" in name]
    wanted = [service.name for service in services_of(mesh, parse_queries(mesh)) if service.name != "controller"]
    assert sorted(made) == sorted(wanted)


def test_secrets_are_references_to_one_principal_each() -> None:
    manifests = rendered(CHART / "ci/secured-cluster-values.yaml")
    mounted = {}
    for name, pod in pods(manifests):
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        mounted[name.partition("/")[2].removeprefix("shop-joinmesh-")] = [
            source["secret"]["name"] for source in volumes["kafka"]["projected"]["sources"]
        ]
    assert mounted == {
        "controller": ["shop-controller", "kafka-ca"],
        "ingest": ["shop-ingest", "kafka-ca"],
        "paid-orders-j1": ["shop-paid-orders-j1", "kafka-ca"],
        "paid-orders-j2": ["shop-paid-orders-j2", "kafka-ca"],
        "paid-orders-sink": ["shop-paid-orders-sink", "kafka-ca"],
        "audit": ["shop-audit", "kafka-ca"],
        "topics": ["shop-admin", "kafka-ca"],
        "check": ["shop-admin", "kafka-ca"],
    }
    assert "Secret" not in {manifest["kind"] for manifest in manifests}


@pytest.mark.parametrize("file", CI, ids=lambda file: file.stem)
def test_pods_reach_only_kafka_and_names(file: Path) -> None:
    manifests = rendered(file)
    policies = of_kind(manifests, "NetworkPolicy")
    kafka = {int(place.rpartition(":")[2]) for place in mesh_of(manifests).bootstrap.split(",")}
    for name, policy in policies.items():
        reached = {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]}
        assert reached == ({7077} if name.endswith("spark") else {53} | kafka)
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    mesh = policies["shop-joinmesh-mesh"]["spec"]
    assert [port["port"] for rule in mesh["ingress"] for port in rule["ports"]] == ["http"]
    for _, pod in pods(manifests):
        assert mesh["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


@pytest.fixture(scope="module")
def noting_chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart with a manifest that holds its notes: Helm shows notes only where there is a cluster."""
    copied = tmp_path_factory.mktemp("chart") / "joinmesh"
    shutil.copytree(CHART, copied)
    (copied / "templates" / "notes.yaml").write_text('notes: {{ include "joinmesh/templates/NOTES.txt" . | toJson }}')
    return copied


@pytest.mark.parametrize("file", CI, ids=lambda file: file.stem)
def test_notes_say_what_to_do_next(file: Path, noting_chart: Path) -> None:
    shown = ("--show-only", "templates/notes.yaml")
    ran = helm("template", "shop", str(noting_chart), "--namespace", "prod", "--values", str(file), *shown)
    assert ran.returncode == 0, ran.stderr
    notes = yaml.safe_load(ran.stdout)["notes"]
    assert notes.startswith("Mesh shop is installed: ")
    assert "helm -n prod test shop --logs" in notes
    assert "topic shop.paid_orders.results" in notes
    assert ("create job audit-1 --from=cronjob/shop-joinmesh-audit" in notes) == (file.stem != "many-workers-values")
    assert not re.search(r"\n\n\n| \n|<no value>", notes)
