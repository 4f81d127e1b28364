"""Writes the rights of a mesh's services to Kafka as ACLs.

Invariant: ACLs are only added, from any host; granting twice changes nothing.
"""

from collections.abc import Mapping, Sequence

from confluent_kafka import KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
)

from schemas.errors import MachineError
from schemas.mesh import REFERENCE, Mesh
from services.runtime.acls import rights_of
from services.runtime.kafka import admin, reach
from services.runtime.security.refusals import refusal
from services.runtime.security.rights import Right

_RESOURCES = {
    "topic": ResourceType.TOPIC,
    "group": ResourceType.GROUP,
    "transactional-id": ResourceType.TRANSACTIONAL_ID,
}
_OPERATIONS = {
    "Read": AclOperation.READ,
    "Write": AclOperation.WRITE,
    "Create": AclOperation.CREATE,
    "Describe": AclOperation.DESCRIBE,
    "DescribeConfigs": AclOperation.DESCRIBE_CONFIGS,
}


def principal_form(mesh: Mesh) -> str:
    """How Kafka calls a service of this mesh, with `${service}` in it."""
    name = mesh.kafka.get("sasl.username", "")
    is_plain = "${service}" in name and not REFERENCE.search(name.replace("${service}", ""))
    return f"User:{name}" if is_plain else f"User:{mesh.name}-${{service}}"


def named_rights(mesh: Mesh, form: str) -> dict[str, list[Right]]:
    """Principal -> what it needs."""
    return {form.replace("${service}", service): found for service, found in rights_of(mesh).items()}


def grant_all(mesh: Mesh) -> int:
    """What all services of a mesh need, under the names they have by its file."""
    return grant(mesh, named_rights(mesh, principal_form(mesh)))


def grant(mesh: Mesh, rights: Mapping[str, Sequence[Right]]) -> int:
    """Principal -> what it may do from now on; gives the number of ACLs."""
    bindings = [
        AclBinding(
            _RESOURCES[right.resource],
            right.name,
            ResourcePatternType.PREFIXED if right.is_prefix else ResourcePatternType.LITERAL,
            principal,
            "*",
            _OPERATIONS[operation],
            AclPermissionType.ALLOW,
        )
        for principal, found in rights.items()
        for right in found
        for operation in right.operations
    ]
    client = admin(mesh)
    reach(mesh, client)
    for future in client.create_acls(bindings, request_timeout=30).values():
        try:
            future.result()
        except KafkaException as error:
            cause = error.args[0]
            raise refusal(mesh, cause, "to change ACLs", "use the right of the") or MachineError(
                f"ACLs could not be written to {mesh.bootstrap}: {cause.str()}"
            ) from None
    return len(bindings)
