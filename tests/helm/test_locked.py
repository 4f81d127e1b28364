"""What an image installs: derived from the one lock, closed, and no more than it needs."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "helm" / "containers" / "locked.py"


def locked(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, SCRIPT, ROOT / "requirements.lock", ROOT / "pyproject.toml", *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def names(text: str) -> set[str]:
    return set(re.findall(r"^([a-z0-9.-]+)==", text, re.MULTILINE))


def test_the_services_get_what_they_import_and_no_tools() -> None:
    found = names(locked("--without", "pyspark").stdout)
    assert found >= {"confluent-kafka", "faust-streaming", "aiokafka", "aiohttp", "rocksdict", "polars", "pyarrow"}
    assert not found & {"pyspark", "py4j", "pytest", "mypy", "ruff", "testcontainers", "hatchling", "cryptography"}


def test_spark_gets_spark_alone() -> None:
    assert names(locked("--only", "pyspark").stdout) == {"pyspark", "py4j"}


def test_every_line_stands_in_the_lock_and_every_package_has_hashes() -> None:
    lock = set((ROOT / "requirements.lock").read_text().splitlines())
    text = locked("--without", "pyspark").stdout
    assert set(text.splitlines()) <= lock
    assert all("--hash=sha256:" in block for block in re.split(r"^(?=\S)", text, flags=re.MULTILINE) if block)


@pytest.mark.parametrize("installed", ["faust-streaming", "aiohttp", "polars", "confluent-kafka"])
def test_what_a_package_says_it_needs_is_there(installed: str) -> None:
    """The lock's `# via` lines against the packages' own word."""
    from importlib.metadata import requires

    found = names(locked("--without", "pyspark").stdout)
    for line in requires(installed) or []:
        if "extra ==" in line or ";" in line:
            continue
        assert re.sub(r"[-_.]+", "-", re.split(r"[^A-Za-z0-9._-]", line)[0]).lower() in found, line


def test_a_package_that_is_not_in_the_lock_is_named() -> None:
    done = locked("--only", "no-such-package")
    assert done.returncode == 1
    assert "not in the lock: no-such-package" in done.stderr


def test_the_examples_in_it_hold() -> None:
    import doctest

    spec = importlib.util.spec_from_file_location("locked", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tried = doctest.testmod(module)
    assert tried.attempted >= 2
    assert tried.failed == 0
