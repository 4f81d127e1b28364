"""What makes the local broker one that lets nobody in without a password, and nobody do what was not granted.

TLS for everything, SCRAM for clients, mutual TLS between the broker and its controller, and Kafka's own authorizer
with `allow.everyone.if.no.acl.found=false`.

Invariant: passwords are random, lie in files that only their owner can read, and are on no command line. Only the
administrator may do everything; every other user begins without any right.
"""

import secrets
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from schemas.errors import MachineError
from schemas.mesh import Mesh

HOST = "127.0.0.1"
MECHANISM = "SCRAM-SHA-512"
BROKER = "CN=joinmesh-broker"


@dataclass(frozen=True)
class Listener:
    """One more way in."""

    name: str
    protocol: str
    port: int


@dataclass(frozen=True)
class Guard:
    admin: str  # the user who may do everything
    users: tuple[str, ...] = ()  # the others
    keystore: Path | None = None  # PEM: key, then certificate; made here if there is none, for this machine
    ca: Path | None = None  # PEM: who signed it
    listeners: tuple[Listener, ...] = ()
    properties: Mapping[str, str] = field(default_factory=dict)  # more settings of the broker

    def prepare(self, folder: Path, java: str) -> None:
        """Passwords and certificate, unless they are there."""
        (folder / "secrets").mkdir(mode=0o700, exist_ok=True)
        for name in (self.admin, *self.users):
            if not password_file(folder, name).exists():
                _write(password_file(folder, name), secrets.token_urlsafe(24))
        if self.keystore is None and not (folder / "ca.pem").exists():
            _make_certificate(folder, java)

    def broker_properties(self, folder: Path, port: int, controller: int, internal: int) -> dict[str, str]:
        ways = (
            Listener("CLIENT", "SASL_SSL", port),
            Listener("INTERNAL", "SSL", internal),
            *self.listeners,
        )
        addresses = [f"{way.name}://{HOST}:{way.port}" for way in ways]
        protocols = [f"{way.name}:{way.protocol}" for way in ways]
        found = {
            "listeners": ",".join([*addresses, f"CONTROLLER://{HOST}:{controller}"]),
            "advertised.listeners": ",".join(addresses),
            "listener.security.protocol.map": ",".join([*protocols, "CONTROLLER:SSL"]),
            "inter.broker.listener.name": "INTERNAL",
            "listener.name.internal.ssl.client.auth": "required",
            "listener.name.controller.ssl.client.auth": "required",
            "sasl.enabled.mechanisms": MECHANISM,
            f"listener.name.client.{MECHANISM.lower()}.sasl.jaas.config": (
                "org.apache.kafka.common.security.scram.ScramLoginModule required;"
            ),
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "allow.everyone.if.no.acl.found": "false",
            "super.users": f"User:{BROKER};User:{self.admin}",
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.ca or folder / "ca.pem"),
        }
        if self.keystore is not None:
            found |= {"ssl.keystore.type": "PEM", "ssl.keystore.location": str(self.keystore)}
        else:
            found |= {
                "ssl.keystore.type": "PKCS12",
                "ssl.keystore.location": str(folder / "secrets" / "broker.p12"),
                "ssl.keystore.password": password_file(folder, "broker.p12-password").read_text(),
            }
        return {**found, **self.properties}

    def format_arguments(self, folder: Path) -> list[str]:
        """Of the storage tool, from a file: a password on a command line is everybody's."""
        file = folder / "secrets" / "format"
        password = password_file(folder, self.admin).read_text()
        _write(file, f"--add-scram\n{MECHANISM}=[name={self.admin},password={password}]")
        return [f"@{file}"]

    def client_settings(self, folder: Path, port: int, user: str | None = None) -> dict[str, str]:
        """librdkafka's settings for a user of this broker; in a mesh file, so that each service has its own."""
        name = user or self.admin
        return {
            "bootstrap.servers": f"{HOST}:{port}",
            "security.protocol": "sasl_ssl",
            "sasl.mechanism": MECHANISM,
            "sasl.username": name,
            "sasl.password": f"${{file:{password_file(folder, name)}}}",
            "ssl.ca.location": str(self.ca or folder / "ca.pem"),
        }

    def create_users(self, folder: Path, port: int) -> None:
        from confluent_kafka.admin import (  # type: ignore[attr-defined]
            ScramCredentialInfo,
            ScramMechanism,
            UserScramCredentialAlteration,
            UserScramCredentialUpsertion,
        )

        from services.runtime.kafka import admin

        info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        wanted: list[UserScramCredentialAlteration] = [
            UserScramCredentialUpsertion(user, info, password_file(folder, user).read_bytes()) for user in self.users
        ]
        client = admin(Mesh("broker", self.client_settings(folder, port), 1, {}, {}))
        for future in client.alter_user_scram_credentials(wanted, request_timeout=30).values() if wanted else ():
            future.result()


def guard_of(mesh: Mesh) -> Guard:
    """A user for each service of a mesh; its administrator may do everything."""
    from services.runtime.acls import rights_of

    admin, *others = [f"{mesh.name}-{service}" for service in rights_of(mesh)]
    return Guard(admin, tuple(others))


def kafka_lines(folder: Path, port: int, mesh: str) -> str:
    """`kafka:` of a mesh file whose services come in each by its own name."""
    settings = Guard("").client_settings(folder, port, f"{mesh}-${{service}}")
    address = settings.pop("bootstrap.servers")
    return "\n".join(["kafka:", f'  bootstrap: "{address}"', *(f"  {key}: {value}" for key, value in settings.items())])


def password_file(folder: Path, user: str) -> Path:
    return folder / "secrets" / user


def _write(file: Path, text: str) -> None:
    file.touch(mode=0o600)
    file.write_text(text)


def _make_certificate(folder: Path, java: str) -> None:
    """One certificate for this machine that signs itself, with the keytool beside java."""
    keytool = Path(java).with_name("keytool") if "/" in java else Path("keytool")
    password = password_file(folder, "broker.p12-password")
    _write(password, secrets.token_urlsafe(24))
    store = ["-keystore", str(folder / "secrets" / "broker.p12"), "-storepass:file", str(password), "-alias", "broker"]
    names = f"san=ip:{HOST},dns:localhost"
    made = [
        "-genkeypair",
        "-keyalg",
        "EC",
        "-storetype",
        "PKCS12",
        "-validity",
        "3650",
        "-dname",
        BROKER,
        "-ext",
        names,
    ]
    for arguments in (made, ["-exportcert", "-rfc", "-file", str(folder / "ca.pem")]):
        done = subprocess.run(
            [str(keytool), *arguments, *store], capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode != 0:
            raise MachineError(f"{keytool} could not make the broker's certificate: {done.stdout.strip()[:200]}")
