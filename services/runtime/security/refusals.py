"""What Kafka refused, in one line that names who asked, what is missing and what to do.

Invariant: a client that is refused says so within seconds. librdkafka would try again for ever, and tell nobody but its
log.
"""

import re
import time
from collections.abc import Callable, Mapping
from textwrap import shorten
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from schemas.errors import AccessError
from schemas.mesh import Mesh
from services.runtime.security.secrets import hide, value_of
from services.runtime.security.settings import mechanism, protocol
from services.runtime.security.tls import whats_wrong

WORDS_MOST = 300  # of what Kafka says, which may be a whole request
PERSISTS_S = 4.0  # how long a failure that a broker's restart may cause too is taken for one
_ADDRESS = re.compile(r"//([^/\s]+:\d+)/")
_NOISE = re.compile(r"^(?:\S*//\S+ )|\s*\((?:after|install)[^)]*\)")
_RIGHTS = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "topic",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "group",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "transactional id",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "cluster",
}


def who(mesh: Mesh) -> str:
    """Who asks, as Kafka knows them."""
    if "sasl.username" in mesh.kafka:
        return value_of(mesh, "sasl.username", mesh.kafka["sasl.username"])
    if "sasl.oauthbearer.client.id" in mesh.kafka:
        return value_of(mesh, "sasl.oauthbearer.client.id", mesh.kafka["sasl.oauthbearer.client.id"])
    if "ssl.certificate.location" in mesh.kafka:
        return f"the holder of {value_of(mesh, 'ssl.certificate.location', mesh.kafka['ssl.certificate.location'])}"
    return mesh.service


def refusal(mesh: Mesh, error: KafkaError, name: str | None = None, doing: str = "use") -> AccessError | None:
    """The error for what was refused; None if it was something else. `name`: of the topic, group or id, if known."""
    code, text = error.code(), shorten(_NOISE.sub("", hide(error.str())), WORDS_MOST, placeholder=" …")
    if code in _RIGHTS:
        what = " ".join(filter(None, [_RIGHTS[code], name]))
        return AccessError(
            f"{who(mesh)} may not {doing} {what} at {mesh.bootstrap} ({text}); see what it needs: joinmesh acls -f"
            f" {mesh.file}"
        )
    if code in (KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED):
        return AccessError(f"Kafka at {mesh.bootstrap} does not let {who(mesh)} in: {_credentials(mesh)} ({text})")
    if code in (KafkaError.UNSUPPORTED_SASL_MECHANISM, KafkaError.ILLEGAL_SASL_STATE):
        return AccessError(
            f"Kafka at {mesh.bootstrap} does not offer `kafka.sasl.mechanism` {mechanism(mesh.kafka)} ({text})"
        )
    if code == KafkaError._SSL or "security.protocol" in text:
        found = _ADDRESS.search(error.str())
        address = found[1] if found else mesh.bootstrap.split(",")[0].strip()
        why = whats_wrong(mesh, address) if protocol(mesh.kafka).endswith("ssl") else None
        return AccessError(f"no secure connection to Kafka at {address}: {_tls(mesh, why) or text}")
    return None


def raise_refused(mesh: Mesh, error: KafkaError, topic: str | None) -> None:
    """Of an error that a consumer hands out: a right that is missing will not come by itself."""
    if error.code() in _RIGHTS and (found := refusal(mesh, error, topic, "read")) is not None:
        raise found


def said_by_kafka(mesh: Mesh, error: KafkaException) -> str:
    """What a client raised, as a line: a refusal, a setting that it does not know, or Kafka's own words."""
    cause = error.args[0] if error.args else error
    if not isinstance(cause, KafkaError):
        return str(cause)
    if cause.code() in (KafkaError._INVALID_ARG, KafkaError._CONFLICT, KafkaError._NOT_IMPLEMENTED):
        return f"{mesh.file}: `kafka:` cannot be used: {cause.str()}"
    return str(refusal(mesh, cause) or cause.str())


def is_sure(error: KafkaError) -> bool:
    """Whether it is a refusal, and nothing that a broker's restart would show too."""
    return error.code() not in (KafkaError._SSL, KafkaError._TRANSPORT) or "verif" in error.str()


def _credentials(mesh: Mesh) -> str:
    if mechanism(mesh.kafka) == "OAUTHBEARER":
        return "its token is refused; see `kafka.sasl.oauthbearer.…`"
    return "user name or password is wrong; see `kafka.sasl.username` and `kafka.sasl.password`"


def _tls(mesh: Mesh, why: str | None) -> str:
    if why is None:
        return ""
    hint = ""
    if "mismatch" in why:
        hint = "; write the name of its certificate into `kafka.bootstrap`"
    elif "expired" in why and "alert" not in why:
        hint = "; the broker needs a new one"
    elif "alert" in why:
        hint = f"; the broker refuses `kafka.ssl.certificate.location` of {mesh.service}"
    elif "self-signed" in why or "issuer" in why:
        hint = "; `kafka.ssl.ca.location` must name the authority that signed the broker's certificate"
    elif "wrong version" in why:
        hint = "; the broker does not speak TLS there: see `kafka.security.protocol`"
    return f"{why}{hint}"


class Refusals:
    """An `error_cb` of a client: raises what is refused where the client is polled, and passes on the rest."""

    def __init__(self, mesh: Mesh, settings: Mapping[str, Any], then: Callable[[KafkaError], None] | None = None):
        self.mesh, self._then = mesh, then
        self._names = {
            KafkaError.GROUP_AUTHORIZATION_FAILED: settings.get("group_id"),
            KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: settings.get("transactional_id"),
        }
        self._since: float | None = None

    def __call__(self, error: KafkaError) -> None:
        if self._then is not None:
            self._then(error)
        if is_sure(error) or self._persists(error):
            found = refusal(self.mesh, error, self._names.get(error.code()))
            if found is not None:
                raise found

    def _persists(self, error: KafkaError) -> bool:
        """Whether connections have failed for a while for a reason that might have passed."""
        if error.code() != KafkaError._SSL and "security.protocol" not in error.str():
            return False
        now = time.monotonic()
        if self._since is None or now - self._since > 10 * PERSISTS_S:
            self._since = now
        return now - self._since >= PERSISTS_S
