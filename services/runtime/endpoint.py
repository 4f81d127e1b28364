"""The HTTP of a process: `GET /live`, `GET /ready`, `GET /metrics`, and nothing else.

Alive and ready are what all services of the process are. Probes are open; the metrics may want a token, and all of it
may go over TLS (`access.py`).

Invariant: a client, slow or hostile, costs at most one of `CONNECTIONS_MOST` connections, `PATIENCE_S` seconds and
`HEAD_BYTES_MOST` bytes, all in one thread that does no work of the service. When all are taken, the oldest makes room,
so a probe is always answered. Answers say nothing of what runs here beyond what was asked for.
"""

import asyncio
import errno
import ipaddress
import logging
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol

from schemas.errors import MachineError, SettingError
from services.runtime.access import Access
from services.runtime.report import LISTENERS

log = logging.getLogger("joinmesh.http")
CONNECTIONS_MOST, PATIENCE_S, HEAD_BYTES_MOST, RENEW_S = 32, 5.0, 8192, 30.0


class Vital(Protocol):
    """What probes ask a service for."""

    @property
    def alive(self) -> bool: ...
    @property
    def is_ready(self) -> bool: ...


_served: dict[str, "Endpoint"] = {}


def serve(address: str, health: Vital) -> "Endpoint":
    """Answer for a service on `[host:]port`. Services of one process that name the same address share it."""
    endpoint = _served.get(address)
    if endpoint is None:
        endpoint = _served[address] = Endpoint(address)
        LISTENERS.append(endpoint.figures.take)
    endpoint.healths.append(health)
    return endpoint


class Endpoint:
    def __init__(self, address: str, access: Access | None = None) -> None:
        from services.runtime.figures import Figures  # prometheus_client takes a while to import

        self.healths: list[Vital] = []
        self.figures = Figures()
        self.access = access or Access()
        self._listening = listen(*parse_address(address))
        self.host: str
        self.port: int
        self.host, self.port = self._listening.getsockname()[:2]
        if self.access.wants_token and self.access.tls is None and not ipaddress.ip_address(self.host).is_loopback:
            log.warning(
                "the token for %s:%s travels in clear text; set JOINMESH_HTTP_CERT_FILE too", self.host, self.port
            )
        self._open: dict[asyncio.Task[None], None] = {}  # oldest first
        self._thread = threading.Thread(target=lambda: asyncio.run(self._accept()), name="http", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.access.tls else ''}://{host}:{self.port}"

    # -- connections

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        renewed = loop.time()
        while True:
            try:
                client, _ = await loop.sock_accept(self._listening)
            except OSError as error:  # no file left, or a client that went away again
                log.debug("accepting: %s", error)
                await asyncio.sleep(0.1)
                continue
            if loop.time() - renewed > RENEW_S:
                self.access.renew()
                renewed = loop.time()
            while len(self._open) >= CONNECTIONS_MOST:
                oldest = next(iter(self._open))
                del self._open[oldest]
                oldest.cancel()
            task = loop.create_task(self._converse(client))
            self._open[task] = None
            task.add_done_callback(self._closed)
            await asyncio.sleep(0)  # a flood of connections must not keep them from being answered

    def _closed(self, task: "asyncio.Task[None]") -> None:
        self._open.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("a request could not be answered: %r", error)

    async def _converse(self, client: socket.socket) -> None:
        """One request, one answer."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(HEAD_BYTES_MOST)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport: asyncio.Transport | None = None
        try:
            async with asyncio.timeout(PATIENCE_S):
                transport, _ = await loop.connect_accepted_socket(lambda: protocol, client, ssl=self.access.tls)
                writer = asyncio.StreamWriter(transport, protocol, reader, loop)
                try:
                    answer = self._answer(await reader.readuntil(b"\r\n\r\n"))
                except asyncio.LimitOverrunError:
                    answer = _reply(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
                writer.write(answer)
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            pass
        finally:
            if transport is not None:
                transport.abort()
            client.close()

    # -- answers

    def _answer(self, head: bytes) -> bytes:
        line, *fields = head.decode("latin-1").split("\r\n")
        match line.split(" "):
            case [method, target, version] if version.startswith("HTTP/1."):
                path = target.partition("?")[0]
            case _:
                return _reply(HTTPStatus.BAD_REQUEST)
        known: dict[str, Callable[[dict[str, str]], bytes]] = {
            "/live": lambda _: _probe("alive", [health.alive for health in self.healths]),
            "/ready": lambda _: _probe("ready", [health.is_ready for health in self.healths]),
            "/metrics": self._metrics,
        }
        if path not in known:
            return _reply(HTTPStatus.NOT_FOUND)
        if method != "GET":
            return _reply(HTTPStatus.METHOD_NOT_ALLOWED, extra="Allow: GET\r\n")
        named = (field.partition(":") for field in fields)
        return known[path]({name.strip().lower(): value.strip() for name, _, value in named})

    def _metrics(self, headers: dict[str, str]) -> bytes:
        from services.runtime.figures import CONTENT_TYPE

        if not self.access.admits(headers.get("authorization")):
            return _reply(HTTPStatus.UNAUTHORIZED, extra="WWW-Authenticate: Bearer\r\n")
        return _reply(HTTPStatus.OK, self.figures.text(), CONTENT_TYPE)


def _probe(word: str, said: list[bool]) -> bytes:
    good = all(said)
    text = word if good else f"{said.count(False)} of {len(said)} services not {word}"
    return _reply(HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE, f"{text}\n".encode())


def _reply(
    status: HTTPStatus, body: bytes | None = None, kind: str = "text/plain; charset=utf-8", extra: str = ""
) -> bytes:
    text = body if body is not None else f"{status.phrase.lower()}\n".encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\nContent-Length: {len(text)}\r\n{extra}"
        "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n"
    )
    return head.encode("ascii") + text


def parse_address(address: str) -> tuple[str, int]:
    """
    >>> parse_address("9464"), parse_address("0.0.0.0:9464"), parse_address("[::1]:0")
    (('127.0.0.1', 9464), ('0.0.0.0', 9464), ('::1', 0))
    """
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise SettingError(f"--health {address}: [HOST:]PORT is wanted, such as 9464 or 0.0.0.0:9464")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


def listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.create_server((place[0], port), family=family, backlog=CONNECTIONS_MOST)
    except socket.gaierror as error:
        raise SettingError(f"--health {host}:{port}: no such host ({error.strerror})") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise MachineError(
                f"--health {host}:{port}: the port is taken by another process; choose another"
            ) from None
        raise SettingError(
            f"--health {host}:{port}: cannot listen there ({error.strerror}); use an address of this machine and a port"
            " that this user may have"
        ) from None
    listening.setblocking(False)
    return listening
