"""Whether a package of the lock has a known vulnerability: pip-audit over requirements.lock, development included.

`python -m tests.supply.advisories [pip-audit's options]`. Exit code 0: every package was looked up and none has one.

Invariant: a package that could not be looked up is not taken for a good one. pip-audit by itself passes them over, and
where its service cannot be reached that would be all.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent


def ask(options: list[str]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(ROOT / "requirements.lock"), "--require-hashes"]
    command += ["--disable-pip", "--format", "json", "--progress-spinner", "off", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        found: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        sys.exit(f"pip-audit: no answer from the advisory service; nothing was audited: {last[:300]}")
    return found


def judge(found: list[dict[str, Any]]) -> tuple[int, str]:
    """The exit code, and what to say.

    >>> judge([{"name": "a", "version": "1", "vulns": []}])
    (0, '1 packages of requirements.lock looked up, none has a known vulnerability')
    >>> judge([{"name": "a", "skip_reason": "not found"}])
    (1, 'pip-audit: the advisory service answers for none of 1 packages, so it is not reached; nothing was audited')
    >>> judge([{"name": "a", "skip_reason": "not found"}, {"name": "b", "version": "2", "vulns": [{"id": "X-1",
    ...     "fix_versions": ["3"]}]}])
    (1, 'b 2: X-1, mended in 3\\na: not audited: not found')
    >>> judge([])[0]
    1
    """
    skipped = [package for package in found if "skip_reason" in package]
    if len(skipped) == len(found):
        return 1, (
            f"pip-audit: the advisory service answers for none of {len(found)} packages, so it is not reached;"
            " nothing was audited"
        )
    bad = [
        f"{package['name']} {package['version']}: {vulnerability['id']}, mended in"
        f" {', '.join(vulnerability['fix_versions']) or 'no version yet'}"
        for package in found
        for vulnerability in package.get("vulns", [])
    ]
    bad += [f"{package['name']}: not audited: {package['skip_reason']}" for package in skipped]
    return (
        (1, "\n".join(bad))
        if bad
        else (
            0,
            f"{len(found)} packages of requirements.lock looked up, none has a known vulnerability",
        )
    )


if __name__ == "__main__":
    code, text = judge(ask(sys.argv[1:]))
    print(text, file=sys.stderr if code else sys.stdout)
    sys.exit(code)
