"""The mesh's Kafka settings for confluent-kafka, whose own names they are.

Invariant: all but our own key is passed on as it stands; that one becomes a callback that reads the token again for
each renewal.
"""

from typing import Any

from schemas.mesh import Mesh
from services.runtime.security.secrets import resolved
from services.runtime.security.settings import TOKEN, check_settings
from services.runtime.security.tokens import Tokens, extensions


def confluent_settings(mesh: Mesh) -> dict[str, Any]:
    check_settings(mesh)
    settings: dict[str, Any] = resolved(mesh)
    if settings.pop(TOKEN, None) is not None:
        tokens, more = Tokens(mesh), extensions(settings)
        settings.pop("sasl.oauthbearer.extensions", None)

        def renew(_: str) -> tuple[str, float, str, dict[str, str]]:
            token = tokens.next()
            return token.text, token.expires, "", more

        settings["oauth_cb"] = renew
    return settings
