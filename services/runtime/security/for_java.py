"""The mesh's Kafka settings for the Java client, which Spark's Kafka connector uses.

Invariant: certificates and keys travel as text, so that a Spark worker needs no file of ours. Whatever is secret is
among `SECRET_KEYS`, which Spark is told to leave out of what it shows.
"""

from collections.abc import Mapping
from pathlib import Path

from schemas.errors import MachineError
from schemas.mesh import Mesh
from services.runtime.security.secrets import remember, resolved
from services.runtime.security.settings import TOKEN, check_settings, mechanism, protocol
from services.runtime.security.tokens import extensions

SECRET_KEYS = r"(?i)secret|password|token|access[.]?key|jaas|keystore|ssl\.key"  # Spark's own rule, and ours
ALLOWED_URLS = "org.apache.kafka.sasl.oauthbearer.allowed.urls"
_OAUTH = "org.apache.kafka.common.security.oauthbearer"


def java_settings(mesh: Mesh) -> dict[str, str]:
    """Settings of a Java client that reaches Kafka as this mesh's services do."""
    check_settings(mesh)
    kafka = resolved(mesh)
    found = {"bootstrap.servers": kafka["bootstrap.servers"]}
    if protocol(kafka) != "plaintext":
        found["security.protocol"] = protocol(kafka).upper()
    if protocol(kafka).endswith("ssl"):
        found |= _tls(mesh, kafka)
    if protocol(kafka).startswith("sasl"):
        found |= _sasl(mesh, kafka)
    return found


def token_url(mesh: Mesh) -> str | None:
    """Where the Java client fetches tokens; it wants to be told beforehand which address it may ask."""
    if TOKEN in mesh.kafka:
        path = mesh.kafka[TOKEN].replace("${service}", mesh.service)[len("${file:") : -1]
        return Path(path).absolute().as_uri()
    return resolved(mesh).get("sasl.oauthbearer.token.endpoint.url")


def _tls(mesh: Mesh, kafka: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    if "ssl.ca.location" in kafka:
        found |= {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": _pem(mesh, kafka, "ssl.ca.location")}
    if "ssl.certificate.location" in kafka:
        key = _pem(mesh, kafka, "ssl.key.location")
        if " RSA PRIVATE KEY" in key or " EC PRIVATE KEY" in key:
            raise MachineError(
                f"{mesh.file}: `kafka.ssl.key.location` ({kafka['ssl.key.location']}) is not PKCS#8, which the audit's"
                " Java client needs; convert it: openssl pkcs8 -topk8 -nocrypt -in OLD -out NEW"
            )
        found |= {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.certificate.chain": _pem(mesh, kafka, "ssl.certificate.location"),
            "ssl.keystore.key": key,
        }
        remember(key)
    if "ssl.key.password" in kafka:
        found["ssl.key.password"] = kafka["ssl.key.password"]
    if kafka.get("ssl.endpoint.identification.algorithm") == "none":
        found["ssl.endpoint.identification.algorithm"] = ""
    return found


def _pem(mesh: Mesh, kafka: Mapping[str, str], key: str) -> str:
    try:
        return Path(kafka[key]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MachineError(f"{mesh.file}: `kafka.{key}` ({kafka[key]}) cannot be read: {error}") from None


def _sasl(mesh: Mesh, kafka: Mapping[str, str]) -> dict[str, str]:
    if mechanism(kafka) == "OAUTHBEARER":
        options = {f"extension_{name}": value for name, value in extensions(kafka).items()}
        names = {"clientId": "client.id", "clientSecret": "client.secret", "scope": "scope"}
        options |= {
            java: kafka[f"sasl.oauthbearer.{name}"]
            for java, name in names.items()
            if TOKEN not in kafka and f"sasl.oauthbearer.{name}" in kafka
        }
        return {
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.jaas.config": _jaas(f"{_OAUTH}.OAuthBearerLoginModule", options),
            "sasl.login.callback.handler.class": f"{_OAUTH}.secured.OAuthBearerLoginCallbackHandler",
            "sasl.oauthbearer.token.endpoint.url": token_url(mesh) or "",
        }
    module = "plain.PlainLoginModule" if mechanism(kafka) == "PLAIN" else "scram.ScramLoginModule"
    login = {"username": kafka["sasl.username"], "password": kafka["sasl.password"]}
    return {
        "sasl.mechanism": mechanism(kafka),
        "sasl.jaas.config": _jaas(f"org.apache.kafka.common.security.{module}", login),
    }


def _jaas(module: str, options: Mapping[str, str]) -> str:
    r"""
    >>> _jaas("M", {"password": 'a"b\\c'})
    'M required password="a\\"b\\\\c";'
    """
    pairs = (f'{k}="{v}"' for k, v in ((k, v.replace("\\", "\\\\").replace('"', '\\"')) for k, v in options.items()))
    return " ".join([module, "required", *pairs]) + ";"
