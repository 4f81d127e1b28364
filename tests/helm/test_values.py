"""Types, values.yaml, schema and README say the same; and values that are wrong are refused with the place to mend."""

import re
from typing import Any

import jsonschema
import msgspec
import pytest

from services.chart.__main__ import generated
from services.chart.dashboard import PANELS
from services.chart.generate import parsed_defaults, schema
from services.chart.values import Values
from tests.helm.chart import CHART, CI, of_kind, parser_keys, refused, rendered, values_of


def test_the_generated_files_are_as_the_types_say() -> None:
    for file, text in generated(CHART).items():
        assert file.read_text(encoding="utf-8") == text, f"{file.name} is not what the types say; run `make chart`"


def test_the_defaults_and_every_shape_fit_the_types_and_the_schema() -> None:
    for file in CI:
        values = values_of(file.stem.removesuffix("-values"))
        jsonschema.Draft7Validator(schema()).validate(_merged(parsed_defaults(), values))
        msgspec.convert(_merged(parsed_defaults(), values), Values)


def _merged(under: Any, over: Any) -> Any:
    if not isinstance(under, dict) or not isinstance(over, dict):
        return over
    return under | {key: _merged(under[key], value) if key in under else value for key, value in over.items()}


def test_every_value_is_used_by_a_template() -> None:
    templates = "\n".join(file.read_text() for file in (CHART / "templates").rglob("*") if file.is_file())
    for key in _paths(parsed_defaults()):
        assert re.search(rf"\.{key.rpartition('.')[2]}\b|\"{key.rpartition('.')[2]}\"", templates), f"{key} is not used"


def _paths(values: dict[str, Any], above: str = "") -> list[str]:
    found = []
    for key, value in values.items():
        inner = isinstance(value, dict) and value and key != "labels"
        found += _paths(value, f"{above}{key}.") if inner else [f"{above}{key}"]
    return found


def test_the_schema_of_the_mesh_has_the_keys_that_the_parser_takes() -> None:
    mesh, known = schema()["properties"]["mesh"], parser_keys()
    assert set(mesh["properties"]) == known["file"]
    assert set(mesh["properties"]["streams"]["additionalProperties"]["properties"]) == known["stream"]


def _with(*path: str, value: Any) -> dict[str, Any]:
    values = values_of("laptop")
    place = values
    for key in path[:-1]:
        place = place.setdefault(key, {})
    place[path[-1]] = value
    return values


QUERY = "SELECT o.order_id FROM orders [RANGE 1 HOUR] AS o, payments [RANGE 1 HOUR] AS p WHERE o.order_id = p.order_id"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "mesh is required"),
        (_with("meshh", value={}), "Additional property meshh is not allowed"),
        (_with("joinNode", "storrage", value={}), "joinNode: Additional property storrage is not allowed"),
        (_with("joinNode", "storage", "size", value="ten"), "joinNode.storage.size: Does not match pattern"),
        (_with("ingest", "resources", "limits", "memory", value=1), "ingest.resources.limits.memory: Invalid type"),
        (_with("audit", "spark", "master", value="k8s://x"), "audit.spark.master: Does not match pattern"),
        (_with("test", "events", value=-1), "test.events: Must be greater than or equal to 0"),
        (_with("mesh", "stream", value={}), "mesh: Additional property stream is not allowed"),
        (_with("mesh", "kafka", value={}), "bootstrap is required"),
        (_with("mesh", "kafka", "sasl.password", value="hunter2"), "mesh.kafka.sasl.password: Does not match pattern"),
        (_with("mesh", "partitions", value=0), "mesh.partitions: Must be greater than or equal to 1"),
        (
            _with("mesh", "streams", "orders", "latenes", value="5s"),
            "orders: Additional property latenes is not allowed",
        ),
        (_with("mesh", "streams", "orders", "fields", "ts", value="time"), "mesh.streams.orders.fields.ts"),
        (_with("mesh", "streams", "orders", value={"fields": {"a": "int64"}}), "event_time is required"),
        (_with("mesh", "queries", value={}), "mesh.queries: Must have at least 1 properties"),
        (_with("mesh", "queries", "paid-orders", value=QUERY), "mesh.queries"),
        (_with("mesh", "workers", value={"paid_orders.j9": 2}), "`paid_orders.j9`, which is no service of this mesh"),
        (_with("mesh", "workers", value={"ingest": 0}), "mesh.workers.ingest: Must be greater than or equal to 1"),
        (_with("host", "groups", value={"a": ["paid_orders.j3"]}), "host.groups.a names `paid_orders.j3`"),
        (_with("host", "groups", value={"a": ["ingest"], "b": ["ingest"]}), "host.groups names `ingest` twice"),
        (_with("backfill", "enabled", value=True), "backfill.query is empty"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_values_are_refused_with_the_place_to_mend(values: dict[str, Any], said: str) -> None:
    assert said in refused(values)


def test_a_refused_secret_is_not_repeated() -> None:
    assert "hunter2" not in refused(_with("mesh", "kafka", "sasl.password", value="hunter2"))


def test_alerts_have_a_page_each() -> None:
    rules = of_kind(rendered(CHART / "ci/secured-cluster-values.yaml"), "PrometheusRule")["shop-joinmesh-alerts"]
    alerts = {rule["alert"]: rule for group in rules["spec"]["groups"] for rule in group["rules"]}
    assert set(alerts) == {
        "JoinmeshWatermarkStandsStill",
        "JoinmeshLagGrows",
        "JoinmeshDiskFills",
        "JoinmeshServiceRestarts",
        "JoinmeshServiceSilent",
        "JoinmeshAuditFailed",
        "JoinmeshDeadLetters",
    }
    for name, rule in alerts.items():
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{name.lower()}"
        assert 'mesh="shop"' in rule["expr"]


def test_the_dashboard_is_of_the_mesh() -> None:
    data = of_kind(rendered(CHART / "ci/secured-cluster-values.yaml"), "ConfigMap")["shop-joinmesh-dashboard"]["data"]
    board = msgspec.json.decode(data["joinmesh-shop.json"])
    assert len(board["panels"]) == len(PANELS)
    for panel in board["panels"]:
        assert 'mesh="shop"' in panel["targets"][0]["expr"]
        assert "MESH" not in panel["targets"][0]["expr"]
