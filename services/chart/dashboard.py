"""The Grafana dashboard of a mesh, as data: one row a panel.

Invariant: every series it draws is one that services serve, of the one mesh that is chosen in it.
"""

import json
from typing import Any

MESH = 'mesh="MESH"'  # the chart puts the mesh's name here
PANELS = (  # title, unit, legend, expression
    ("Events read a second", "short", "{{stream}}", "sum by (stream) (rate(joinmesh_events_total{M}[5m]))"),
    (
        "Results written a second",
        "short",
        "{{query}}",
        'sum by (query) (rate(joinmesh_rows_out_total{M,role="sink"}[5m]))',
    ),
    (
        "Lag: records left to read",
        "short",
        "{{role}} {{query}} {{node}}",
        "sum by (role, query, node) (joinmesh_lag_records{M})",
    ),
    (
        "Watermark: seconds behind now",
        "s",
        "{{role}} {{query}} {{node}}",
        "time() - min by (role, query, node) (joinmesh_watermark_timestamp_seconds{M})",
    ),
    ("Age of a block at the sink, p99", "s", "{{query}}", "max by (query) (joinmesh_block_age_p99_seconds{M})"),
    (
        "Duration of a step, p99",
        "s",
        "{{query}} {{node}}",
        "max by (query, node) (joinmesh_step_duration_p99_seconds{M})",
    ),
    ("State held", "bytes", "{{query}} {{node}} {{input}}", "sum by (query, node, input) (joinmesh_state_bytes{M})"),
    (
        "Disk free",
        "percentunit",
        "{{query}} {{node}} {{worker}}",
        "joinmesh_disk_free_bytes{M} / joinmesh_disk_size_bytes{M}",
    ),
    ("Late events a second", "short", "{{stream}}", "sum by (stream) (rate(joinmesh_late_events_total{M}[5m]))"),
    (
        "Set aside: dead records and blocks",
        "short",
        "{{role}} {{query}} {{node}}",
        "sum by (role, query, node) (increase(joinmesh_dead_records_total{M}[1h]))"
        " or sum by (role, query, node) (increase(joinmesh_dead_blocks_total{M}[1h]))",
    ),
    ("CPU", "short", "{{role}} {{query}} {{node}} {{worker}}", "rate(joinmesh_cpu_seconds_total{M}[5m])"),
    ("Memory", "bytes", "{{role}} {{query}} {{node}} {{worker}}", "joinmesh_resident_memory_bytes{M}"),
    ("Last audit: share of results found right", "percentunit", "{{query}}", "joinmesh_audit_recall_ratio{M}"),
    ("Ready", "short", "{{role}} {{query}} {{node}} {{worker}}", "joinmesh_ready{M}"),
)


def dashboard() -> dict[str, Any]:
    return {
        "title": "joinmesh MESH",
        "uid": "joinmesh-MESH",
        "tags": ["joinmesh"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}]
        },
        "panels": [_panel(number, *panel) for number, panel in enumerate(PANELS)],
    }


def _panel(number: int, title: str, unit: str, legend: str, expression: str) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": "A",
                "datasource": source,
                "expr": expression.replace("M}", MESH + "}").replace("{M,", "{" + MESH + ","),
                "legendFormat": legend,
            }
        ],
    }


def dashboard_json() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"
