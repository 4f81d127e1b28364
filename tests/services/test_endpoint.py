"""What a process answers over HTTP, to whom, and that nobody can make it hang or talk."""

import contextlib
import datetime
import ipaddress
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from prometheus_client.parser import text_string_to_metric_families

from schemas.errors import MachineError, SettingError
from services.runtime import endpoint
from services.runtime.access import CERT, KEY, TOKEN, Access
from services.runtime.endpoint import Endpoint
from services.runtime.health import Health

REPORT = {"mesh": "shop", "service": "sink", "instance": "q.sink-1", "query": "q", "started_ms": 5000, "lag": 7}


@pytest.fixture
def health() -> Health:
    return Health()


@pytest.fixture
def served(health: Health) -> Endpoint:
    return new_endpoint(health)


def new_endpoint(health: Health, **environment: str) -> Endpoint:
    made = Endpoint("0", Access(environment))
    made.healths.append(health)
    made.figures.take(REPORT)
    return made


def ask(
    port: int, path: str, method: str = "GET", tls: ssl.SSLContext | None = None, **headers: str
) -> tuple[int, str, str]:
    """(status, head, body), from the bytes themselves."""
    with contextlib.ExitStack() as stack:
        connection: socket.socket = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
        if tls is not None:
            connection = stack.enter_context(tls.wrap_socket(connection, server_hostname="localhost"))
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *(f"{k}: {v}" for k, v in headers.items()), "", ""]
        connection.sendall("\r\n".join(lines).encode())
        head, _, body = read_all(connection).decode().partition("\r\n\r\n")
    return int(head.split()[1]), head, body


def read_all(connection: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while more := connection.recv(65536):
            found += more
    return found


def test_probes_follow_health(served: Endpoint, health: Health) -> None:
    assert ask(served.port, "/live")[::2] == (200, "alive\n")
    assert ask(served.port, "/ready")[::2] == (503, "1 of 1 services not ready\n")
    health.ready = True
    assert ask(served.port, "/ready")[::2] == (200, "ready\n")
    now = [0.0]
    stuck = Health(limit_s=30, clock=lambda: now[0])
    served.healths.append(stuck)
    stuck.observe(1, lag=5)
    now[0] = 31
    assert ask(served.port, "/live")[::2] == (503, "1 of 2 services not alive\n")


def test_metrics_are_what_prometheus_reads(served: Endpoint) -> None:
    status, head, body = ask(served.port, "/metrics?name=x")
    assert status == 200
    assert "Content-Type: text/plain; version=0.0.4; charset=utf-8" in head
    found = {family.name: family for family in text_string_to_metric_families(body)}
    (lag,) = found["joinmesh_lag_records"].samples
    assert (lag.value, lag.labels) == (7, {"mesh": "shop", "role": "sink", "query": "q", "node": "", "worker": "1"})
    assert found["joinmesh_lag_records"].documentation.startswith("Kafka records left to read")
    assert found["joinmesh_start_time_seconds"].samples[0].value == 5
    assert found["process_resident_memory_bytes"].samples[0].value > 1e6
    assert found["joinmesh_build_info"].samples[0].labels["version"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/live/", 404),
        ("GET", "/metrics/../live", 404),
        ("GET", "/%6cive", 404),
        ("POST", "/admin", 404),
        ("POST", "/metrics", 405),
        ("PUT", "/live", 405),
        ("HEAD", "/ready", 405),
        ("OPTIONS", "/metrics", 405),
        ("get", "/live", 405),
        ("GET", "/a b", 400),
        ("GET", "", 404),
    ],
)
def test_nothing_else_is_served(served: Endpoint, method: str, path: str, status: int) -> None:
    found, head, body = ask(served.port, path, method)
    assert found == status
    assert ("Allow: GET" in head) == (status == 405)
    assert "server:" not in head.lower()  # nor what it is built with
    assert "date:" not in head.lower()
    assert len(body) < 40
    assert path in ("", "/", "/a b") or path not in body
    assert not any(word in body.lower() for word in ("python", "joinmesh", "traceback"))


@pytest.mark.parametrize(
    "sent", [b"\x00\xff\r\n\r\n", b"GET /live\r\n\r\n", b"GET /live HTTP/2.0\r\n\r\n", b"\r\n\r\n"]
)
def test_what_is_no_request_is_refused(served: Endpoint, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=5) as connection:
        connection.sendall(sent)
        assert read_all(connection).startswith(b"HTTP/1.1 400 Bad Request\r\n")


def test_loopback_unless_a_host_is_given(health: Health) -> None:
    assert new_endpoint(health).host == "127.0.0.1"
    assert new_endpoint(health).url.startswith("http://127.0.0.1:")
    assert Endpoint("0.0.0.0:0", Access({})).host == "0.0.0.0"
    assert Endpoint(":0", Access({})).host == "127.0.0.1"


