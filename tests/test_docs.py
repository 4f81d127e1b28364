"""Every example in README and docs is real: mesh files plan, commands are accepted, links lead somewhere, JSON and
Python parse.

Invariant: no broker is needed, and no block of a checked language is left out.
"""

import json
import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas.mesh import Mesh, parse_mesh
from services.cli.main import COMMANDS, _parser, main
from services.runtime.queries import explain, parse_queries
from topology.ingest.decode import Decoder

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Example:
    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def examples(*languages: str) -> list[Example]:
    return [e for page in PAGES for e in _examples(page) if e.language in languages]


def _examples(page: Path) -> Iterator[Example]:
    text = page.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        yield Example(page, text.count("\n", 0, match.start()) + 1, match["language"], textwrap.dedent(match["text"]))


def commands() -> list[tuple[str, list[str]]]:
    """(where, arguments) of every `joinmesh …` line in shell examples and in running text."""
    found = []
    for example in examples("sh", "bash"):
        for number, line in enumerate(example.text.splitlines(), start=example.line + 1):
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                words = words[1:]
            if words and Path(words[0]).name == "joinmesh":
                found.append((f"{example.page.relative_to(ROOT)}:{number}", words[1:]))
    for page in PAGES:
        text = _FENCE.sub("", page.read_text(encoding="utf-8"))
        for match in re.finditer(r"`(?:\.venv/bin/)?joinmesh ([a-z][^`]*-f [^`]*)`", text):
            found.append((str(page.relative_to(ROOT)), shlex.split(match[1])))
    return found


VALUES = [e for e in examples("yaml") if isinstance(yaml.safe_load(e.text).get("mesh"), dict)]  # of the Helm chart
MESHES = [e for e in examples("yaml") if e not in VALUES]
COMMAND_LINES = commands()


def test_the_examples_are_found() -> None:
    """Guards the other tests: a fence that the pattern misses would make them pass on nothing."""
    fences = sum(len(re.findall(r"^ *```", page.read_text(encoding="utf-8"), re.MULTILINE)) for page in PAGES)
    assert fences == 2 * sum(len(list(_examples(page))) for page in PAGES)
    assert len(MESHES) >= 2
    assert len(COMMAND_LINES) >= 15
    assert {page.name for page in PAGES} >= {"README.md", "operations.md", "events.md", "0002-faust.md"}
    assert {e.language for page in PAGES for e in _examples(page)} <= {
        "",
        "sh",
        "bash",
        "yaml",
        "json",
        "python",
        "sql",
    }


@pytest.mark.parametrize("example", MESHES, ids=str)
def test_mesh_files_plan(example: Example) -> None:
    mesh = parse_mesh(example.text, file=str(example))
    for query in parse_queries(mesh).values():
        assert f"plan of {query.name}" in explain(mesh, query)


@pytest.mark.parametrize("example", VALUES, ids=str)
def test_values_of_the_chart_render(example: Example, tmp_path: Path) -> None:
    from tests.helm.chart import mesh_of, rendered

    file = tmp_path / "values.yaml"
    file.write_text(example.text)
    mesh = mesh_of(rendered(file))
    for query in parse_queries(mesh).values():
        assert f"plan of {query.name}" in explain(mesh, query)


def test_the_names_in_the_deploy_journey_are_the_charts() -> None:
    """Every `job/…`, `cronjob/…` and option of the README's journey is one that the chart or Helm has."""
    from tests.helm.chart import CHART, rendered

    made = {f"{m['kind'].lower()}/{m['metadata']['name']}" for m in rendered(CHART / "ci/laptop-values.yaml")}
    named = set(re.findall(r"\b((?:cron)?job/shop-[\w-]+)", _section("Deploy it")))
    assert named == {"job/shop-joinmesh-topics", "cronjob/shop-joinmesh-audit"} <= made


@pytest.mark.parametrize(("where", "arguments"), COMMAND_LINES, ids=[f"{w} {' '.join(a)}" for w, a in COMMAND_LINES])
def test_commands_are_accepted(where: str, arguments: list[str]) -> None:
    try:
        args = _parser(arguments).parse_args(arguments)
    except SystemExit:
        pytest.fail(f"{where}: joinmesh refuses these arguments: {arguments}")
    assert args.command in COMMANDS


def test_explain_runs_as_the_readme_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The README's journey as far as it goes without a broker: save the file, explain it."""
    monkeypatch.chdir(tmp_path)
    Path("mesh.yaml").write_text(next(e for e in MESHES if e.page.name == "README.md").text)
    ran = [a for where, a in COMMAND_LINES if where.startswith("README") and a == ["explain", "-f", "mesh.yaml"]]
    assert ran, "the README no longer shows it"
    assert main(ran[0]) == 0
    assert "plan of paid_orders: ((o p) s)" in capsys.readouterr().out


def test_the_readme_lists_exactly_the_commands() -> None:
    section = _section("Commands")
    assert re.findall(r"^\| `joinmesh (\w+)", section, re.MULTILINE) == list(COMMANDS)
    actions = next(
        a for a in _parser(["broker"])._subparsers._group_actions[0].choices["broker"]._actions if a.dest == "action"
    )  # type: ignore[union-attr, index]
    assert f"joinmesh broker {chr(92)}|".replace("\\|", "\\|".join(actions.choices or [])) in section


