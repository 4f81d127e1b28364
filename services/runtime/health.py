"""Whether a service is alive and ready, judged by progress: for itself, and over HTTP for whoever runs it.

Alive: it has taken a step lately, or there was nothing to read. A service with records to read and no step for
`limit_s` is stuck; it ends with one clear line, so that it is started again from what is stored. Ready: its partitions
are assigned and their state is restored.

Invariant: being slow is not being stuck: any step counts. `GET /live` and `GET /ready` answer 200 or 503 with a
sentence, and nothing else is served.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from schemas.errors import MachineError

LIMIT_S = float(os.environ.get("JOINMESH_STUCK_S", "30"))

QUIET_S = 5.0


class Health:
    def __init__(self, limit_s: float = LIMIT_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s, self.clock = limit_s, clock
        self.ready = False
        self._steps = -1
        self._moved = self._stepped = clock()
        self._lag = 0
        self._beats = 0

    def observe(self, steps: int, lag: int) -> None:
        """Called now and then with the count of steps so far and how much there is to read."""
        if steps != self._steps:
            self._stepped = self.clock()
        if steps != self._steps or lag == 0:
            self._steps, self._moved = steps, self.clock()
        self._lag = lag

    @property
    def quiet(self) -> bool:
        """No step for a while; then ask the broker how much there is to read: a client that was put out does not know
        it."""
        return self.clock() - self._stepped > QUIET_S

    def beat(self) -> None:
        """Called each time round the service's loop."""
        self._beats += 1

    def watch(self) -> None:
        """From now on, end the process if its loop does not come round any more: a call that never returns is not seen
        from within the loop.

        Seconds are counted, not read from a clock, so that a process that was stopped and goes on is not taken for a
        stuck one.
        """

        def wait() -> None:
            silent, last = 0, self._beats
            while silent < self.limit_s:
                time.sleep(1)
                silent, last = (silent + 1 if self._beats == last else 0), self._beats
            faulthandler.dump_traceback(sys.stderr)
            print(
                f"joinmesh: the service's loop has not moved for {silent} s (it is where the lines above say); starting"
                " again",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)

        threading.Thread(target=wait, daemon=True).start()

    @property
    def stuck_s(self) -> float:
        return self.clock() - self._moved

    @property
    def alive(self) -> bool:
        return self.stuck_s < self.limit_s

    @property
    def is_ready(self) -> bool:
        return self.ready

    def check(self) -> None:
        if not self.alive:
            raise MachineError(
                f"{self._lag:,} records to read and no step for {self.stuck_s:.0f} s; ending, to be started again from"
                " what is stored"
            )

    def serve(self, address: str) -> int:
        """Answer on `[host:]port`; gives the port."""
        host, _, port = address.rpartition(":")
        health = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                said = {
                    "/live": (health.alive, f"no step for {health.stuck_s:.0f} s, {health._lag} to read"),
                    "/ready": (health.is_ready, "partitions assigned" if health.is_ready else "not assigned yet"),
                }.get(self.path)
                good, text = said if said is not None else (False, "ask for /live or /ready")
                self.send_response(404 if said is None else 200 if good else 503)
                self.end_headers()
                self.wfile.write(text.encode() + b"\n")

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer((host or "127.0.0.1", int(port)), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return int(server.server_address[1])
