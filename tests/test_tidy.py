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
ROOMS = {  # of topology/: what each may import of it
    "query": {"query"},
    "plan": {"plan", "query"},
    "state": {"state", "query"},
    "message": {"message", "state"},
    "restraint": {"restraint", "plan", "query", "state", "message"},
    "join": {"join", "plan", "query", "state", "message", "restraint"},
    "ingest": {"ingest", "plan", "query", "state", "message"},
    "results": {"results", "plan", "query", "state", "message"},
}
RESTRAINTS = ("suspension", "heralding", "hiding")  # of topology/restraint/: none knows another, no helper knows one
FILES = sorted(path for package in OURS for path in (ROOT / package).rglob("*.py"))


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            if (ROOT / node.module.replace(".", "/")).is_dir():  # modules of a package
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            else:
                found.add(node.module)
    return found


def does_not_belong(path: str, name: str) -> bool:
    """Whether a file of topology/ must not import a module of it; both from there on."""
    room, module = path.split("/"), name.split(".")
    if room[0] in ROOMS and module[0] not in ROOMS[room[0]]:
        return True
    if room[0] == module[0] == "restraint" and len(module) > 1:
        return module[1] in RESTRAINTS and module[1] != room[1].removesuffix(".py")
    return False


def misplaced() -> set[tuple[str, str]]:
    """(file, imported module) that the table of rooms does not allow."""
    found = set()
    for path in (ROOT / "topology").rglob("*.py"):
        here = path.relative_to(ROOT / "topology").as_posix()
        ours = {name.removeprefix("topology.") for name in imports(path) if name.startswith("topology.")}
        found |= {(here, name) for name in ours if does_not_belong(here, name)}
    return found


def test_rooms_know_what_the_design_says() -> None:
    assert misplaced() == set()


@pytest.mark.parametrize("room", [*ROOMS, "oracle", "testing"])
def test_a_made_up_import_is_reported(room: str) -> None:
    """From each room in every direction; of the restraints each from each."""
    others = {"query", "plan", "state", "message", "restraint", "join", "ingest", "results", "oracle", "testing"}
    reported = {other for other in others if does_not_belong(f"{room}/made_up.py", f"{other}.made_up")}
    assert reported == others - ROOMS.get(room, others)
    if room == "restraint":
        places = {name: f"restraint/{name}.py" if name == "hiding" else f"restraint/{name}/x.py" for name in RESTRAINTS}
        for other in RESTRAINTS:
            assert does_not_belong("restraint/interface.py", f"restraint.{other}")
            for name, path in places.items():
                assert does_not_belong(path, f"restraint.{other}.x") == (name != other)
                assert not does_not_belong(path, "restraint.interface")


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
            ours = top[:2] == ["services", "audit"] or top[:3] == ["services", "runtime", "security"]
            assert top[0] != "services" or ours, f"{path.name} imports {name}"


def test_how_to_reach_kafka_knows_nothing_of_the_engine() -> None:
    """So the audit may use it."""
    for path in (ROOT / "services" / "runtime" / "security").rglob("*.py"):
        for name in imports(path):
            top = name.split(".")
            assert top[0] != "topology", f"{path.name} imports {name}"
            assert top[0] != "services" or top[:3] == ["services", "runtime", "security"], f"{path.name} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_is_pickled(path: Path) -> None:
    """Whoever can write what is unpickled can run code. Spark alone sends our functions to its own workers that way."""
    used = {name.split(".")[0] for name in imports(path)} & {"pickle", "cPickle", "dill", "joblib", "marshal", "shelve"}
    assert not used
    assert "cloudpickle" not in path.read_text() or path == ROOT / "services" / "audit" / "session.py"


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
