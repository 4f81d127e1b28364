"""Runs the pods of a rendered chart as containers of a Docker engine: the part of a kubelet that these tests need.

Command, arguments, environment, user, rights, memory and volumes are those of the manifests. Two things differ. Pods
share the machine's network, because an engine may have no other, so each gets a port of its own in the place of the
chart's. And every shell of the image is covered by an empty file, to see that none is needed.

Invariant: what a manifest says and this file does not know is an error, never left out silently.
"""

import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testcontainers.core.config import testcontainers_config
from testcontainers.core.container import DockerContainer

from services.broker.local import free_port

testcontainers_config.ryuk_disabled = True  # its image comes from a registry; what is started here is ended here

SHELLS = ("/bin/sh", "/bin/bash")
GROUP = 10001
Manifest = Mapping[str, Any]
_KNOWN = {
    "name", "image", "imagePullPolicy", "terminationMessagePolicy", "securityContext", "resources", "command", "args",
    "env", "ports", "startupProbe", "livenessProbe", "readinessProbe", "volumeMounts", "workingDir",
}  # fmt: skip


@dataclass
class Cluster:
    """What pods refer to: the chart's ConfigMaps, the user's Secrets, and a folder for volumes."""

    manifests: list[Manifest]
    secrets: Mapping[str, Mapping[str, bytes]]
    folder: Path
    running: "list[Pod]" = field(default_factory=list)

    def of_kind(self, kind: str) -> list[Manifest]:
        return [m for m in self.manifests if m["kind"] == kind]

    def files_of(self, volume: Manifest) -> dict[str, bytes]:
        """The files of a ConfigMap, a Secret, or several of them in one place."""
        if "configMap" in volume:
            name = volume["configMap"]["name"]
            found = next(m for m in self.of_kind("ConfigMap") if m["metadata"]["name"] == name)
            return {key: text.encode() for key, text in found["data"].items()}
        if "secret" in volume:
            source = volume["secret"]
            files = dict(self.secrets[source.get("name") or source["secretName"]])
            items = source.get("items")
            return {i["path"]: files[i["key"]] for i in items} if items else files
        if "projected" in volume:
            return {k: v for source in volume["projected"]["sources"] for k, v in self.files_of(source).items()}
        raise AssertionError(f"a volume of an unknown kind: {volume}")

    def services(self) -> "Iterator[Pod]":
        """A pod for every replica of every StatefulSet and Deployment."""
        for owner in [*self.of_kind("Deployment"), *self.of_kind("StatefulSet")]:
            for number in range(owner["spec"]["replicas"]):
                name = f"{owner['metadata']['name']}-{number}"
                claims = [c["metadata"]["name"] for c in owner["spec"].get("volumeClaimTemplates", [])]
                yield Pod(self, name, owner["spec"]["template"], claims)

    def job(self, component: str) -> "Pod":
        """The pod of a Job, or of a CronJob's Job, by its component."""
        for owner in [*self.of_kind("Job"), *self.of_kind("CronJob")]:
            spec = owner["spec"].get("jobTemplate", owner)["spec"]
            if spec["template"]["metadata"]["labels"]["app.kubernetes.io/component"] == component:
                return Pod(self, f"{owner['metadata']['name']}-job", spec["template"], [])
        raise AssertionError(f"the chart has no job {component}")

    def close(self) -> None:
        for pod in self.running:
            pod.delete()


