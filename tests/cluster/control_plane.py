"""A real Kubernetes control plane on loopback: etcd, API server, controllers, scheduler; kwok plays the kubelet.

Invariant: everything it starts, it ends, and what it starts dies with it; all its files are in one folder; nothing
listens on another address. Pods become Running without a container, except those of `REAL`, which `runner` runs as
processes.
"""

import json
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from schemas.errors import MachineError
from services.broker.local import free_port
from services.runtime.tied import tied_command

REAL = ("topics", "check")  # components whose pods are run as processes
TOKEN = "admin-of-a-throwaway-cluster"
VOLUMES = 40


class ControlPlane:
    """`with ControlPlane(built(...), folder) as cluster: cluster.kubectl("get", "pods")`."""

    def __init__(self, built: Path, folder: Path) -> None:
        self.bin, self.folder, self.stages = built / "bin", folder, built / "stages.yaml"
        self.kubeconfig = folder / "kubeconfig"
        self.port = free_port()
        self._children: list[tuple[str, subprocess.Popen[bytes]]] = []

    def __enter__(self) -> "ControlPlane":
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for _, child in reversed(self._children):
            child.kill()
            child.wait()
        self._children.clear()

    def kubectl(
        self, *arguments: str, stdin: str | None = None, check: bool = True
    ) -> "subprocess.CompletedProcess[str]":
        command = [str(self.bin / "kubectl"), f"--kubeconfig={self.kubeconfig}", *arguments]
        ran = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120)
        if check and ran.returncode != 0:
            raise AssertionError(f"kubectl {' '.join(arguments)}: {ran.stderr}{ran.stdout}")
        return ran

    def get(self, *arguments: str) -> list[dict[str, Any]]:
        """The objects that `kubectl get` finds."""
        found: list[dict[str, Any]] = json.loads(self.kubectl("get", *arguments, "-o", "json").stdout)["items"]
        return found

    def apply(self, *objects: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(objects))

    def _start(self) -> None:
        self._write_keys()
        etcd = self._etcd()
        self._child(
            "kube-apiserver",
            f"--etcd-servers={etcd}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={self.port}",
            f"--cert-dir={self.folder}",
            f"--service-account-key-file={self.folder / 'sa.pub'}",
            f"--service-account-signing-key-file={self.folder / 'sa.key'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-cluster-ip-range=10.96.0.0/16",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--endpoint-reconciler-type=none",
        )
        self._wait("the API server", lambda: self.kubectl("get", "--raw", "/readyz", check=False).returncode == 0)
        own = f"--kubeconfig={self.kubeconfig}"
        quiet = ("--leader-elect=false", "--bind-address=127.0.0.1", "--secure-port=0")
        signing = f"--service-account-private-key-file={self.folder / 'sa.key'}"
        self._child("kube-controller-manager", own, signing, "--use-service-account-credentials=false", *quiet)
        self._child("kube-scheduler", own, *quiet)
        self._child(
            "kwok",
            own,
            f"--config={self._write_stages()}",
            "--manage-all-nodes=false",
            "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
            "--node-ip=127.0.0.1",
            "--node-port=0",
        )
        self._furnish()

    def _etcd(self) -> str:
        client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        self._child(
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
        )
        return client

    def _write_keys(self) -> None:
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        form = serialization.PrivateFormat.TraditionalOpenSSL
        private = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        (self.folder / "sa.key").write_bytes(private)
        (self.folder / "sa.pub").write_bytes(public)
        (self.folder / "tokens.csv").write_text(f'{TOKEN},admin,admin,"system:masters"\n')
        cluster = {"server": f"https://127.0.0.1:{self.port}", "insecure-skip-tls-verify": True}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": TOKEN}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
            "current-context": "test",
        }
        self.kubeconfig.write_text(yaml.safe_dump(config))
        self.kubeconfig.chmod(0o600)

    def _write_stages(self) -> Path:
        """kwok's stages, except that it leaves the pods of `REAL` alone."""
        stages = [stage for stage in yaml.safe_load_all(self.stages.read_text()) if stage]
        component = '.metadata.labels["app.kubernetes.io/component"]'
        for stage in stages:
            if stage["metadata"]["name"] in ("pod-ready", "pod-complete"):
                rule = {"key": component, "operator": "NotIn", "values": list(REAL)}
                stage["spec"]["selector"]["matchExpressions"].append(rule)
        file = self.folder / "stages.yaml"
        file.write_text(yaml.safe_dump_all(stages))
        return file

    def _furnish(self) -> None:
        """One node, a default storage class and volumes of it."""
        size = {"cpu": "64", "memory": "256Gi", "pods": "200", "ephemeral-storage": "1Ti"}
        self.apply(
            {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {
                    "name": "node-1",
                    "annotations": {"kwok.x-k8s.io/node": "fake"},
                    "labels": {"kubernetes.io/hostname": "node-1"},
                },
                "status": {"capacity": size, "allocatable": size},
            },
            {
                "apiVersion": "storage.k8s.io/v1",
                "kind": "StorageClass",
                "metadata": {
                    "name": "disk",
                    "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
                },
                "provisioner": "kubernetes.io/no-provisioner",
            },
            *(
                {
                    "apiVersion": "v1",
                    "kind": "PersistentVolume",
                    "metadata": {"name": f"disk-{number}"},
                    "spec": {
                        "capacity": {"storage": "100Gi"},
                        "accessModes": ["ReadWriteOnce"],
                        "storageClassName": "disk",
                        "hostPath": {"path": f"/nowhere/{number}"},
                    },
                }
                for number in range(VOLUMES)
            ),
        )

    def _child(self, name: str, *arguments: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            command = tied_command([str(self.bin / name), *arguments])
            child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=self.folder)
        self._children.append((name, child))

    def _wait(self, what: str, ready: Any, timeout_s: float = 90) -> None:
        deadline = time.monotonic() + timeout_s
        while not ready():
            dead = [name for name, child in self._children if child.poll() is not None]
            if dead or time.monotonic() > deadline:
                tail = (self.folder / f"{(dead or ['kube-apiserver'])[0]}.log").read_text(errors="replace")[-1500:]
                raise MachineError(f"{what} did not start: {tail}")
            time.sleep(0.3)
