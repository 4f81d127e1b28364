"""TLS as Python sees it: the context of a mesh's clients, and what is wrong with a broker's certificate.

Invariant: the context checks the broker's certificate, and its name unless the mesh file says otherwise.
"""

import socket
import ssl
from collections.abc import Mapping

from schemas.errors import MachineError
from schemas.mesh import Mesh
from services.runtime.security.secrets import resolved

TIMEOUT_S = 3.0


def tls_context(mesh: Mesh, kafka: Mapping[str, str]) -> ssl.SSLContext:
    key = "ssl.ca.location"
    try:
        context = ssl.create_default_context(cafile=kafka.get(key))
        key = "ssl.certificate.location"
        if key in kafka:
            # An empty password instead of none: OpenSSL would ask for it on the terminal.
            context.load_cert_chain(kafka[key], kafka["ssl.key.location"], kafka.get("ssl.key.password", ""))
    except (OSError, ssl.SSLError) as error:
        why = error.strerror or type(error).__name__
        raise MachineError(f"{mesh.file}: `kafka.{key}` ({kafka.get(key)}) cannot be used: {why}") from None
    context.check_hostname = kafka.get("ssl.endpoint.identification.algorithm", "https") != "none"
    return context


def whats_wrong(mesh: Mesh, address: str) -> str | None:
    """Shakes hands with a broker and says in words why that fails; None if it does not."""
    host, _, port = address.rpartition(":")
    try:
        context = tls_context(mesh, resolved(mesh))
        with (
            socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as secured,
        ):
            secured.settimeout(0.5)
            secured.recv(1)  # a broker that refuses our certificate says so only now
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    except ssl.SSLError as error:
        return error.reason.replace("_", " ").lower() if error.reason else str(error)
    except (OSError, ValueError):
        return None
    return None
