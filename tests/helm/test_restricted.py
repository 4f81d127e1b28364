"""Every pod of every supported shape keeps the restricted standard; and each rule catches the pod that breaks it."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helm.chart import CI, pods, rendered
from tests.helm.restricted import RULES, Pod, containers, violations

BACKFILL = ("backfill.enabled=true", "backfill.query=paid_orders")


@pytest.mark.parametrize("file", CI, ids=lambda file: file.stem)
def test_every_pod_is_restricted(file: Path) -> None:
    found = dict(pods(rendered(file)))
    assert len(found) >= 3
    assert {name: violations(pod) for name, pod in found.items() if violations(pod)} == {}


def test_the_backfill_is_restricted() -> None:
    found = dict(pods(rendered(CI[0], *BACKFILL)))
    assert violations(found["Job/shop-joinmesh-backfill-paid-orders"]) == []


def _own(pod: Pod) -> dict[str, Any]:
    """The rights of the first container."""
    found: dict[str, Any] = _first(pod)["securityContext"]
    return found


def _may_be_root(pod: Pod) -> None:
    for container in containers(pod):
        container["securityContext"].pop("runAsNonRoot")
    pod["spec"]["securityContext"]["runAsNonRoot"] = False


def _volume(pod: Pod, **kind: Any) -> None:
    pod["spec"]["volumes"].append({"name": "x", **kind})


def _first(pod: Pod) -> dict[str, Any]:
    return next(containers(pod))


def _set(pod: Pod, *path: str, value: Any) -> None:
    """Sets a value in the pod's spec."""
    place = pod["spec"]
    for key in path[:-1]:
        place = place.setdefault(key, {})
    place[path[-1]] = value


MUTANTS: list[tuple[str, str, Callable[[Pod], object]]] = [
    ("root user", "runs as 0", lambda pod: _set(pod, "securityContext", "runAsUser", value=0)),
    ("root user", "may be root", _may_be_root),
    ("root user", "one container may be root", lambda pod: _own(pod).update(runAsNonRoot=False)),
    ("root user", "one container runs as 0", lambda pod: _own(pod).update(runAsUser=0)),
    ("wrong user", "another user", lambda pod: _set(pod, "securityContext", "runAsUser", value=1000)),
    ("writable root", "writable", lambda pod: _own(pod).update(readOnlyRootFilesystem=False)),
    ("writable root", "not said", lambda pod: _own(pod).pop("readOnlyRootFilesystem")),
    ("privilege escalation", "allowed", lambda pod: _own(pod).update(allowPrivilegeEscalation=True)),
    ("privilege escalation", "not said", lambda pod: _own(pod).pop("allowPrivilegeEscalation")),
    ("privilege escalation", "privileged", lambda pod: _own(pod).update(privileged=True)),
    ("capabilities", "kept", lambda pod: _own(pod).pop("capabilities")),
    ("capabilities", "added", lambda pod: _own(pod)["capabilities"].update(add=["NET_ADMIN"])),
    ("seccomp", "not said", lambda pod: pod["spec"]["securityContext"].pop("seccompProfile")),
    ("seccomp", "unconfined", lambda pod: _own(pod).update(seccompProfile={"type": "Unconfined"})),
    ("host namespace", "network", lambda pod: _set(pod, "hostNetwork", value=True)),
    ("host namespace", "processes", lambda pod: _set(pod, "hostPID", value=True)),
    ("volume kind", "host path", lambda pod: _volume(pod, hostPath={"path": "/"})),
    ("odd setting", "sysctl", lambda pod: _set(pod, "securityContext", "sysctls", value=[])),
    ("odd setting", "proc", lambda pod: _own(pod).update(procMount="Unmasked")),
    ("host of probe", "elsewhere", lambda pod: _first(pod).update(livenessProbe={"httpGet": {"host": "a", "port": 1}})),
    ("missing limit", "no memory limit", lambda pod: _first(pod)["resources"]["limits"].pop("memory")),
    ("missing limit", "no request", lambda pod: _first(pod)["resources"].pop("requests")),
    ("unbounded disk", "no size", lambda pod: _volume(pod, emptyDir={})),
    ("token mounted", "not said", lambda pod: pod["spec"].pop("automountServiceAccountToken")),
    ("token mounted", "wanted", lambda pod: _set(pod, "automountServiceAccountToken", value=True)),
    (
        "token mounted",
        "projected",
        lambda pod: _volume(pod, projected={"sources": [{"serviceAccountToken": {"path": "t"}}]}),
    ),
    ("default account", "not said", lambda pod: pod["spec"].pop("serviceAccountName")),
    ("open port", "another port", lambda pod: _first(pod).update(ports=[{"containerPort": 6066}])),
    ("open port", "on the host", lambda pod: _first(pod).update(ports=[{"containerPort": 9464, "hostPort": 9464}])),
    ("secret in plain", "environment", lambda pod: _first(pod)["env"].append({"name": "KAFKA_PASSWORD", "value": "x"})),
    ("secret in plain", "command line", lambda pod: _first(pod)["args"].append("--password=x")),
    ("a shell", "a shell", lambda pod: _first(pod).update(command=["sh", "-c", "true"])),
    ("a shell", "the image's own", lambda pod: _first(pod).pop("command")),
]


@pytest.mark.parametrize(("rule", "what", "damage"), MUTANTS, ids=[f"{rule}: {what}" for rule, what, _ in MUTANTS])
def test_a_mutant_is_caught_by_name(rule: str, what: str, damage: Callable[[Pod], object]) -> None:  # noqa: ARG001
    for file in CI:
        for name, pod in pods(rendered(file)):
            mutant = copy.deepcopy(pod)
            damage(mutant)
            assert rule in violations(mutant), f"{name} of {file.name}"


def test_every_rule_has_a_mutant() -> None:
    assert {rule for rule, _, _ in MUTANTS} == set(RULES)
