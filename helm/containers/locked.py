"""The part of requirements.lock that one image needs: some packages, and all that they need, with their hashes.

`python locked.py LOCK PYPROJECT --without pyspark` prints what the project itself needs at run time, less pyspark and
less what only pyspark needs; `--only pyspark` prints pyspark and what it needs. Who needs what stands in the lock's
`# via` lines, so there is one lock and every version in an image is a tested one.

Invariant: what is printed is closed (pip --require-hashes refuses it otherwise), and every line of it stands in the
lock.
"""

import argparse
import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def blocks(lock: str) -> list[tuple[str, str, set[str]]]:
    """(package, its lines, who needs it); a package may stand there twice, with different markers.

    >>> [(name, lines, users)] = blocks("a==1 --hash=sha256:0\\n    # via\\n    #   b\\n    #   c[x]\\n")
    >>> name, lines, sorted(users)
    ('a', 'a==1 --hash=sha256:0\\n', ['b', 'c'])
    """
    found = []
    for block in re.split(r"^(?=\S)", lock, flags=re.MULTILINE):
        if not block.strip():
            continue
        lines = block.splitlines(keepends=True)
        pinned = "".join(line for line in lines if not line.lstrip().startswith("#"))
        said = " ".join(line.strip(" #\n").removeprefix("via") for line in lines if line.lstrip().startswith("#"))
        found.append((normal(block), pinned, {normal(word) for word in said.split() if word[0] != "("}))
    return found


def normal(requirement: str) -> str:
    """
    >>> normal("PyYAML>=6"), normal("prometheus_client[x]==1")
    ('pyyaml', 'prometheus-client')
    """
    match = _NAME.match(requirement)
    if match is None:
        raise SystemExit(f"no package's name in {requirement!r}")
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def needed(lock: str, roots: Iterable[str]) -> str:
    """The lock's lines for these packages and all that they need."""
    found = blocks(lock)
    wanted = set(roots)
    missing = wanted - {name for name, _, _ in found}
    if missing:
        raise SystemExit(
            f"not in the lock: {', '.join(sorted(missing))}; renew it (docs/decisions/0001-dependencies.md)"
        )
    while more := {name for name, _, users in found if users & wanted} - wanted:
        wanted |= more
    return "".join(lines for name, lines, _ in found if name in wanted)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("lock", type=Path)
    parser.add_argument("project", type=Path)
    parser.add_argument("--without", nargs="*", default=[], help="direct dependencies that this image does not need")
    parser.add_argument("--only", nargs="*", help="these packages instead of the direct dependencies")
    given = parser.parse_args()
    direct = tomllib.loads(given.project.read_text())["project"]["dependencies"]
    roots = given.only if given.only is not None else {normal(line) for line in direct} - set(given.without)
    sys.stdout.write(needed(given.lock.read_text(), roots))


if __name__ == "__main__":
    main()
