"""Runs the pods of the check and of `helm test` as processes of this machine, as a kubelet would run their containers.

Invariant: what runs is the pod's own command, arguments and environment, on the ConfigMap that the API server has; how
it ended becomes the pod's status, with its last lines as the message. Init containers come first, and a failure ends
the pod.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from tests.cluster.control_plane import REAL, ControlPlane

MESH = "/etc/joinmesh/mesh.yaml"


class Runner:
    """Looks for new pods until it is closed."""

    def __init__(self, cluster: ControlPlane) -> None:
        self.cluster = cluster
        self._done: set[str] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Runner":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)

    def _watch(self) -> None:
        selector = f"app.kubernetes.io/component in ({', '.join(REAL)})"
        while not self._stop.wait(0.5):
            for pod in self.cluster.get("pods", "--all-namespaces", "-l", selector):
                uid = pod["metadata"]["uid"]
                if uid not in self._done and pod["spec"].get("nodeName"):
                    self._done.add(uid)
                    self._run(pod)

    def _run(self, pod: dict[str, Any]) -> None:
        statuses: dict[str, list[dict[str, Any]]] = {"initContainerStatuses": [], "containerStatuses": []}
        failed = False
        with tempfile.TemporaryDirectory() as folder:
            mesh = Path(folder) / "mesh.yaml"
            mesh.write_text(self._mesh_of(pod))
            for kind in ("initContainers", "containers"):
                for container in pod["spec"].get(kind, []) if not failed else []:
                    code, said = _process(pod, container, mesh)
                    failed = failed or code != 0
                    statuses[f"{kind[:-1]}Statuses"].append(_status(container, code, said))
        status = {"phase": "Failed" if failed else "Succeeded", **statuses}
        name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        patch = ("patch", "pod", name, "-n", namespace, "--subresource=status", "--type=merge", "-p")
        self.cluster.kubectl(*patch, json.dumps({"status": status}), check=False)

    def _mesh_of(self, pod: dict[str, Any]) -> str:
        volume = next(volume for volume in pod["spec"]["volumes"] if volume["name"] == "mesh")
        place = ("configmap", volume["configMap"]["name"], "-n", pod["metadata"]["namespace"], "-o", "json")
        text: str = json.loads(self.cluster.kubectl("get", *place).stdout)["data"]["mesh.yaml"]
        return text


def _process(pod: dict[str, Any], container: dict[str, Any], mesh: Path) -> tuple[int, str]:
    words = [*container["command"], *container["args"]]
    words = [word.replace(MESH, str(mesh)) for word in words]
    given = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    environment = os.environ | given | {"POD_NAME": pod["metadata"]["name"]}
    program = [sys.executable, "-m", "services.cli.main"] if words[0] == "joinmesh" else [sys.executable]
    ran = subprocess.run([*program, *words[1:]], capture_output=True, text=True, env=environment, timeout=300)
    return ran.returncode, (ran.stdout + ran.stderr)[-2000:]


def _status(container: dict[str, Any], code: int, said: str) -> dict[str, Any]:
    ended = {"exitCode": code, "reason": "Error" if code else "Completed", "message": said if code else ""}
    return {
        "name": container["name"],
        "image": container["image"],
        "imageID": "",
        "ready": False,
        "restartCount": 0,
        "state": {"terminated": ended},
    }