def test_services_of_one_process_share_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_served", {})
    monkeypatch.setattr(endpoint, "LISTENERS", heard := [])
    first, second = Health(), Health()
    shared = endpoint.serve("0", first)
    assert endpoint.serve("0", second) is shared
    first.ready = True
    assert ask(shared.port, "/ready")[2] == "1 of 2 services not ready\n"
    (listen,) = heard
    listen(REPORT)
    listen({**REPORT, "service": "ingest", "instance": "ingest-0"})
    assert ask(shared.port, "/metrics")[2].count("joinmesh_lag_records{") == 2


# -- clients that are slow or hostile


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "PATIENCE_S", 0.5)


def test_idle_connections_do_not_keep_a_probe_out(served: Endpoint) -> None:
    threads, sockets = threading.active_count(), open_sockets()
    with contextlib.ExitStack() as stack:
        crowd = [
            stack.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=5))
            for _ in range(3 * endpoint.CONNECTIONS_MOST)
        ]
        for connection in crowd:
            connection.sendall(b"GET /live HT")
        began = time.monotonic()
        assert ask(served.port, "/live")[0] == 200
        assert time.monotonic() - began < 1
        assert threading.active_count() == threads  # one thread serves all
        assert len(served._open) <= endpoint.CONNECTIONS_MOST
        assert read_all(crowd[0]) == b""  # the oldest made room
        assert open_sockets() - sockets <= len(crowd) + endpoint.CONNECTIONS_MOST  # both ends are in this process


def open_sockets() -> int:
    found = 0
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{file}").startswith("socket:")
    return found


@pytest.mark.usefixtures("impatient")
def test_a_client_that_drips_is_let_go(served: Endpoint) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=5) as connection:
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - began < 5:
                connection.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() - began < 3


@pytest.mark.usefixtures("impatient")
def test_a_client_that_does_not_read_is_let_go(served: Endpoint) -> None:
    for worker in range(20_000):  # more than a socket's buffers hold
        served.figures._now[str(worker)] = {("joinmesh_lag_records", ("m", "sink", "q" * 200, "", str(worker))): 1.0}
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", served.port))
        connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        deadline = time.monotonic() + 10
        while not served._open and time.monotonic() < deadline:
            time.sleep(0.01)
        while served._open and time.monotonic() < deadline:
            time.sleep(0.01)
        assert time.monotonic() < deadline


def test_a_head_that_does_not_end_is_refused(served: Endpoint) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=5) as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\n" + b"X: y\r\n" * 3000 + b"\r\n")
        assert read_all(connection)[:12] in (b"HTTP/1.1 431", b"")  # a reset may overtake the answer
    assert ask(served.port, "/live")[0] == 200


# -- token


def test_metrics_want_the_token_and_probes_do_not(health: Health, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("s3cret-canary\n")
    served = new_endpoint(health, **{TOKEN: str(file)})
    port = served.port
    assert ask(port, "/live")[0] == 200
    refused = [
        ask(port, "/metrics"),
        ask(port, "/metrics", Authorization="Bearer "),
        ask(port, "/metrics", Authorization="Bearer s3cret"),
        ask(port, "/metrics", Authorization="Basic s3cret-canary"),
        ask(port, "/metrics", Authorization="Bearer s3cret-canary\u00e9"),
        ask(port, "/metrics?token=s3cret-canary"),
    ]
    for status, head, body in refused:
        assert (status, body) == (401, "unauthorized\n")
        assert "WWW-Authenticate: Bearer" in head
    assert "joinmesh_lag_records" in ask(port, "/metrics", Authorization="Bearer s3cret-canary")[2]
    file.write_text("other")
    assert ask(port, "/metrics", Authorization="Bearer s3cret-canary")[0] == 401
    assert ask(port, "/metrics", authorization="bearer other")[0] == 200
    for gone in (lambda: file.write_text(" \n"), file.unlink):
        gone()
        assert ask(port, "/metrics", Authorization="Bearer other")[0] == 401
        assert ask(port, "/metrics", Authorization="Bearer ")[0] == 401


def test_a_token_in_clear_text_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "token").write_text("s3cret-canary")
    access = Access({TOKEN: str(tmp_path / "token")})
    Endpoint("127.0.0.1:0", access)
    assert not caplog.records
    Endpoint("0.0.0.0:0", access)
    assert "travels in clear text" in caplog.text
    assert "canary" not in caplog.text


# -- TLS


