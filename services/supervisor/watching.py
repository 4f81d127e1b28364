"""The endpoint of `joinmesh up`: alive, ready and the metrics of the whole mesh, from the reports its services write.

One address for all services, so that a laptop's Prometheus has one target and no service needs a port of its own. The
figures are those that each service's own endpoint would give.

Invariant: only reports of this mesh's services count, and one that is not what a service would write changes nothing.
Ready: every service said so since this run began, and lately.
"""

import logging
import time
from collections.abc import Iterable

from services.runtime import endpoint
from services.supervisor.reports import Report, instances

log = logging.getLogger("joinmesh.up")
STALE_S = 15.0


class MeshWatch:
    """`services`: the names of all services of the mesh."""

    alive = True  # whoever answers runs

    def __init__(self, address: str, services: Iterable[str]) -> None:
        self.services = list(services)
        self.began_ms = time.time() * 1000
        self._taken: dict[str, Report] = {}
        self.endpoint = endpoint.serve(address, self)

    @property
    def is_ready(self) -> bool:
        since_ms = max(self.began_ms, (time.time() - STALE_S) * 1000)
        for name in self.services:
            mine = [r for r in instances(self._taken, name).values() if float(r["at_ms"]) >= since_ms]
            if not mine or not all(r.get("ready") for r in mine):
                return False
        return True

    def take(self, reports: dict[str, Report]) -> None:
        for name in self.services:
            for instance, report in instances(reports, name).items():
                if self._taken.get(instance) is not report:
                    self._take(instance, report)

    def _take(self, instance: str, report: Report) -> None:
        try:
            float(report["at_ms"])
            self.endpoint.figures.take({**report, "instance": instance})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            log.debug("a report of %s was passed over: %r", instance, error)
            return
        self._taken[instance] = report
