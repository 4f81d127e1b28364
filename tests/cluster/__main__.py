"""`python -m tests.cluster` (`make chart-test`): builds a control plane if there is none, and tells the story on it."""

import sys
import tempfile
import time
from pathlib import Path

from schemas.errors import JoinmeshError
from services.broker import LocalBroker
from tests.cluster.build import built
from tests.cluster.control_plane import ControlPlane
from tests.cluster.runner import Runner
from tests.cluster.story import Story


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    servers = built(say)
    with (
        tempfile.TemporaryDirectory(prefix="joinmesh-cluster-") as folder,
        LocalBroker(Path(folder) / "broker", tied=True) as broker,
        ControlPlane(servers, Path(folder)) as cluster,
        Runner(cluster),
    ):
        story = Story(cluster, Path(folder), broker.bootstrap)
        story.prepare()
        say("Kubernetes " + cluster.kubectl("version").stdout.splitlines()[-1].partition(": ")[2] + " is up")
        for step in story.steps:
            started = time.monotonic()
            name = step.__name__.replace("_", " ")
            try:
                said = step()
            except AssertionError as error:
                say(f"FAILED  {name}: {error}")
                return 1
            say(f"ok  {name} ({time.monotonic() - started:.0f} s): {said}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except JoinmeshError as error:
        print(f"chart-test: {error}", file=sys.stderr)
        sys.exit(1)
