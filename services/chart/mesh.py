"""The value `mesh`: the mesh file as a type, so that a typo in it is refused before anything reaches the cluster.

Invariant: the keys are those that `schemas.mesh` accepts (a test compares them). What a type cannot say, such as
whether a query makes sense, is left to the check that runs before the first pod of an installation.
"""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

NAME = "^[A-Za-z_][A-Za-z0-9_]{0,62}$"
_WORKERS = r"^(ingest|([A-Za-z_][A-Za-z0-9_]*\.)?(sink|j[1-9][0-9]*))$"
_REFERENCE = r"^\$\{(file|env):.+\}$"
SECRETS = (
    "sasl.password",
    "sasl.oauthbearer.client.secret",
    "ssl.key.password",
    "ssl.key.pem",
    "ssl.keystore.password",
)
_SWITCH = "; `on` and `off` may stand without quotes"


def table(of: str, what: str, **more: Any) -> Any:
    """The description of a mapping whose keys match a pattern."""
    return Meta(description=what, extra_json_schema={"propertyNames": {"pattern": of}, **more})


class Stream(Struct, forbid_unknown_fields=True, kw_only=True):
    fields: Annotated[
        dict[str, Literal["int64", "float64", "bool", "string", "timestamp"]],
        table(NAME, "name: type", minProperties=1),
    ]
    topic: str | UnsetType = UNSET
    format: Literal["json"] | UnsetType = UNSET
    event_time: str | UnsetType = UNSET
    lateness: str | int | UnsetType = UNSET
    idle_after: str | int | UnsetType = UNSET
    table: str | UnsetType = UNSET


class MeshFile(Struct, forbid_unknown_fields=True, kw_only=True):
    mesh: Annotated[
        str, Meta(description="name of the mesh; begins every topic", pattern="^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")
    ]
    kafka: Annotated[
        dict[str, str | int | float | bool],
        Meta(
            description="`bootstrap`, and any librdkafka setting; secrets only as `${file:…}` or `${env:…}`",
            extra_json_schema={
                "anyOf": [{"required": ["bootstrap"]}, {"required": ["bootstrap.servers"]}],
                "properties": {name: {"type": "string", "pattern": _REFERENCE} for name in SECRETS},
            },
        ),
    ]
    streams: Annotated[dict[str, Stream], table(NAME, "the source streams", minProperties=1)]
    queries: Annotated[
        dict[str, Annotated[str, Meta(min_length=1)]], table(NAME, "the standing queries", minProperties=1)
    ]
    partitions: Annotated[int, Meta(description="of each join node", ge=1, le=1024)] | UnsetType = UNSET
    plans: Annotated[dict[str, str], table(NAME, "query: tree")] | UnsetType = UNSET
    feedback: (
        Annotated[dict[str, Literal["on", "off", "auto"] | bool], table(NAME, "query: on, off or auto" + _SWITCH)]
        | UnsetType
    ) = UNSET
    heralds: (
        Annotated[dict[str, Literal["on", "off"] | bool], table(NAME, "query: on or off" + _SWITCH)] | UnsetType
    ) = UNSET
    routing: Annotated[dict[str, Literal["fixed", "eddy"]], table(NAME, "query: fixed or eddy")] | UnsetType = UNSET
    workers: (
        Annotated[
            dict[str, Annotated[int, Meta(ge=1, le=1024)]],
            table(_WORKERS, "pods of a service: `ingest`, `<query>.j1`, `<query>.sink`; `j1`, `sink`: of every query"),
        ]
        | UnsetType
    ) = UNSET
    placement: (
        Annotated[
            Literal["per-service", "together"],
            Meta(description="`together`: all services in one pod"),
        ]
        | UnsetType
    ) = UNSET
