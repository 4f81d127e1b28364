"""Which of librdkafka's security settings every client of a mesh understands, and what is refused.

Invariant: a setting about security is either translated for all three clients or refused by name; none is ignored by
one of them in silence.
"""

import re
from collections.abc import Mapping

from schemas.errors import MeshFileError
from schemas.mesh import Mesh, did_you_mean

PROTOCOLS = ("plaintext", "ssl", "sasl_plaintext", "sasl_ssl")
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
TOKEN = "sasl.oauthbearer.token"  # ours: a token that somebody else renews, usually `${file:…}`
UNDERSTOOD = (
    "security.protocol",
    "ssl.ca.location",
    "ssl.certificate.location",
    "ssl.key.location",
    "ssl.key.password",
    "ssl.endpoint.identification.algorithm",
    "sasl.mechanism",
    "sasl.mechanisms",
    "sasl.username",
    "sasl.password",
    TOKEN,
    "sasl.oauthbearer.method",
    "sasl.oauthbearer.client.id",
    "sasl.oauthbearer.client.secret",
    "sasl.oauthbearer.scope",
    "sasl.oauthbearer.extensions",
    "sasl.oauthbearer.token.endpoint.url",
)
_ABOUT_SECURITY = ("ssl.", "sasl.", "security.", "enable.ssl.", "enable.sasl.", "https.")
_A_FILE = re.compile(r"\$\{file:(?:\$\{service\}|[^{}])+\}")
_WHY = {
    "ssl.keystore.location": "write certificate and key as PEM files: ssl.certificate.location, ssl.key.location",
    "ssl.ca.pem": "write it into a file: ssl.ca.location",
    "ssl.certificate.pem": "write it into a file: ssl.certificate.location",
    "ssl.key.pem": "write it into a file: ssl.key.location",
    "enable.ssl.certificate.verification": "give the certificate authority instead: ssl.ca.location",
    "sasl.oauthbearer.config": f"give a token instead: {TOKEN}, or sasl.oauthbearer.method: oidc",
}


def protocol(kafka: Mapping[str, str]) -> str:
    return kafka.get("security.protocol", "plaintext").lower()


def mechanism(kafka: Mapping[str, str]) -> str:
    """librdkafka has two names for it, and GSSAPI if neither is there."""
    return kafka.get("sasl.mechanism", kafka.get("sasl.mechanisms", "GSSAPI")).upper()


def is_secured(mesh: Mesh) -> bool:
    return protocol(mesh.kafka) != "plaintext"


def check_settings(mesh: Mesh) -> None:
    """Refuse what one of the clients would not understand; looks at names and choices alone, at no secret."""
    kafka = mesh.kafka
    for key in kafka:
        if key.startswith(_ABOUT_SECURITY) and key not in UNDERSTOOD:
            hint = f"; {_WHY[key]}" if key in _WHY else did_you_mean(key, UNDERSTOOD)
            raise _refused(mesh, key, f"is not understood by every client of a mesh{hint}")
    if protocol(kafka) not in PROTOCOLS:
        raise _refused(mesh, "security.protocol", f"is none of {', '.join(PROTOCOLS)}")
    if kafka.get("ssl.endpoint.identification.algorithm", "https") not in ("https", "none"):
        raise _refused(mesh, "ssl.endpoint.identification.algorithm", "is neither https nor none")
    if protocol(kafka).startswith("sasl"):
        _check_sasl(mesh, kafka)
    elif any(key.startswith("sasl.") for key in kafka):
        raise _refused(mesh, "security.protocol", "must be sasl_ssl (or sasl_plaintext), because sasl.… is set")
    if not protocol(kafka).endswith("ssl") and any(key.startswith("ssl.") for key in kafka):
        raise _refused(mesh, "security.protocol", "must be ssl or sasl_ssl, because ssl.… is set")
    pair = ("ssl.certificate.location", "ssl.key.location")
    for one, other in (pair, pair[::-1]):
        if one in kafka and other not in kafka:
            raise _refused(mesh, other, f"is missing: {one} is set, and both are needed")


def _check_sasl(mesh: Mesh, kafka: Mapping[str, str]) -> None:
    if mechanism(kafka) not in MECHANISMS:
        raise _refused(mesh, "sasl.mechanism", f"must be one of {', '.join(MECHANISMS)}")
    needed = ["sasl.username", "sasl.password"]
    if mechanism(kafka) == "OAUTHBEARER":
        needed = [TOKEN]
        if kafka.get("sasl.oauthbearer.method", "default").lower() == "oidc":
            names = ("token.endpoint.url", "client.id", "client.secret")
            needed = [f"sasl.oauthbearer.{name}" for name in names]
    for key in needed:
        if key not in kafka:
            raise _refused(mesh, key, f"is missing: {mechanism(kafka)} needs {' and '.join(needed)}")
    if TOKEN in kafka and not _A_FILE.fullmatch(kafka[TOKEN]):
        raise _refused(mesh, TOKEN, "must be ${file:/path}: tokens expire, and the file is read again for each")


def _refused(mesh: Mesh, key: str, why: str) -> MeshFileError:
    return MeshFileError(f"`kafka.{key}` {why}", file=mesh.file)
