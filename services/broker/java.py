"""Finds a Java that is new enough for the broker and for Spark.

Invariant: what `find_java` returns has been run once and has told its version, 17 or newer.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

from schemas.errors import MachineError

NEEDED = 17
_ADVICE = "install openjdk-17-jre (Debian, Ubuntu: apt install openjdk-17-jre-headless; macOS: brew install openjdk@17)"


def find_java() -> str:
    """The java command: from JAVA_HOME when set, else from PATH."""
    home = os.environ.get("JAVA_HOME")
    if home:
        java = Path(home) / "bin" / "java"
        if not java.is_file():
            raise MachineError(
                f"Java {NEEDED} or newer is needed, but JAVA_HOME={home} holds no bin/java; correct it or {_ADVICE}"
            )
        command = str(java)
    else:
        found = shutil.which("java")
        if found is None:
            raise MachineError(f"Java {NEEDED} or newer is needed and no `java` is on the PATH; {_ADVICE}")
        command = found
    version = java_version(command)
    if version is None:
        raise MachineError(f"Java {NEEDED} or newer is needed, but `{command} -version` does not answer; {_ADVICE}")
    if version < NEEDED:
        raise MachineError(
            f"Java {NEEDED} or newer is needed, but {command} is Java {version}; {_ADVICE}, or set JAVA_HOME to a"
            " newer one"
        )
    return command


def java_version(command: str) -> int | None:
    """The major version that a java command reports, or None when it does not run."""
    try:
        done = subprocess.run([command, "-version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_version(done.stderr + done.stdout) if done.returncode == 0 else None


def parse_version(text: str) -> int | None:
    """
    >>> parse_version('openjdk version "17.0.15" 2025-04-15'), parse_version('java version "1.8.0_392"')
    (17, 8)
    >>> parse_version("?")
    """
    match = re.search(r'version "(\d+)(?:\.(\d+))?', text)
    if match is None:
        return None
    major = int(match.group(1))
    return int(match.group(2)) if major == 1 and match.group(2) else major
