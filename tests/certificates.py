"""What a secured Kafka needs in tests: certificates good and bad, signed tokens, and an endpoint that gives them out.

Invariant: made anew for each run, so that nothing here is ever a secret of anybody.
"""

import base64
import ipaddress
import json
import secrets
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.x509.oid import NameOID

Key = ec.EllipticCurvePrivateKey


@dataclass(frozen=True)
class Certificates:
    """PEM files. A `…_store` is a key and its certificate in one file, as Kafka's brokers take them."""

    folder: Path

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def client(self) -> Path:
        return self.folder / "client.pem"

    @property
    def client_key(self) -> Path:
        return self.folder / "client.key"

    def store(self, name: str) -> Path:
        return self.folder / f"{name}-store.pem"


def make_certificates(folder: Path) -> Certificates:
    """An authority; a broker's certificate for this machine, one that has expired, one of another host; a client's."""
    made = Certificates(folder)
    authority = ec.generate_private_key(ec.SECP256R1())
    made.ca.write_bytes(_pem(_signed("test-ca", authority, "test-ca", authority)))
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")])
    elsewhere = x509.SubjectAlternativeName([x509.DNSName("elsewhere.example")])
    for name, common, names, days in (
        ("broker", "joinmesh-broker", here, 30),
        ("expired", "joinmesh-broker", here, -1),
        ("elsewhere", "joinmesh-broker", elsewhere, 30),
        ("client", "shop-mutual", here, 30),
    ):
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _pem(_signed(common, key, "test-ca", authority, names, days))
        (folder / f"{name}.pem").write_bytes(certificate)
        (folder / f"{name}.key").write_bytes(_private(key))
        made.store(name).write_bytes(_private(key) + certificate)
    return made


def _signed(
    name: str, key: Key, by: str, signer: Key, names: x509.SubjectAlternativeName | None = None, days: int = 30
) -> x509.Certificate:
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, by)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=10))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=names is None, path_length=None), critical=True)
    )
    if names is not None:
        builder = builder.add_extension(names, critical=False)
    return builder.sign(signer, hashes.SHA256())


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private(key: Key) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


class Endpoint:
    """Gives a signed token to whoever knows the secret, as an OIDC provider does; `jwks` is how a broker checks it."""

    def __init__(self) -> None:
        self.secret = f"endpoint-{secrets.token_urlsafe(12)}"
        self._key = rsa.generate_private_key(65537, 2048)
        self._tokens: dict[str, str] = {}
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                pair = base64.b64decode(self.headers.get("Authorization", "").removeprefix("Basic ")).decode()
                client, _, secret = pair.partition(":")
                good = secret == endpoint.secret
                answer = {"access_token": endpoint.token(client), "expires_in": 600} if good else {"error": "no"}
                body = json.dumps(answer).encode()
                self.send_response(200 if good else 401)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/token"

    def token(self, subject: str) -> str:
        if subject not in self._tokens:
            now = int(time.time())
            claims = {"sub": subject, "iss": "test", "aud": "kafka", "iat": now, "exp": now + 600}
            head = f"{_b64({'alg': 'RS256', 'kid': 'k1'})}.{_b64(claims)}"
            signature = self._key.sign(head.encode(), padding.PKCS1v15(), hashes.SHA256())
            self._tokens[subject] = f"{head}.{_b64(signature)}"
        return self._tokens[subject]

    @property
    def jwks(self) -> str:
        numbers = self._key.public_key().public_numbers()
        key = {"kty": "RSA", "kid": "k1", "alg": "RS256", "use": "sig"}
        key |= {"n": _b64(numbers.n.to_bytes(256, "big")), "e": _b64(numbers.e.to_bytes(3, "big"))}
        return json.dumps({"keys": [key]})

    def close(self) -> None:
        self._server.shutdown()


def _b64(value: bytes | dict[str, object]) -> str:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
