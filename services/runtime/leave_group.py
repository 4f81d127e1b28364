"""Kafka's LeaveGroup request for a static member, by its name.

Neither librdkafka nor aiokafka sends one for a static member, because a restart must not leave. Version 3 of the
request is the first that names a member by its `group.instance.id`.

Invariant: an answer that is not success is raised.
"""

from typing import ClassVar

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import for_code
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Array, Int16, Int32, Schema, String
from faust.transport.drivers.aiokafka import credentials_to_aiokafka_auth

from schemas.mesh import Mesh
from services.runtime.security.for_faust import faust_credentials
from services.runtime.security.secrets import resolved

_UNKNOWN_MEMBER = 25  # it is gone already


class LeaveGroupResponse_v3(Response):  # type: ignore[misc]
    API_KEY = 13
    API_VERSION = 3
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        (
            "members",
            Array(("member_id", String("utf-8")), ("group_instance_id", String("utf-8")), ("error_code", Int16)),
        ),
    )


class LeaveGroupRequest_v3(RequestStruct):  # type: ignore[misc]
    API_KEY = 13
    API_VERSION = 3
    RESPONSE_TYPE = LeaveGroupResponse_v3
    SCHEMA = Schema(
        ("group", String("utf-8")),
        ("members", Array(("member_id", String("utf-8")), ("group_instance_id", String("utf-8")))),
    )


class LeaveGroup(Request[LeaveGroupRequest_v3]):  # type: ignore[misc]
    API_KEY: ClassVar[int] = 13

    def __init__(self, group: str, member: str) -> None:
        self._group, self._member = group, member

    def build(self, request_struct_class: type[LeaveGroupRequest_v3]) -> LeaveGroupRequest_v3:
        return request_struct_class(self._group, [("", self._member)])


async def leave_group(mesh: Mesh, group: str, member: str) -> None:
    brokers = resolved(mesh)["bootstrap.servers"]
    client = AIOKafkaAdminClient(bootstrap_servers=brokers, **credentials_to_aiokafka_auth(faust_credentials(mesh)))
    await client.start()
    try:
        coordinator = await client.find_coordinator(group)
        answer = await client._send_request(LeaveGroup(group, member), coordinator)
        codes = [answer.error_code, *(code for _, _, code in answer.members)]
        for code in codes:
            if code not in (0, _UNKNOWN_MEMBER):
                raise for_code(code)
    finally:
        await client.close()
