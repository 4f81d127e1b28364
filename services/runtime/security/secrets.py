"""What the references in `kafka:` of a mesh file stand for, and how secrets are kept out of every text.

Invariant: a reference is looked up when a client is made, not before, so a command that needs no Kafka needs no secret.
Whatever was looked up is hidden in logs and messages from then on.
"""

import logging
import os
import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from schemas.errors import MachineError
from schemas.mesh import REFERENCE, Mesh

HIDDEN = "***"
_SECRET = re.compile(r"password|secret|token$|\.pem$|oauthbearer\.config")
_SHORTEST = 4  # a shorter one would hide half of every text
_known: set[str] = set()


def resolved(mesh: Mesh) -> dict[str, str]:
    """The mesh's Kafka settings with every reference replaced by what it stands for."""
    return {key: value_of(mesh, key, text) for key, text in mesh.kafka.items()}


def value_of(mesh: Mesh, key: str, text: str) -> str:
    """One setting's value; remembered as a secret if it is one."""
    named = text.replace("${service}", mesh.service)
    value = REFERENCE.sub(lambda match: _looked_up(mesh, key, match[2], match[3]), named)
    if is_secret(key):
        remember(value)
    return value


def is_secret(key: str) -> bool:
    """
    >>> is_secret("sasl.password"), is_secret("ssl.key.pem"), is_secret("sasl.username"), is_secret("ssl.ca.location")
    (True, True, False, False)
    >>> is_secret("sasl.oauthbearer.token"), is_secret("sasl.oauthbearer.token.endpoint.url")
    (True, False)
    """
    return _SECRET.search(key) is not None


def _looked_up(mesh: Mesh, key: str, kind: str, name: str) -> str:
    if kind == "env":
        found, why = os.environ.get(name), "is not set"
    else:
        found, why = None, ""
        try:
            found = Path(name).read_text(encoding="utf-8").rstrip("\r\n")
        except OSError as error:
            why = f"cannot be read ({error.strerror})"
        except UnicodeDecodeError:
            why = "is not text"
    if found:
        return found
    what = f"environment variable {name}" if kind == "env" else f"file {name}"
    raise MachineError(
        f"{mesh.file}: `kafka.{key}` of {mesh.service} comes from {what}, which {why or 'is empty'}; provide it"
    )


def remember(secret: str) -> None:
    """Hide it from now on."""
    if len(secret) >= _SHORTEST:
        _known.add(secret)


def hide(text: str) -> str:
    """A text without the secrets that this process knows.

    >>> remember("quite-secret"); hide("password=quite-secret;")
    'password=***;'
    """
    for secret in sorted(_known, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def without_secrets(settings: Mapping[str, str]) -> dict[str, str]:
    """Settings that may be shown."""
    return {key: HIDDEN if is_secret(key) else hide(value) for key, value in settings.items()}


class _Hiding(logging.Formatter):
    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        return hide(self._inner.format(record))


def hide_in_logs() -> None:
    """No handler of the root logger, and no traceback of an error nobody caught, shows a secret."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_Hiding(handler.formatter or logging.Formatter()))

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.stderr.write(hide("".join(traceback.format_exception(kind, error, trace))))

    sys.excepthook = show
