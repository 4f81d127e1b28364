"""The mesh's Kafka settings for Faust, whose client is aiokafka.

Invariant: what librdkafka and the Java client are told, Faust is told too.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import faust
from aiokafka.abc import AbstractTokenProvider

from schemas.mesh import Mesh
from services.runtime.security.secrets import resolved
from services.runtime.security.settings import check_settings, mechanism, protocol
from services.runtime.security.tls import tls_context
from services.runtime.security.tokens import Tokens, extensions


def faust_brokers(mesh: Mesh) -> list[str]:
    return [f"kafka://{address.strip()}" for address in resolved(mesh)["bootstrap.servers"].split(",")]


def faust_credentials(mesh: Mesh) -> Any:
    """What Faust calls credentials; None where everybody may come in."""
    check_settings(mesh)
    kafka = resolved(mesh)
    context = tls_context(mesh, kafka) if protocol(kafka).endswith("ssl") else None
    if not protocol(kafka).startswith("sasl"):
        return faust.SSLCredentials(context=context) if context is not None else None
    if mechanism(kafka) == "OAUTHBEARER":
        return faust.OAuthCredentials(oauth_cb=_Provider(mesh, kafka), ssl_context=context)
    return faust.SASLCredentials(
        username=kafka["sasl.username"],
        password=kafka["sasl.password"],
        mechanism=mechanism(kafka),
        ssl_context=context,
    )


class _Provider(AbstractTokenProvider):  # type: ignore[misc]
    def __init__(self, mesh: Mesh, kafka: Mapping[str, str]) -> None:
        self._tokens, self._extensions = Tokens(mesh), extensions(kafka)

    async def token(self) -> str:
        found = await asyncio.get_running_loop().run_in_executor(None, self._tokens.next)
        return found.text

    def extensions(self) -> dict[str, str]:
        return self._extensions
