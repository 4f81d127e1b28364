"""The chart on a real API server, step by step: what is taken, what is refused, and what is left behind.

Invariant: a step that does not see what it must see ends the story with what it saw instead. Namespaces enforce the
restricted pod standard, so that a pod that breaks it would not come up.
"""

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from schemas.mesh import parse_mesh
from services.generator.generate import ensure_sources
from services.runtime.kafka import describe_topics, ensure_topics
from services.runtime.queries import parse_queries, topics_of
from tests.cluster.control_plane import ControlPlane
from tests.helm.chart import CHART, CI, HELM, SCHEMAS, Manifest, helm, values_of

SPACE = "shop"
DRY = "dry"  # where manifests are only looked at
OURS = ("statefulsets,deployments,jobs,cronjobs,pods,services,configmaps,serviceaccounts,networkpolicies,"
        "poddisruptionbudgets,persistentvolumeclaims,servicemonitors,prometheusrules")  # fmt: skip


class Story:
    def __init__(self, cluster: ControlPlane, folder: Path, bootstrap: str) -> None:
        self.cluster, self.folder, self.bootstrap = cluster, folder, bootstrap
        self.steps: tuple[Callable[[], str], ...] = (
            self.every_shape_is_taken,
            self.wrong_manifests_are_refused,
            self.install,
            self.helm_test_fails_where_nobody_works,
            self.scale_touches_nothing_else,
            self.changed_mesh_rolls,
            self.bad_upgrades_change_nothing,
            self.rollback,
            self.uninstall,
            self.bad_installs_leave_nothing,
        )

    def prepare(self) -> None:
        """Namespaces that enforce the standard, the operator's CRDs, and source topics as their producers make them."""
        for name in (SPACE, DRY, "bad"):
            labels = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
            self.cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
        crds = next(SCHEMAS.glob("prometheus-operator-*.json"))
        for crd in json.loads(crds.read_text()):
            self.cluster.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump(crd))
        self._until(lambda: "servicemonitors" in self.cluster.kubectl("api-resources").stdout, "the CRDs")
        mesh = parse_mesh(yaml.safe_dump(self.values()["mesh"]))
        ensure_sources(mesh, mesh.streams, 2, lambda _: None)

    def values(self, **mesh: Any) -> dict[str, Any]:
        """The laptop's values on the broker of this test."""
        values = values_of("laptop")
        values["mesh"] |= {"kafka": {"bootstrap": self.bootstrap}, **mesh}
        values |= {"podDisruptionBudget": True, "test": {"events": 50, "timeoutSeconds": 5}}
        return values

    # -- steps -------------------------------------------------------------------------------------------------------

    def every_shape_is_taken(self) -> str:
        count = 0
        for file in CI:
            text = self._rendered(file)
            ran = self.cluster.kubectl("apply", "--server-side", "--dry-run=server", "-f", "-", stdin=text)
            assert "would violate" not in ran.stderr, ran.stderr
            count += ran.stdout.count("serverside-applied")
        return f"{count} manifests of {len(CI)} shapes pass server-side validation and warn of nothing"

    def wrong_manifests_are_refused(self) -> str:
        made = [manifest for manifest in yaml.safe_load_all(self._rendered(CI[0])) if manifest]
        node = next(manifest for manifest in made if manifest["kind"] == "StatefulSet")
        check = next(manifest for manifest in made if manifest["kind"] == "Pod")
        node["spec"]["template"]["spec"]["terminationGracePeriod"] = 45
        assert "unknown field" in self._refused(node) or "field not declared" in self._refused(node)
        check["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
        assert 'violates PodSecurity "restricted' in self._refused(check)
        return "an unknown field and a pod that may gain rights are refused by the server itself"

    def install(self) -> str:
        self._helm("install", self.values(), "--wait", "--timeout=180s")
        pods = self._pods()
        assert len(pods) == 5, sorted(pods)
        assert all(pod["status"]["phase"] == "Running" for pod in pods.values())
        mesh = parse_mesh(yaml.safe_dump(self.values()["mesh"]))
        wanted = [topic.name for topic in topics_of(mesh, parse_queries(mesh))]
        assert len(describe_topics(mesh, wanted)) == len(wanted)
        left = [made["metadata"]["name"] for made in self.cluster.get("jobs,configmaps", "-n", SPACE)]
        assert "shop-joinmesh-topics" not in left, left
        claims = self.cluster.get("pvc", "-n", SPACE)
        assert [claim["status"]["phase"] for claim in claims] == ["Bound", "Bound"], claims
        return f"5 pods run, {len(wanted)} topics were created by the check, no hook is left behind"

    def helm_test_fails_where_nobody_works(self) -> str:
        """No container runs here, so the check must say so."""
        ran = self._run("test", "shop", "--timeout=120s")
        assert ran.returncode != 0, ran.stdout
        said = self._message("app.kubernetes.io/component=check")
        assert "controller, ingest, paid_orders.j1, paid_orders.j2, paid_orders.sink of mesh shop: no report" in said, (
            said
        )
        return "helm test names the services that do not speak"

    def scale_touches_nothing_else(self) -> str:
        before = self._pods()
        self._helm("upgrade", self.values(), "--set=mesh.workers.paid_orders\\.j1=3", "--wait", "--timeout=180s")
        after = self._pods()
        assert set(after) - set(before) == {"shop-joinmesh-paid-orders-j1-1", "shop-joinmesh-paid-orders-j1-2"}
        same = [name for name in before if before[name]["metadata"]["uid"] == after[name]["metadata"]["uid"]]
        assert len(same) == len(before), f"restarted: {set(before) - set(same)}"
        return "two workers more, and none of the 5 pods that were there was restarted"

    def changed_mesh_rolls(self) -> str:
        before = self._pods()
        self._helm("upgrade", self.values(heralds={"paid_orders": False}), "--wait", "--timeout=240s")
        after = self._pods()
        assert len(after) == 5, sorted(after)
        assert all(before[name]["metadata"]["uid"] != after[name]["metadata"]["uid"] for name in after)
        self._until(lambda: len(self.cluster.get("pvc", "-n", SPACE)) == 2, "the volumes of scaled-away workers")
        return "all pods were replaced one by one; volumes of the workers that went are deleted"

    def bad_upgrades_change_nothing(self) -> str:
        before = self._pods()
        queries = {"paid_orders": self.values()["mesh"]["queries"]["paid_orders"].replace("o.amount", "o.amuont")}
        ran = self._run("upgrade", "shop", str(CHART), *self._file(self.values(queries=queries)), "--timeout=60s")
        assert ran.returncode != 0, ran.stdout
        said = self._message("app.kubernetes.io/component=topics")
        assert "no field `amuont` in stream orders; did you mean `amount`?" in said, f"{ran.stderr}{said}"
        after = self._pods()
        assert {name: pod["metadata"]["uid"] for name, pod in before.items()} == {
            name: pod["metadata"]["uid"] for name, pod in after.items()
        }
        return "a query with an error is named, and the running mesh is left alone"

    def rollback(self) -> str:
        self._ok(self._run("rollback", "shop", "1", "--wait", "--timeout=240s"))
        text = self.cluster.get("configmaps", "-n", SPACE, "-l", "app.kubernetes.io/component=mesh")[0]["data"][
            "mesh.yaml"
        ]
        assert "heralds" not in text
        assert all(pod["status"]["phase"] == "Running" for pod in self._pods().values())
        return "the first mesh file is back, all pods run"

    def uninstall(self) -> str:
        self._ok(self._run("uninstall", "shop", "--wait", "--timeout=180s"))
        self._until(lambda: not self._left(SPACE, but=("Job", "Pod")), "what the release had made")
        return "nothing of the release is left, volumes included"

    def bad_installs_leave_nothing(self) -> str:
        said = []
        for what, values, wanted in self._bad():
            started = time.monotonic()
            ran = self._run(
                "install", "bad", str(CHART), *self._file(values), "--atomic", "--timeout=120s", space="bad"
            )
            took = time.monotonic() - started
            assert ran.returncode != 0, f"{what}: installed"
            reason = ran.stderr + self._message("app.kubernetes.io/component=topics", space="bad")
            assert wanted in reason, f"{what}: {reason}"
            assert not self._left("bad", but=("Job", "Pod")), f"{what}: {self._left('bad')}"
            assert not json.loads(self._ok(self._run("list", "--all", "--output=json", space="bad")).stdout), what
            self.cluster.kubectl("delete", "jobs,pods", "--all", "-n", "bad")
            said.append(f"{what} ({took:.0f} s)")
        return "refused with the line to mend, nothing left but the check's own log: " + ", ".join(said)

    def _bad(self) -> list[tuple[str, dict[str, Any], str]]:
        query = self.values()["mesh"]["queries"]["paid_orders"]
        fits = parse_mesh(yaml.safe_dump(self.values(mesh="odd")["mesh"]))
        topic = topics_of(fits, parse_queries(fits))[0]
        ensure_topics(fits, [type(topic)(topic.name, topic.partitions + 1, topic.config)], lambda _: None)
        return [
            ("a typo", self.values(latness="5s"), "Additional property latness is not allowed"),
            ("a query with an error", self.values(queries={"q": query + " AND o.x = 1"}), "query q, line "),
            ("a wrong number of nodes", self.values() | {"nodes": {"paid_orders": 3}}, "`nodes: {paid_orders: 2}`"),
            ("no Kafka", self.values(kafka={"bootstrap": "127.0.0.1:1"}), "no Kafka broker answers at 127.0.0.1:1"),
            ("a topic with other settings", self.values(mesh="odd"), f"topic {topic.name} has {topic.partitions + 1}"),
        ]  # fmt: skip

    # -- what the steps share ----------------------------------------------------------------------------------------

    def _run(self, *arguments: str, space: str = SPACE) -> "subprocess.CompletedProcess[str]":
        config = (f"--kubeconfig={self.cluster.kubeconfig}", f"--namespace={space}")
        return subprocess.run([HELM, *arguments, *config], capture_output=True, text=True, timeout=400)

    def _helm(self, verb: str, values: dict[str, Any], *more: str) -> None:
        self._ok(self._run(verb, "shop", str(CHART), *self._file(values), *more))

    def _ok(self, ran: "subprocess.CompletedProcess[str]") -> "subprocess.CompletedProcess[str]":
        assert ran.returncode == 0, f"{ran.stdout}{ran.stderr}{self._message('app.kubernetes.io/component=topics')}"
        return ran

    def _file(self, values: dict[str, Any]) -> tuple[str, str]:
        file = self.folder / "values.yaml"
        file.write_text(yaml.safe_dump(values))
        return "--values", str(file)

    def _rendered(self, file: Path) -> str:
        """A shape's manifests; its accounts are made, because the server looks for the account of a pod."""
        text = helm("template", "shop", str(CHART), "--namespace", DRY, "--values", str(file)).stdout
        self.cluster.apply(*(made for made in yaml.safe_load_all(text) if made and made["kind"] == "ServiceAccount"))
        return text

    def _refused(self, manifest: Manifest) -> str:
        text = yaml.safe_dump(manifest)
        ran = self.cluster.kubectl("apply", "--server-side", "--dry-run=server", "-f", "-", stdin=text, check=False)
        assert ran.returncode != 0, ran.stdout
        return ran.stderr

    def _pods(self) -> dict[str, dict[str, Any]]:
        """The services' pods by name: a StatefulSet's have theirs for ever, the controller's is called so here."""
        found = self.cluster.get("pods", "-n", SPACE, "-l", "joinmesh/metrics=true")
        alive = [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]
        names = {"controller": "controller"}
        return {
            names.get(p["metadata"]["labels"]["app.kubernetes.io/component"], p["metadata"]["name"]): p for p in alive
        }

    def _message(self, selector: str, space: str = SPACE) -> str:
        """What containers said when they failed, as `kubectl describe pod` shows it."""
        said = []
        for pod in self.cluster.get("pods", "-n", space, "-l", selector):
            for status in [
                *pod["status"].get("initContainerStatuses", []),
                *pod["status"].get("containerStatuses", []),
            ]:
                said.append(status["state"].get("terminated", {}).get("message", ""))
        return "\n".join(said)

    def _left(self, space: str, but: tuple[str, ...] = ()) -> list[str]:
        found = self.cluster.get(OURS, "-n", space, "-l", "app.kubernetes.io/name=joinmesh")
        return [f"{made['kind']}/{made['metadata']['name']}" for made in found if made["kind"] not in but]

    def _until(self, true: Callable[[], bool], what: str, timeout_s: float = 90) -> None:
        deadline = time.monotonic() + timeout_s
        while not true():
            assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}: {self._left(SPACE)}"
            time.sleep(0.5)
