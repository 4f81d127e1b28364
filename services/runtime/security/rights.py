"""A right at Kafka, and whether who asks has it: what each service may do is asked for before it begins.

Invariant: whatever is missing is named at once, all of it, before any client waits for a record that it may not read.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient

from schemas.errors import AccessError
from schemas.mesh import Mesh
from services.runtime.security.refusals import refusal, who

Resource = Literal["topic", "group", "transactional-id"]
Operation = Literal["Read", "Write", "Create", "Describe", "DescribeConfigs"]
TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Right:
    """What one service may do with one resource. Read and Write let it describe the resource too."""

    resource: Resource
    name: str
    operations: tuple[Operation, ...]
    is_prefix: bool = False

    def __str__(self) -> str:
        return f"{' and '.join(self.operations)} on {self.resource} {self.name}{'…' if self.is_prefix else ''}"


def require(mesh: Mesh, rights: Iterable[Right], client: AdminClient) -> None:
    """An `AccessError` that names every right on a topic or group that who asks does not have."""
    wanted = [right for right in rights if right.resource != "transactional-id" and not right.is_prefix]
    topics = [right.name for right in wanted if right.resource == "topic"]
    groups = [right.name for right in wanted if right.resource == "group"]
    asked: list[tuple[Resource, str, Any]] = []
    if topics:
        found = client.describe_topics(
            TopicCollection(topics), include_authorized_operations=True, request_timeout=TIMEOUT_S
        )
        asked += [("topic", name, future) for name, future in found.items()]
    if groups:
        found = client.describe_consumer_groups(groups, include_authorized_operations=True, request_timeout=TIMEOUT_S)
        asked += [("group", name, future) for name, future in found.items()]
    may = {(resource, name): _allowed(mesh, future) for resource, name, future in asked}
    missing = []
    for right in wanted:
        allowed = may[right.resource, right.name]
        if allowed is not None and (lacking := tuple(op for op in right.operations if op.upper() not in allowed)):
            missing.append(Right(right.resource, right.name, lacking))
    if missing:
        raise AccessError(
            f"{who(mesh)} lacks rights at {mesh.bootstrap}: {'; '.join(map(str, missing))}; an administrator grants"
            f" them with joinmesh acls -f {mesh.file} --create"
        )


def _allowed(mesh: Mesh, future: Any) -> set[str] | None:
    """The operations that are allowed; None where Kafka does not say, because the resource is not there yet."""
    try:
        found = future.result().authorized_operations or []
    except KafkaException as error:
        cause = error.args[0]
        if cause.code() in (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.GROUP_AUTHORIZATION_FAILED):
            return set()
        if (refused := refusal(mesh, cause)) is not None:
            raise refused from None
        return None  # a coordinator that is still loading, say: whoever works with it waits for it
    return {operation.name.replace("_", "") for operation in found}
