"""The rules that every pod of the chart keeps: the Kubernetes *restricted* pod standard, and what the chart adds to it.

Invariant: a rule is a function of one pod that gives what is wrong; `RULES` names them all, and a pod without a
violation passes the API server's own admission at `restricted`.
"""

from collections.abc import Callable, Iterator
from typing import Any

Pod = dict[str, Any]
PORTS = {9464, 7078, 7079}  # metrics and probes; Spark's driver, where the audit runs on a cluster
VOLUMES = {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret", "downwardAPI", "csi", "ephemeral"}


def containers(pod: Pod) -> Iterator[dict[str, Any]]:
    for key in ("initContainers", "containers", "ephemeralContainers"):
        yield from pod["spec"].get(key, [])


def contexts(pod: Pod) -> Iterator[dict[str, Any]]:
    yield pod["spec"].get("securityContext", {})
    yield from (container.get("securityContext", {}) for container in containers(pod))


def effective(pod: Pod, key: str) -> Iterator[Any]:
    """A setting of each container, where it is not set that of the pod."""
    for container in containers(pod):
        own = container.get("securityContext", {})
        yield own.get(key, pod["spec"].get("securityContext", {}).get(key))


def root_user(pod: Pod) -> bool:
    users = [*(context.get("runAsUser") for context in contexts(pod))]
    return not all(value is True for value in effective(pod, "runAsNonRoot")) or 0 in users


def wrong_user(pod: Pod) -> bool:
    return any(value != 10001 for key in ("runAsUser", "runAsGroup") for value in effective(pod, key))


def writable_root(pod: Pod) -> bool:
    return any(c.get("securityContext", {}).get("readOnlyRootFilesystem") is not True for c in containers(pod))


def privilege_escalation(pod: Pod) -> bool:
    own = [c.get("securityContext", {}) for c in containers(pod)]
    return any(c.get("allowPrivilegeEscalation") is not False or c.get("privileged") for c in own)


def capabilities(pod: Pod) -> bool:
    own = [c.get("securityContext", {}).get("capabilities", {}) for c in containers(pod)]
    return any("ALL" not in c.get("drop", []) or c.get("add") for c in own)


def seccomp(pod: Pod) -> bool:
    return any(
        (value or {}).get("type") not in ("RuntimeDefault", "Localhost") for value in effective(pod, "seccompProfile")
    )


def host_namespace(pod: Pod) -> bool:
    return any(pod["spec"].get(key) for key in ("hostNetwork", "hostPID", "hostIPC"))


def volume_kind(pod: Pod) -> bool:
    return any(not (set(volume) - {"name"}) <= VOLUMES for volume in pod["spec"].get("volumes", []))


def odd_setting(pod: Pod) -> bool:
    """Sysctls, other processes' views, SELinux users: nothing of ours needs them."""
    odd = ("sysctls", "procMount", "seLinuxOptions", "windowsOptions", "appArmorProfile")
    return any(key in context for context in contexts(pod) for key in odd)


def host_of_probe(pod: Pod) -> bool:
    probes = [c.get(key, {}) for c in containers(pod) for key in ("startupProbe", "livenessProbe", "readinessProbe")]
    return any("host" in probe.get(way, {}) for probe in probes for way in ("httpGet", "tcpSocket"))


def missing_limit(pod: Pod) -> bool:
    given = [c.get("resources", {}) for c in containers(pod)]
    return any(
        "memory" not in r.get("limits", {}) or not {"cpu", "memory"} <= set(r.get("requests", {})) for r in given
    )


def unbounded_disk(pod: Pod) -> bool:
    volumes = pod["spec"].get("volumes", [])
    return any("sizeLimit" not in (volume["emptyDir"] or {}) for volume in volumes if "emptyDir" in volume)


def token_mounted(pod: Pod) -> bool:
    sources = [s for v in pod["spec"].get("volumes", []) for s in v.get("projected", {}).get("sources", [])]
    given = any("serviceAccountToken" in source for source in sources)
    return pod["spec"].get("automountServiceAccountToken") is not False or given


def own_account(pod: Pod) -> bool:
    return pod["spec"].get("serviceAccountName", "default") == "default"


def open_port(pod: Pod) -> bool:
    ports = [port for c in containers(pod) for port in c.get("ports", [])]
    return any(port["containerPort"] not in PORTS or "hostPort" in port for port in ports)


def secret_in_plain(pod: Pod) -> bool:
    """A secret in the environment's text or on the command line, where anyone who may list pods reads it."""
    words = ("password", "secret", "token=")
    texts = [text for c in containers(pod) for text in [*c.get("command", []), *c.get("args", [])]]
    texts += [f"{e['name']}={e['value']}" for c in containers(pod) for e in c.get("env", []) if "value" in e]
    return any(word in text.lower() and not text.endswith("/token") for text in texts for word in words)


def a_shell(pod: Pod) -> bool:
    return any(c.get("command", ["sh"])[0] not in ("python", "joinmesh") for c in containers(pod))


RULES: dict[str, Callable[[Pod], bool]] = {
    "root user": root_user,
    "wrong user": wrong_user,
    "writable root": writable_root,
    "privilege escalation": privilege_escalation,
    "capabilities": capabilities,
    "seccomp": seccomp,
    "host namespace": host_namespace,
    "volume kind": volume_kind,
    "odd setting": odd_setting,
    "host of probe": host_of_probe,
    "missing limit": missing_limit,
    "unbounded disk": unbounded_disk,
    "token mounted": token_mounted,
    "default account": own_account,
    "open port": open_port,
    "secret in plain": secret_in_plain,
    "a shell": a_shell,
}


def violations(pod: Pod) -> list[str]:
    """The names of the rules that a pod breaks."""
    return [name for name, broken in RULES.items() if broken(pod)]
