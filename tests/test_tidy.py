"""The tree's own rules: which package may import which, what a file opens with, what must not be in it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("schemas", "topology", "services")
MAY_IMPORT = {"schemas": {"schemas"}, "topology": {"schemas", "topology"}, "services": set(OURS)}
IMPURE = {
    "asyncio",
    "confluent_kafka",
    "aiokafka",
    "faust",
    "rocksdict",
    "pyspark",
    "random",
    "time",
    "socket",
    "threading",
    "subprocess",
    "os",
    "pathlib",
}
FILES = sorted(path for package in OURS for path in (ROOT / package).rglob("*.py"))


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_knowledge_flows_one_way(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    ours = {name.split(".")[0] for name in imports(path)} & set(OURS)
    assert ours <= MAY_IMPORT[package], f"{package} must not import {ours - MAY_IMPORT[package]}"


@pytest.mark.parametrize(
    "path", [p for p in FILES if p.relative_to(ROOT).parts[0] != "services"], ids=lambda p: str(p.relative_to(ROOT))
)
def test_the_core_is_pure(path: Path) -> None:
    used = {name.split(".")[0] for name in imports(path)} & IMPURE
    allowed = {"pathlib"} if path.name == "mesh.py" else set()  # load_mesh reads the one file a person hands it
    assert used <= allowed, f"no I/O, clock or randomness in the core: {used}"


def test_the_audit_shares_nothing_with_the_engine() -> None:
    for path in (ROOT / "services" / "audit").rglob("*.py"):
        for name in imports(path):
            top = name.split(".")
            assert top[0] != "topology", f"{path.name} imports {name}"
            assert top[0] != "services" or top[1] in ("audit",), f"{path.name} imports {name}"


@pytest.mark.parametrize(
    "path", [p for p in FILES if p.name not in ("__init__.py", "__main__.py")], ids=lambda p: str(p.relative_to(ROOT))
)
def test_a_file_opens_with_what_it_computes(path: Path) -> None:
    doc = ast.get_docstring(ast.parse(path.read_text()))
    assert doc, "no docstring"
    assert len(path.read_text().splitlines()) <= 480, "more than one idea in a file"


def test_no_addresses_in_the_lock() -> None:
    for name in ("requirements.lock", "Makefile"):
        text = (ROOT / name).read_text()
        assert not re.search(r"https?://|--index-url|--extra-index-url|--find-links", text), name
