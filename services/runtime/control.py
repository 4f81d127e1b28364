"""Reading the control topic from its beginning: which plan each query runs under.

Invariant: who waits for plans goes on only when every wanted query has one.
"""

import contextlib
import logging
import time
from collections.abc import Iterable, Mapping

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from schemas import topics
from schemas.control import PlanPublished, decode_control, encode_control
from schemas.errors import BlockError, StateError
from schemas.mesh import Mesh
from services.runtime.kafka import CONTROL_READER, client_config
from services.runtime.producer import Sender
from services.runtime.security.refusals import raise_refused
from topology.plan.plan import Plan, build_plan, parse_tree
from topology.query.cql import parse_query

log = logging.getLogger("joinmesh.control")
EARLIER_MOST = 8  # epochs before the newest one that rows may still belong to


def derive_plan(mesh: Mesh, message: PlanPublished) -> Plan:
    """The plan a message stands for; refuses to run under another one than its sender meant."""
    query = parse_query(message.query, message.text, mesh.streams)
    plan = build_plan(query, parse_tree(message.tree, query))
    if plan_digest(mesh, plan) != message.digest:
        raise StateError(
            f"query {message.query}: the plan derived here differs from the one that was published; the mesh file's"
            " streams or this version of joinmesh changed since: use a new mesh name, or go back to what was there"
        )
    return plan


def plan_digest(mesh: Mesh, plan: Plan) -> str:
    import hashlib

    text = repr(plan) + repr(
        [
            (n, s.topic, s.event_time, s.format, dict(s.fields), s.lateness_ms, *([s.table] if s.table else []))
            for n, s in sorted(mesh.streams.items())
        ]
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def publish(mesh: Mesh, sender: Sender, message: PlanPublished) -> None:
    """To every partition, so that whoever reads one of them hears of it."""
    for partition in range(mesh.partitions):
        sender.send(topics.control(mesh.name), partition, encode_control(message), message.query.encode())


def read_plans(mesh: Mesh) -> dict[str, PlanPublished]:
    """The newest plan of each query that the control topic holds now."""
    return {query: plans[-1] for query, plans in read_history(mesh).items()}


def read_history(mesh: Mesh) -> dict[str, list[PlanPublished]]:
    """All plans of each query that the control topic holds now, by epoch; of two of one epoch the first counts."""
    consumer = Consumer(
        client_config(
            mesh,
            group_id=f"{mesh.name}.{CONTROL_READER}",
            enable_auto_commit=False,
            enable_partition_eof=True,
            # the end is only told by an empty fetch, and a service that starts again waits for it
            fetch_wait_max_ms=10,
        )
    )
    consumer.assign([TopicPartition(topics.control(mesh.name), 0, 0)])
    plans: dict[str, dict[int, PlanPublished]] = {}
    deadline = time.monotonic() + 30
    try:
        while time.monotonic() < deadline:
            message = consumer.poll(1.0)
            if message is None:
                continue
            if (error := message.error()) is not None:
                if error.code() == KafkaError._PARTITION_EOF:
                    break
                raise_refused(mesh, error, message.topic())
                continue
            if (plan := _plan_of(message)) is not None:
                plans.setdefault(plan.query, {}).setdefault(plan.epoch, plan)
        return {query: [plan for _, plan in sorted(epochs.items())] for query, epochs in plans.items()}
    finally:
        consumer.close()


def _plan_of(message: Message) -> PlanPublished | None:
    try:
        return decode_control(message.value())
    except BlockError as e:
        log.error("record at offset %s of %s passed over: %s", message.offset(), message.topic(), e)
        return None


def earlier_plans(mesh: Mesh, newest: Mapping[str, int]) -> dict[str, list[tuple[PlanPublished, Plan]]]:
    """Plans of these queries before their newest epochs, as far as they can be derived, the oldest first: rows that are
    read again may belong to one of them."""
    found: dict[str, list[tuple[PlanPublished, Plan]]] = {}
    history = read_history(mesh) if any(epoch > 1 for epoch in newest.values()) else {}
    for query, last in newest.items():
        found[query] = []
        for plan in [plan for plan in history.get(query, ()) if plan.epoch < last][-EARLIER_MOST:]:
            with contextlib.suppress(StateError):
                found[query].append((plan, derive_plan(mesh, plan)))
    return found


class ControlWatch:
    """Hears what is written to the control topic while a service runs; from its beginning, so that nothing is missed
    between reading it first and watching it."""

    def __init__(self, mesh: Mesh) -> None:
        self._consumer = Consumer(
            client_config(
                mesh, group_id=f"{mesh.name}.{CONTROL_READER}", enable_auto_commit=False, fetch_wait_max_ms=500
            )
        )
        self._consumer.assign([TopicPartition(topics.control(mesh.name), 0, 0)])

    def news(self) -> list[PlanPublished]:
        """The plans that came since; does not wait."""
        messages = self._consumer.consume(100, 0)
        return [plan for m in messages if m.error() is None and (plan := _plan_of(m)) is not None]

    def close(self) -> None:
        self._consumer.close()


def wait_for_plans(mesh: Mesh, queries: Iterable[str]) -> dict[str, tuple[PlanPublished, Plan]]:
    """The newest plans of these queries, waiting for the controller to publish them."""
    found = wait_for_histories(mesh, queries)
    return {query: (plans[-1], derive_plan(mesh, plans[-1])) for query, plans in found.items()}


def wait_for_history(mesh: Mesh, query: str) -> list[PlanPublished]:
    """All plans of a query, oldest first, waiting for the controller to publish one."""
    return wait_for_histories(mesh, [query])[query]


def wait_for_histories(mesh: Mesh, queries: Iterable[str]) -> dict[str, list[PlanPublished]]:
    """The same for several queries."""
    wanted, told = list(queries), 0.0
    while True:
        plans = read_history(mesh)
        if all(query in plans for query in wanted):
            return {query: plans[query] for query in wanted}
        if time.monotonic() - told > 10:
            told = time.monotonic()
            log.info(
                "waiting for the controller to publish a plan for %s", ", ".join(q for q in wanted if q not in plans)
            )
        time.sleep(0.2)