class Pod:
    def __init__(self, cluster: Cluster, name: str, template: Manifest, claims: list[str]) -> None:
        self.cluster, self.name, self.spec, self.claims = cluster, name, template["spec"], claims
        self.service = template["metadata"].get("annotations", {}).get("joinmesh/service", name)
        self.port = free_port()
        self.container: Any = None
        self.started = 0.0

    def start(self) -> "Pod":
        """Start the pod's one container; a pod that was deleted finds its claimed volumes again, and no others."""
        (spec,) = self.spec["containers"]
        self.container = self._container(spec)
        self.started = time.monotonic()
        self.container.start()
        self.cluster.running.append(self)
        return self

    def run(self) -> tuple[int, str]:
        """Run init containers and container, one after the other; exit code and output of the last that ran."""
        code, output = 0, ""
        for spec in [*self.spec.get("initContainers", []), *self.spec["containers"]]:
            self.container = self._container(spec)
            with self.container:
                wrapped = self.container.get_wrapped_container()
                code = int(wrapped.wait()["StatusCode"])
                output = wrapped.logs().decode(errors="replace")
            if code != 0:
                break
        return code, output

    def kill(self) -> None:
        """SIGKILL, as when memory runs out or a machine is lost."""
        self.container.get_wrapped_container().kill()

    def is_running(self) -> bool:
        wrapped = self.container.get_wrapped_container()
        wrapped.reload()
        return bool(wrapped.status == "running")

    def restart(self) -> None:
        """What a kubelet does when a container has ended: the same pod, the same volumes."""
        self.started = time.monotonic()
        self.container.get_wrapped_container().start()

    def delete(self) -> None:
        self.container.get_wrapped_container().remove(force=True)
        self.cluster.running = [pod for pod in self.cluster.running if pod is not self]
        shutil.rmtree(self.cluster.folder / self.name, ignore_errors=True)

    def stop(self, timeout_s: int) -> int:
        """SIGTERM, and the exit code; 137 if it had to be killed."""
        wrapped = self.container.get_wrapped_container()
        wrapped.stop(timeout=timeout_s)
        return int(wrapped.wait()["StatusCode"])

    def tend(self) -> None:
        """What a kubelet does all the time: start what has ended by itself."""
        if not self.is_running():
            print(f"{self.name} ended by itself and is started again; its last lines:\n{self.logs()}")
            self.restart()

    def await_ready(self, timeout_s: float = 90) -> float:
        """Seconds from the start until the readiness probe says yes."""
        probe = self.spec["containers"][0]["readinessProbe"]["httpGet"]
        url = f"{probe.get('scheme', 'HTTP').lower()}://127.0.0.1:{self.port}{probe['path']}"
        began = self.started
        while time.monotonic() - began < timeout_s:
            try:
                urllib.request.urlopen(url, timeout=2).read()
                return time.monotonic() - began
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
            self.tend()
        raise AssertionError(f"{self.name} is not ready after {timeout_s} s:\n{self.logs()}")

    def logs(self) -> str:
        return str(self.container.get_wrapped_container().logs(tail=40).decode(errors="replace"))

    def memory_bytes(self) -> int:
        """What the processes of the container hold, without the kernel's cache of files."""
        stats = self.container.get_wrapped_container().stats(stream=False)["memory_stats"]
        return int(stats["stats"].get("rss", stats["stats"].get("anon", 0)))

    def _container(self, spec: Manifest) -> DockerContainer:
        unknown = set(spec) - _KNOWN
        assert not unknown, f"{self.name}: these tests do not know {unknown}"
        rights = {**self.spec["securityContext"], **spec["securityContext"]}
        assert rights["capabilities"] == {"drop": ["ALL"]}
        assert rights["seccompProfile"] == {"type": "RuntimeDefault"}, "the engine's own default is what is meant"
        words = [*spec["command"], *spec.get("args", [])]
        environment = {e["name"]: e["value"] if "value" in e else self._field(e) for e in spec.get("env", [])}
        for name, value in environment.items():
            words = [word.replace(f"$({name})", value) for word in words]
        for port in spec.get("ports", []):
            words = [word.replace(f":{port['containerPort']}", f":{self.port}") for word in words]
        container = (
            DockerContainer(spec["image"])
            .with_command(words[1:])
            .with_name(f"{self.name}-{self.port}")
            .with_kwargs(
                entrypoint=words[:1],
                network_mode="host",
                user=f"{rights['runAsUser']}:{rights['runAsGroup']}",
                read_only=rights["readOnlyRootFilesystem"],
                cap_drop=["ALL"],
                security_opt=[] if rights["allowPrivilegeEscalation"] else ["no-new-privileges"],
                mem_limit=_bytes(spec["resources"]["limits"]["memory"]),
                working_dir=spec.get("workingDir"),
            )
        )
        for name, value in environment.items():
            container = container.with_env(name, value)
        for host, inside, mode in [*self._mounts(spec), *self._no_shells()]:
            container = container.with_volume_mapping(str(host), inside, mode)
        return container

    def _field(self, variable: Manifest) -> str:
        path = variable["valueFrom"]["fieldRef"]["fieldPath"]
        return {"metadata.name": self.name, "status.podIP": "127.0.0.1"}[path]

    def _mounts(self, spec: Manifest) -> Iterator[tuple[Path, str, str]]:
        volumes = {volume["name"]: volume for volume in self.spec.get("volumes", [])}
        for mount in spec.get("volumeMounts", []):
            name = mount["name"]
            if name in self.claims:
                place = _folder(self.cluster.folder / "claims" / f"{name}-{self.name}")
            elif "emptyDir" in volumes[name]:
                place = _folder(self.cluster.folder / self.name / name)
            else:
                place = _folder(self.cluster.folder / self.name / name)
                for file, content in self.cluster.files_of(volumes[name]).items():
                    _write(place / file, content)
            yield place / mount.get("subPath", ""), mount["mountPath"], "ro" if mount.get("readOnly") else "rw"

    def _no_shells(self) -> Iterator[tuple[Path, str, str]]:
        for shell in SHELLS:
            nothing = self.cluster.folder / Path(shell).name
            nothing.touch()
            yield nothing, shell, "ro"


def _folder(place: Path) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    _give(place, 0o2770, 0o777)
    return place


def _write(file: Path, content: bytes) -> None:
    if not file.exists():
        file.write_bytes(content)
        _give(file, 0o440, 0o444)


def _give(place: Path, mode: int, without_root: int) -> None:
    """As fsGroup does it: the pod's group may, nobody else. Only root can give things away."""
    if os.getuid() == 0:
        os.chown(place, 0, GROUP)
        place.chmod(mode)
    else:
        place.chmod(without_root)


def _bytes(quantity: str) -> int:
    """
    >>> _bytes("512Mi")
    536870912
    """
    return int(quantity[:-2]) * 1024 ** (1 + ("Ki", "Mi", "Gi").index(quantity[-2:]))
