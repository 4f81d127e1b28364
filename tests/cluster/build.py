"""Builds the servers of a Kubernetes control plane from their Go modules, once per user, in the cache folder.

Invariant: a folder under its final name is complete. The build goes to a folder beside it and is renamed when every
binary is there; a lock makes a second build wait. Nothing is written inside the repository.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

from schemas.errors import MachineError
from services.broker.jars import Progress, cache_dir, locked, require_disk

KUBERNETES = "1.34.4"
ETCD = "3.6.4"  # what Kubernetes of this version is built against
KWOK = "0.7.0"
SERVERS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
_VERSION = "k8s.io/component-base/version"
_LDFLAGS = (
    f"-s -X {_VERSION}.gitVersion=v{KUBERNETES} -X {_VERSION}.gitMajor=1"
    f" -X {_VERSION}.gitMinor={KUBERNETES.split('.')[1]}"
)
_STAGES = ("node/fast", "node/heartbeat", "pod/fast")


def built(progress: Progress) -> Path:
    """The folder with the servers' binaries and kwok's stages; built now if this user has none yet."""
    cache = cache_dir()
    folder = cache / f"kubernetes-{KUBERNETES}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / "kubernetes.lock", lambda: progress("waiting for another build of Kubernetes")):
        if not folder.is_dir():
            _build(folder, progress)
    return folder


def _build(folder: Path, progress: Progress) -> None:
    if shutil.which("go") is None:
        raise MachineError("no `go` on the PATH; the control plane is built from source and needs Go 1.24 or later")
    require_disk(folder.parent, 8 * 1024**3)
    staging = folder.with_name(f"{folder.name}.part")
    if staging.exists():
        _remove(staging)
    (staging / "bin").mkdir(parents=True)
    progress(f"building Kubernetes {KUBERNETES} from source (10 minutes or so, once; kept in {folder})")
    _kubernetes(staging)
    progress(f"building etcd {ETCD}")
    _etcd(staging)
    progress(f"building kwok {KWOK}")
    _kwok(staging)
    _remove(staging / "source")
    os.rename(staging, folder)


def _kubernetes(staging: Path) -> None:
    """The published module lacks its staging folder; its parts are published modules of their own."""
    source = staging / "source" / "kubernetes"
    shutil.copytree(module("k8s.io/kubernetes", KUBERNETES), source)
    _writable(source)
    for name in ("go.work", "go.work.sum", "vendor"):
        place = source / name
        shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
    parts = f"v0.{KUBERNETES.split('.', 1)[1]}"
    text = (source / "go.mod").read_text()
    text = re.sub(r"(?m)^(\s+k8s\.io/[a-z-]+) v0\.0\.0$", rf"\1 {parts}", text)
    text = re.sub(r"(?m)^.*=> \./staging/.*\n", "", text)
    (source / "go.mod").write_text(text)
    commands = [f"./cmd/{name}" for name in SERVERS]
    _go(["build", "-p", "2", "-trimpath", f"-ldflags={_LDFLAGS}", "-o", f"{staging / 'bin'}/", *commands], source)


def _etcd(staging: Path) -> None:
    """etcd's own module replaces its parts by folders, which `go install` refuses; as a dependency it builds."""
    source = staging / "source" / "etcd"
    source.mkdir(parents=True)
    (source / "go.mod").write_text(f"module etcd\n\nrequire go.etcd.io/etcd/server/v3 v{ETCD}\n")
    _go(["build", "-p", "2", "-trimpath", "-o", str(staging / "bin" / "etcd"), "go.etcd.io/etcd/server/v3"], source)


def _kwok(staging: Path) -> None:
    fetched = module("sigs.k8s.io/kwok", KWOK)
    stages = sorted(file for stage in _STAGES for file in (fetched / "kustomize/stage" / stage).glob("*.yaml"))
    texts = [file.read_text() for file in stages if file.name != "kustomization.yaml"]
    (staging / "stages.yaml").write_text("\n---\n".join(texts))
    source = staging / "source" / "kwok"
    shutil.copytree(fetched, source)
    _writable(source)
    _go(["build", "-p", "2", "-trimpath", "-o", str(staging / "bin" / "kwok"), "./cmd/kwok"], source)


def module(path: str, version: str) -> Path:
    """Where Go keeps a module; fetched now if it is not there."""
    asked = subprocess.run(
        ["go", "mod", "download", "-json", f"{path}@v{version}"], capture_output=True, text=True, cwd=cache_dir()
    )
    found = re.search(r'"Dir": "([^"]+)"', asked.stdout)
    if asked.returncode != 0 or found is None:
        raise MachineError(f"could not fetch the Go module {path} v{version}: {asked.stdout}{asked.stderr}")
    return Path(found[1])


def _go(arguments: list[str], source: Path) -> None:
    environment = os.environ | {"GOFLAGS": "-mod=mod -buildvcs=false", "CGO_ENABLED": "0", "GOWORK": "off"}
    ran = subprocess.run(
        ["go", *arguments], cwd=source, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if ran.returncode != 0:
        raise MachineError(f"`go {arguments[0]}` failed in {source}: {ran.stdout.decode(errors='replace')[-2000:]}")


def _writable(folder: Path) -> None:
    """Go's cache is read-only; its copies are not."""
    for place in [folder, *folder.rglob("*")]:
        if not place.is_symlink():
            place.chmod(place.stat().st_mode | 0o200)


def _remove(folder: Path) -> None:
    _writable(folder)
    shutil.rmtree(folder)


if __name__ == "__main__":
    print(built(lambda text: print(text, flush=True)))
