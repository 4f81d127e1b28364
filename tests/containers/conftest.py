"""What the container tests share: an engine that answers, the images of this tree, and the chart rendered for a mesh.

Invariant: nothing is skipped. These tests are run by `make container-test` alone, which builds the images first; there,
a missing engine or image is a failure that says what to do.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
import yaml

from tests.containers.pods import Cluster

ROOT = Path(__file__).parent.parent.parent
CHART = ROOT / "helm" / "joinmesh"


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Left out of `make test`: collected only when named."""
    return None if any("containers" in str(argument) for argument in config.args) else True


@pytest.fixture(scope="session")
def engine() -> docker.DockerClient:
    try:
        client = docker.from_env(timeout=120)
    except docker.errors.DockerException as error:
        pytest.fail(
            f"no Docker engine answers ({error}); start one, or say where it is with DOCKER_HOST", pytrace=False
        )
    for name in ("joinmesh", "joinmesh-spark"):
        assert client.images.list(name), f"the engine has no image {name}; run `make images`"
    return client


Render = Callable[..., Cluster]


@pytest.fixture
def render(engine: docker.DockerClient, tmp_path: Path) -> Iterator[Render]:
    """render(values, secrets) is the chart's objects for these values, and the Secrets that its user would make."""
    made: list[Cluster] = []
    assert engine

    def render(values: dict[str, Any], secrets: dict[str, dict[str, bytes]] | None = None) -> Cluster:
        file = tmp_path / "values.yaml"
        file.write_text(yaml.safe_dump(values))
        helm = Path(sys.executable).with_name("helm")
        text = subprocess.run([helm, "template", "shop", CHART, "-f", file], check=True, capture_output=True, text=True)
        manifests = [m for m in yaml.safe_load_all(text.stdout) if m]
        made.append(Cluster(manifests, secrets or {}, tmp_path / "cluster"))
        made[-1].folder.mkdir()
        return made[-1]

    yield render
    for cluster in made:
        cluster.close()
