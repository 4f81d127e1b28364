"""Writes what the types of `services.chart.values` say into the chart: the values file, its schema, the README's table.

Invariant: each text depends on the types alone, so a test can compare it with the file. The schema is one tree without
references, because the validator inside Helm ignores whatever stands beside a `$ref`.
"""

import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
import yaml
from msgspec import NODEFAULT, Meta, Struct

from services.chart.mesh import MeshFile
from services.chart.values import Values

TABLE_BEGIN = "<!-- values: written by `make chart` -->"
TABLE_END = "<!-- end of values -->"


@dataclass(frozen=True)
class Key:
    """One key of the values: where it stands, what it is by default and what it means."""

    path: tuple[str, ...]
    default: Any  # NODEFAULT: the user must give it
    meaning: str
    is_section: bool


def keys(model: type[Struct] = Values, path: tuple[str, ...] = (), value: Any = NODEFAULT) -> Iterator[Key]:
    """Every key in the order of the types, sections before what they hold."""
    hints = get_type_hints(model, include_extras=True)
    for info in msgspec.structs.fields(model):
        kind, meaning = _unwrapped(hints[info.name])
        here = (*path, info.encode_name)
        default = NODEFAULT if value is NODEFAULT and info.required else _default(info, value)
        inner = isinstance(kind, type) and issubclass(kind, Struct) and kind is not MeshFile
        yield Key(here, default, meaning, inner)
        if inner:
            yield from keys(kind, here, default)


def _default(info: Any, value: Any) -> Any:
    if value is not NODEFAULT:
        return getattr(value, info.name)
    return info.default_factory() if info.default is NODEFAULT else info.default


def _unwrapped(hint: Any) -> tuple[Any, str]:
    if get_origin(hint) is not Annotated:
        return hint, ""
    kind, *metas = get_args(hint)
    said = [meta.description for meta in metas if isinstance(meta, Meta) and meta.description]
    return kind, said[0] if said else ""


def values_yaml() -> str:
    lines = [
        "# The chart's values and their defaults, written by `make chart` from services/chart/values.py.",
        "# `mesh` has no default: it is your mesh file, key by key. ci/*-values.yaml are whole examples.",
    ]
    top = ""
    for key in keys():
        indent = "  " * (len(key.path) - 1)
        if len(key.path) == 1 and (key.is_section or top == "section"):
            lines.append("")
        top = ("section" if key.is_section else "plain") if len(key.path) == 1 else top
        lines += textwrap.wrap(
            key.meaning, 116 - len(indent), initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
        )
        if key.default is NODEFAULT:
            lines.append(f"# {key.path[-1]}:")
        elif key.is_section:
            lines.append(f"{indent}{key.path[-1]}:")
        else:
            lines.append(f"{indent}{key.path[-1]}: {json.dumps(key.default)}")
    return "\n".join(lines) + "\n"


def table() -> str:
    """The README's table of values."""
    lines = [TABLE_BEGIN, "| key | default | meaning |", "|---|---|---|"]
    for key in keys():
        if key.is_section:
            continue
        default = "needed" if key.default is NODEFAULT else f"`{json.dumps(key.default)}`"
        lines.append(f"| `{'.'.join(key.path)}` | {default} | {key.meaning.replace('|', chr(92) + '|')} |")
    return "\n".join([*lines, TABLE_END])


def with_table(readme: str) -> str:
    """The README with its table renewed."""
    before, _, rest = readme.partition(TABLE_BEGIN)
    _, _, after = rest.partition(TABLE_END)
    return before + table() + after


def schema() -> dict[str, Any]:
    """The JSON schema that Helm checks values against."""
    found = msgspec.json.schema(Values)
    tree: dict[str, Any] = _inlined(found, found["$defs"])
    tree.pop("$defs")
    tree["properties"]["global"] = {"type": "object"}  # Helm hands this to a chart that another chart includes
    stream = tree["properties"]["mesh"]["properties"]["streams"]["additionalProperties"]
    stream["oneOf"] = [{"required": ["event_time"]}, {"required": ["table"]}]
    for key in ("lateness", "idle_after"):
        stream["dependencies"] = stream.get("dependencies", {}) | {key: ["event_time"]}
    return tree


def schema_json() -> str:
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    """A schema with every reference replaced by what it refers to, and without what a validator does not read."""
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        beside = {key: value for key, value in node.items() if key != "$ref"}
        return _inlined(definitions[node["$ref"].rpartition("/")[2]] | beside, definitions)
    return {key: _inlined(value, definitions) for key, value in node.items() if key not in ("title", "default")}


def parsed_defaults() -> Any:
    """The defaults as Helm reads them from values.yaml."""
    return yaml.safe_load(values_yaml())
