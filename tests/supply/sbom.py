"""The bill of materials of what runs: joinmesh and all packages it needs at run time, as CycloneDX JSON.

`python -m tests.supply.sbom DIR` describes the environment that `make sync` installed, with licences and who needs
what, less what only development needs.

Invariant: every version in it is the one of requirements.lock, everything that a listed package needs is listed, and
the same environment gives the same bytes.
"""

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent.parent
Bill = dict[str, Any]


def describe_environment() -> Bill:
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--spec-version", "1.6", "--output-reproducible"]
    done = subprocess.run([*command, "--pyproject", ROOT / "pyproject.toml"], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"sbom: cyclonedx_py failed: {done.stderr.strip().splitlines()[-1]}")
    bill: Bill = json.loads(done.stdout)
    return bill


def normal(name: str) -> str:
    """
    >>> normal("prometheus_client>=0.21"), normal("PyYAML")
    ('prometheus-client', 'pyyaml')
    """
    return re.sub(r"[-_.]+", "-", re.split(r"[^A-Za-z0-9._-]", name, maxsplit=1)[0]).lower()


def needed_by(requirements: list[str]) -> dict[str, set[str]]:
    """Package -> what it needs here, for all that these requirements lead to; of optional ones those that are asked
    for."""
    needs: dict[str, set[str]] = {}
    queue = [(Requirement(line), "") for line in requirements]
    seen: set[tuple[str, str]] = set()
    while queue:
        wanted, user = queue.pop()
        name = normal(wanted.name)
        if user:
            needs[user].add(name)
        needs.setdefault(name, set())
        for extra in ("", *wanted.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                inner = map(Requirement, distribution(name).requires or [])
                queue += [(r, name) for r in inner if r.marker is None or r.marker.evaluate({"extra": extra})]
    return needs


def at_run_time(bill: Bill, direct: list[str]) -> Bill:
    """The bill less what no direct dependency leads to. cyclonedx_py follows optional needs too, if they are there."""
    root, needs = bill["metadata"]["component"]["bom-ref"], needed_by(direct)
    refs = {normal(part["name"]): part["bom-ref"] for part in bill["components"]}
    names = {ref: name for name, ref in refs.items()}
    listed = [{"ref": root, "dependsOn": sorted(refs[normal(line)] for line in direct)}]
    listed += [{"ref": refs[name], "dependsOn": sorted(refs[n] for n in inner)} for name, inner in needs.items()]
    kept = [part for part in bill["components"] if names[part["bom-ref"]] in needs]
    return {**bill, "components": kept, "dependencies": sorted(listed, key=lambda entry: str(entry["ref"]))}


def check_locked(bill: Bill, lock: str) -> None:
    locked = {(normal(name), version) for name, version in re.findall(r"^([\w.-]+)==([^\s;]+)", lock, re.MULTILINE)}
    other = {(part["name"], part["version"]) for part in bill["components"]}
    other = {(name, version) for name, version in other if (normal(name), version) not in locked}
    if other:
        words = ", ".join(f"{name} {version}" for name, version in sorted(other))
        sys.exit(f"sbom: installed, but not so in requirements.lock: {words}; run make sync")


def main(folder: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bill = at_run_time(describe_environment(), project["dependencies"])
    check_locked(bill, (ROOT / "requirements.lock").read_text())
    text = json.dumps(bill, indent=2, sort_keys=True) + "\n"
    if (wrong := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)) is not None:
        sys.exit(f"sbom: not CycloneDX 1.6: {wrong}")
    file = Path(folder) / f"joinmesh-{project['version']}.cdx.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    print(f"{file}: {len(bill['components'])} packages at run time, CycloneDX 1.6")


if __name__ == "__main__":
    main(sys.argv[1])
