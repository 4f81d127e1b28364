"""Writes the pinned schemas that rendered manifests are checked against: of Kubernetes, from its OpenAPI document, and
of the Prometheus operator, from its CRDs. Run `python -m tests.helm.trim` to take a newer version; it needs Go.

Invariant: only what the chart's kinds refer to is kept, without descriptions, and an object that names its properties
has no others, so that a wrong field fails. Both projects are under the Apache License 2.0, which is this project's too.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.build import KUBERNETES, module

PROMETHEUS_OPERATOR = "0.85.0"
SCHEMAS = Path(__file__).parent / "schemas"
KINDS = {  # (apiVersion, kind): where the OpenAPI document defines it
    ("v1", "ConfigMap"): "io.k8s.api.core.v1.ConfigMap",
    ("v1", "PersistentVolumeClaim"): "io.k8s.api.core.v1.PersistentVolumeClaim",
    ("v1", "Pod"): "io.k8s.api.core.v1.Pod",
    ("v1", "Service"): "io.k8s.api.core.v1.Service",
    ("v1", "ServiceAccount"): "io.k8s.api.core.v1.ServiceAccount",
    ("apps/v1", "Deployment"): "io.k8s.api.apps.v1.Deployment",
    ("apps/v1", "StatefulSet"): "io.k8s.api.apps.v1.StatefulSet",
    ("batch/v1", "CronJob"): "io.k8s.api.batch.v1.CronJob",
    ("batch/v1", "Job"): "io.k8s.api.batch.v1.Job",
    ("networking.k8s.io/v1", "NetworkPolicy"): "io.k8s.api.networking.v1.NetworkPolicy",
    ("policy/v1", "PodDisruptionBudget"): "io.k8s.api.policy.v1.PodDisruptionBudget",
}
CRDS = ("servicemonitors", "prometheusrules")
_INT_OR_STRING = {"anyOf": [{"type": "integer"}, {"type": "string"}]}


def trimmed(node: Any) -> Any:
    """A schema without prose and Kubernetes' own hints, strict where it names properties."""
    if isinstance(node, list):
        return [trimmed(item) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("format") == "int-or-string" or node.get("x-kubernetes-int-or-string"):
        return dict(_INT_OR_STRING)
    kept = {
        key: {name: trimmed(inner) for name, inner in value.items()} if key == "properties" else trimmed(value)
        for key, value in node.items()
        if key not in ("description", "format", "default") and not key.startswith("x-kubernetes")
    }
    if "properties" in kept:
        kept.setdefault("additionalProperties", False)
    return kept


def kubernetes() -> dict[str, Any]:
    text = (module("k8s.io/kubernetes", KUBERNETES) / "api/openapi-spec/swagger.json").read_text()
    definitions = json.loads(text)["definitions"]
    kept: dict[str, Any] = {}
    wanted = list(KINDS.values())
    while wanted:
        name = wanted.pop()
        if name not in kept:
            kept[name] = trimmed(definitions[name])
            wanted += _referred(kept[name])
    return {"definitions": dict(sorted(kept.items()))}


def _referred(node: Any) -> list[str]:
    if isinstance(node, list):
        return [name for item in node for name in _referred(item)]
    if not isinstance(node, dict):
        return []
    here = [node["$ref"].rpartition("/")[2]] if isinstance(node.get("$ref"), str) else []
    return here + [name for value in node.values() for name in _referred(value)]


def prometheus_operator() -> list[dict[str, Any]]:
    """The CRDs as the API server takes them, without prose."""
    folder = module("github.com/prometheus-operator/prometheus-operator", PROMETHEUS_OPERATOR)
    crds = []
    for name in CRDS:
        crd = yaml.safe_load(
            (folder / f"example/prometheus-operator-crd/monitoring.coreos.com_{name}.yaml").read_text()
        )
        crds.append(_without_prose(crd))
    return crds


def _without_prose(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_prose(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _without_prose(value)
        for key, value in node.items()
        if not (key == "description" and isinstance(value, str))
    }


if __name__ == "__main__":
    SCHEMAS.mkdir(exist_ok=True)
    for file, content in (
        (f"kubernetes-{KUBERNETES}.json", kubernetes()),
        (f"prometheus-operator-{PROMETHEUS_OPERATOR}.json", prometheus_operator()),
    ):
        (SCHEMAS / file).write_text(json.dumps(content, separators=(",", ":"), sort_keys=True) + "\n")
        print(f"wrote {SCHEMAS / file}")