def test_the_readme_explains_every_key_of_the_mesh_file() -> None:
    keys = set(re.findall(r"^\| `([^`]+)`", _section("The mesh file"), re.MULTILINE))
    stream = {
        f"streams.<name>.{key}"
        for key in ("topic", "format", "event_time", "lateness", "idle_after", "table", "fields")
    }
    assert (
        keys
        == {
            "mesh",
            "kafka.bootstrap",
            "kafka.…",
            "partitions",
            "streams.<name>",
            "queries.<name>",
            "plans.<query>",
            "feedback.<query>",
            "heralds.<query>",
            "routing.<query>",
        }
        | stream
    )
    with pytest.raises(Exception, match="unknown key `zzz`") as refused:  # what the parser knows is what is listed
        parse_mesh(_readme_mesh_text().replace("    lateness: 5s\n", "    lateness: 5s\n    zzz: 1\n", 1))
    for key in stream:
        assert f"`{key.rpartition('.')[2]}`" in str(refused.value)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    for link in _LINK.findall(_FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            pytest.fail(f"{link}: pages link to one another only")
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{link} leads nowhere"
        if anchor:
            assert anchor in _anchors(target), f"{link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_page_is_listed(page: Path) -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    if page.parent != ROOT and page.name != "README.md":
        assert f"({page.relative_to(ROOT / 'docs')})" in index


@pytest.mark.parametrize("example", examples("json"), ids=str)
def test_json_parses(example: Example) -> None:
    assert isinstance(json.loads(example.text), dict)


@pytest.mark.parametrize("example", examples("python"), ids=str)
def test_python_compiles(example: Example) -> None:
    compile(example.text, str(example), "exec")


def test_the_example_event_is_an_event_and_the_example_dead_letter_is_dead() -> None:
    import base64

    decoder = Decoder(_readme_mesh().streams["orders"])
    event, _, dead = (e.text for e in examples("json") if e.page.name == "events.md")
    assert not decoder.decode([event.encode()]).broken
    letter = json.loads(dead)
    value = base64.b64decode(letter["value_base64"])
    assert len(value) == letter["bytes"]
    assert decoder.decode([value]).broken[0].reason == letter["reason"]


@pytest.mark.parametrize(
    ("value", "is_event"),
    [
        (None, False),
        (b"", False),
        (b"[]", False),
        (b'{"ts": 1} {}', False),
        (b'\xef\xbb\xbf{"ts": 1}', False),
        (b' {"ts": 1}\n', True),
        (b'{"ts": 1, "other": "\xff"}', False),
        (b'{"ts": 1, "other": "\\ud800"}', False),
        (b'{"ts": 1, "other": "\\ud83d\\ude00"}', True),
        (b'{"ts": 1, "order_id": 1.0}', False),
        (b'{"ts": 1, "order_id": 1e2}', False),
        (b'{"ts": 1, "order_id": "1"}', False),
        (b'{"ts": 1, "order_id": 9223372036854775807}', True),
        (b'{"ts": 1, "order_id": 9223372036854775808}', False),
        (b'{"ts": 1, "amount": 7}', True),
        (b'{"ts": 1, "amount": 1e400}', False),
        (b'{"ts": 1, "amount": NaN}', False),
        (b'{"ts": 01}', False),
        (b'{"ts": "2024-05-01T10:00:00"}', False),
        (b'{"ts": "2024-05-01 12:00:00+02:00"}', True),
        (b'{"ts": "2024-05-01T10:00:60Z"}', False),
        (b'{"amount": 1}', False),
        (b'{"ts": null}', False),
        (b'{"ts": 0}', False),
        (b'{"ts": 253402300799999}', True),
        (b'{"ts": 253402300800000}', False),
        (b'{"ts": 1, "country": null}', True),
        (b'{"ts": 1, "order_id": 1, "order_id": 2}', True),
        (b'{"ts": 1, "order_id": "x", "order_id": 2}', False),
        (b'{"ts": 1, "country": "' + b"x" * 1_048_576 + b'"}', False),
    ],
    ids=lambda v: repr(v)[:40],
)
def test_events_md_says_what_both_readers_do(value: bytes | None, is_event: bool) -> None:
    """The rules of docs/events.md, for the engine's reader and for the audit's own."""
    from services.audit.decode import Broken, event_decoder

    stream = _readme_mesh().streams["orders"]
    assert (not Decoder(stream).decode([value]).broken) == is_event
    audit = event_decoder({name: kind.value for name, kind in stream.fields.items()}, stream.event_time)
    try:
        audit(value)
    except Broken:
        assert not is_event
    else:
        assert is_event


def _readme_mesh_text() -> str:
    return next(e for e in MESHES if e.page.name == "README.md").text


def _readme_mesh() -> Mesh:
    return parse_mesh(_readme_mesh_text())


def _section(title: str) -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found: Any = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"README has no section {title}"
    return str(found[1])


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


_NAMED = re.compile(r"`(topology(?:\.\w+)+):(\w+(?:\.\w+)*)`")


def test_every_function_on_the_way_of_a_row_exists() -> None:
    import importlib

    page = (ROOT / "docs" / "architecture.md").read_text()
    named = _NAMED.findall(page[page.index("## The way of a row") :])
    assert len(named) > 20
    for module, path in named:
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
