"""The chart as tests see it: rendered by Helm itself, each manifest checked against the pinned schemas.

Invariant: one rendering of the same values is done once. A manifest of a kind without a schema is an error, not a pass.
"""

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from schemas.mesh import Mesh, _Reader, parse_mesh
from tests.cluster.build import KUBERNETES
from tests.helm.trim import KINDS, PROMETHEUS_OPERATOR, SCHEMAS, trimmed

ROOT = Path(__file__).parent.parent.parent
CHART = ROOT / "helm" / "joinmesh"
HELM = Path(sys.executable).parent / "helm"
CI = sorted((CHART / "ci").glob("*-values.yaml"))
Manifest = dict[str, Any]


def helm(*arguments: str, stdin: str | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([HELM, *arguments], input=stdin, capture_output=True, text=True, timeout=60)


@functools.cache
def rendered(file: Path, *settings: str) -> tuple[Manifest, ...]:
    """What Helm makes of a values file, with `--set` settings."""
    sets = [word for setting in settings for word in ("--set", setting)]
    ran = helm("template", "shop", str(CHART), "--namespace", "prod", "--values", str(file), *sets)
    assert ran.returncode == 0, ran.stderr
    return tuple(manifest for manifest in yaml.safe_load_all(ran.stdout) if manifest)


def refused(values: Any) -> str:
    """What Helm says to values that it must not take."""
    ran = helm("template", "shop", str(CHART), "--values", "-", stdin=yaml.safe_dump(values))
    assert ran.returncode != 0, "Helm took it"
    return ran.stderr


@functools.cache
def parser_keys() -> dict[str, set[str]]:
    """The keys that the parser of mesh files knows: of the file, and of a stream."""
    known: dict[str, set[str]] = {}

    class Noting(_Reader):
        def table(self, node: Any, what: str, keys: tuple[str, ...] | None = None) -> Any:
            if keys is not None:
                known["stream" if what.startswith("stream") else "file"] = set(keys)
            return super().table(node, what, keys)

    Noting("mesh.yaml").mesh(yaml.compose(yaml.safe_dump(values_of("laptop")["mesh"])))
    return known


def mesh_of(manifests: tuple[Manifest, ...]) -> Mesh:
    """The mesh that services read."""
    return parse_mesh(of_kind(manifests, "ConfigMap")["shop-joinmesh-mesh"]["data"]["mesh.yaml"])


def values_of(name: str) -> dict[str, Any]:
    """A fresh copy of one of the supported shapes."""
    found: dict[str, Any] = yaml.safe_load((CHART / "ci" / f"{name}-values.yaml").read_text())
    return found


@functools.cache
def _validators() -> dict[tuple[str, str], Any]:
    kubernetes = json.loads((SCHEMAS / f"kubernetes-{KUBERNETES}.json").read_text())
    found = {
        kind: jsonschema.Draft4Validator(kubernetes | {"$ref": f"#/definitions/{name}"}) for kind, name in KINDS.items()
    }
    for crd in json.loads((SCHEMAS / f"prometheus-operator-{PROMETHEUS_OPERATOR}.json").read_text()):
        version = crd["spec"]["versions"][0]
        schema = trimmed(version["schema"]["openAPIV3Schema"])
        schema["properties"]["metadata"] = {"type": "object"}
        kind = (f"{crd['spec']['group']}/{version['name']}", crd["spec"]["names"]["kind"])
        found[kind] = jsonschema.Draft4Validator(schema)
    return found


def faults(manifest: Manifest) -> list[str]:
    """What Kubernetes would not accept in a manifest: unknown fields, wrong types, missing fields."""
    kind = (manifest.get("apiVersion", ""), manifest.get("kind", ""))
    if kind not in _validators():
        return [f"no schema for {kind}"]
    errors = _validators()[kind].iter_errors(manifest)
    return [f"{kind[1]} {'.'.join(map(str, error.absolute_path))}: {error.message[:300]}" for error in errors]


def pod_of(manifest: Manifest) -> Manifest | None:
    """The pod that a manifest makes, if it makes one: its metadata and spec."""
    match manifest["kind"]:
        case "Pod":
            return manifest
        case "Deployment" | "StatefulSet" | "Job":
            return dict(manifest["spec"]["template"])
        case "CronJob":
            return dict(manifest["spec"]["jobTemplate"]["spec"]["template"])
    return None


def pods(manifests: tuple[Manifest, ...]) -> Iterator[tuple[str, Manifest]]:
    """(kind/name, pod) of every manifest that makes pods."""
    for manifest in manifests:
        pod = pod_of(manifest)
        if pod is not None:
            yield f"{manifest['kind']}/{manifest['metadata']['name']}", pod


def of_kind(manifests: tuple[Manifest, ...], kind: str) -> dict[str, Manifest]:
    """Manifests of a kind by their name."""
    return {manifest["metadata"]["name"]: manifest for manifest in manifests if manifest["kind"] == kind}