def new_certificate(folder: Path, serial: int) -> None:
    """A certificate for localhost and its key, `tls.crt` and `tls.key`."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(now - datetime.timedelta(minutes=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "tls.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "tls.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


@pytest.fixture
def tls_files(tmp_path: Path) -> Iterator[dict[str, str]]:
    new_certificate(tmp_path, 1)
    return {CERT: str(tmp_path / "tls.crt"), KEY: str(tmp_path / "tls.key")}


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
def test_everything_goes_over_tls(health: Health, tls_files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    served = new_endpoint(health, **tls_files)
    assert served.url.startswith("https://")
    trusts = ssl.create_default_context(cafile=tls_files[CERT])
    assert ask(served.port, "/live", tls=trusts)[::2] == (200, "alive\n")
    assert "joinmesh_lag_records" in ask(served.port, "/metrics", tls=trusts)[2]
    with socket.create_connection(("127.0.0.1", served.port), timeout=5) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert b"HTTP" not in read_all(connection)
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(OSError):
        ask(served.port, "/live", tls=old)
    monkeypatch.setattr(endpoint, "CONNECTIONS_MOST", 4)
    with contextlib.ExitStack() as stack:  # handshakes that never begin
        for _ in range(12):
            stack.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=5))
        assert ask(served.port, "/live", tls=trusts)[0] == 200
        assert len(served._open) <= 4


def test_a_replaced_certificate_is_taken(
    health: Health, tls_files: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(endpoint, "RENEW_S", -1.0)
    served = new_endpoint(health, **tls_files)

    def serial() -> int:
        with contextlib.suppress(OSError):
            pem = ssl.get_server_certificate(("127.0.0.1", served.port), timeout=5)
            return x509.load_pem_x509_certificate(pem.encode()).serial_number
        return -1

    assert serial() == 1
    old_key = (tmp_path / "tls.key").read_bytes()
    new_certificate(tmp_path, 2)
    new_key = (tmp_path / "tls.key").read_bytes()
    (tmp_path / "tls.key").write_bytes(old_key)  # half replaced: the old pair goes on
    os.utime(tmp_path / "tls.crt", (1, 1))
    assert serial() == 1
    (tmp_path / "tls.key").write_bytes(new_key)
    os.utime(tmp_path / "tls.key", (2, 2))
    assert serial() == 2


# -- settings that cannot be used


@pytest.mark.parametrize("address", ["", "abc", "1.2.3.4", "localhost:", "70000", "-1", "9464x", "host:٣"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(SettingError, match=r"--health .*: \[HOST:\]PORT is wanted, such as 9464"):
        Endpoint(address, Access({}))


def test_an_address_that_cannot_be_had(health: Health) -> None:
    with pytest.raises(MachineError, match="the port is taken by another process"):
        Endpoint(str(new_endpoint(health).port), Access({}))
    with pytest.raises(SettingError, match="use an address of this machine"):
        Endpoint("192.0.2.1:9464", Access({}))
    with pytest.raises(SettingError, match="no such host"):
        Endpoint("no-such-host.invalid:9464", Access({}))


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({TOKEN: "{dir}/none"}, f"{TOKEN}: {{dir}}/none cannot be read (No such file or directory)"),
        ({TOKEN: "{dir}"}, f"{TOKEN}: {{dir}} cannot be read (Is a directory)"),
        ({TOKEN: "{dir}/empty"}, f"{TOKEN}: {{dir}}/empty is empty"),
        ({CERT: "{dir}/tls.crt"}, f"{CERT} is set and {KEY} is not"),
        ({KEY: "{dir}/tls.key"}, f"{KEY} is set and {CERT} is not"),
        ({CERT: "{dir}/none", KEY: "{dir}/tls.key"}, f"{CERT}: {{dir}}/none cannot be read"),
        ({CERT: "{dir}/empty", KEY: "{dir}/tls.key"}, "are not a certificate and its unencrypted key in PEM form"),
        ({CERT: "{dir}/tls.crt", KEY: "{dir}/other.key"}, "are not a certificate and its unencrypted key in PEM form"),
    ],
    ids=str,
)
def test_files_that_cannot_be_used(tmp_path: Path, environment: dict[str, str], says: str) -> None:
    new_certificate(tmp_path, 1)
    (tmp_path / "tls.key").rename(tmp_path / "other.key")
    new_certificate(tmp_path, 2)
    (tmp_path / "empty").touch()
    with pytest.raises(SettingError) as refused:
        Access({name: value.format(dir=tmp_path) for name, value in environment.items()})
    assert says.format(dir=tmp_path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_service_says_so_and_ends_with_78(shop_text: str, tmp_path: Path) -> None:
    (tmp_path / "mesh.yaml").write_text(shop_text)
    done = subprocess.run(
        [sys.executable, "-m", "services.controller", "-f", str(tmp_path / "mesh.yaml"), "--health", "0"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, TOKEN: "/nowhere/token"},
    )
    assert done.returncode == 78
    assert done.stderr == (
        f"joinmesh controller: {TOKEN}: /nowhere/token cannot be read (No such file or directory); correct the path or"
        " its rights\n"
    )


@pytest.fixture
def shop_text() -> str:
    return """
mesh: shop
kafka: {bootstrap: "127.0.0.1:1"}
streams:
  a: {event_time: ts, fields: {k: int64, ts: timestamp}}
  b: {event_time: ts, fields: {k: int64, ts: timestamp}}
queries:
  q: "SELECT a.k FROM a [RANGE 1 MINUTE] AS a, b [RANGE 1 MINUTE] AS b WHERE a.k = b.k"
"""
