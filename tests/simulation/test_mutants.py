"""The simulation can fail: each way to break the step's order, or a service's, is caught, and it is said by which seed.

Two detectors. The audit compares the committed results with the oracle. The protocol checks of the simulated disk and
sender see a step that is out of order even when no result shows it: a step is deterministic and numbered by its input
offset, so repeating one whole is harmless by design, and only the second detector sees mutants that rely on that.
"""

import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from confluent_kafka import TopicPartition

import topology.join.arrivals as arrivals_module
import topology.results.results as results_module
from schemas.block import Block, FromNode
from schemas.rows import Rows
from services.ingest.loop import Ingest
from services.join_node.host import PartitionHost
from services.runtime.failpoints import failpoint
from services.runtime.store import NodeStore, OutboxEntry, encoded_memo
from services.simulation.world import SimulationFailed, run_seed
from services.sink.loop import Seen, Sink
from topology.ingest.effects import Commit, Flush
from topology.join.memo import Memo
from topology.message.effects import Effects
from topology.results.results import SequenceFilter

SEEDS = range(300)
Patch = Callable[[pytest.MonkeyPatch], None]


def _store_memo(host: PartitionHost) -> None:
    host.database.engine.write(encoded_memo(host.memo), [])


def offset_after_the_sends(patch: pytest.MonkeyPatch) -> None:
    """The batch holds all but the offsets, which are written when everything is sent."""
    apply, commit = NodeStore.apply, PartitionHost.commit

    def without_offsets(
        self: NodeStore, effects: Effects, memo: Memo, sends: list[OutboxEntry], plan: bytes | None = None
    ) -> list[tuple[bytes, OutboxEntry]]:
        stored, after = self.memo(), memo.offsets
        memo.offsets = {} if stored is None else stored.offsets
        try:
            return apply(self, effects, memo, sends, plan)
        finally:
            memo.offsets = after

    def then_offsets(self: PartitionHost) -> None:
        if self.waiting:
            commit(self)
            failpoint("node.after_send")
            _store_memo(self)

    patch.setattr(NodeStore, "apply", without_offsets)
    patch.setattr(PartitionHost, "commit", then_offsets)


def memo_after_the_sends(patch: pytest.MonkeyPatch) -> None:
    """The input offset and all that says what was seen are written on their own, when everything is sent."""
    apply, commit = NodeStore.apply, PartitionHost.commit

    def without_memo(
        self: NodeStore, effects: Effects, memo: Memo, sends: list[OutboxEntry], plan: bytes | None = None
    ) -> list[tuple[bytes, OutboxEntry]]:
        stored = self.memo()
        return apply(self, effects, memo if stored is None else stored, sends, plan)

    def then_memo(self: PartitionHost) -> None:
        if self.waiting:
            commit(self)
            failpoint("node.after_send")
            _store_memo(self)

    patch.setattr(NodeStore, "apply", without_memo)
    patch.setattr(PartitionHost, "commit", then_memo)


def offset_before_the_batch(patch: pytest.MonkeyPatch) -> None:
    """The memo is written ahead of the batch, on its own."""
    apply = NodeStore.apply

    def memo_first(
        self: NodeStore, effects: Effects, memo: Memo, sends: list[OutboxEntry], plan: bytes | None = None
    ) -> list[tuple[bytes, OutboxEntry]]:
        self.engine.write(encoded_memo(memo), [])
        failpoint("node.before_batch")
        return apply(self, effects, memo, sends, plan)

    patch.setattr(NodeStore, "apply", memo_first)


def send_before_the_batch(patch: pytest.MonkeyPatch) -> None:
    """Blocks leave, then the batch is written: a crash between the two, or before they arrive, has nothing to
    resend."""
    apply = NodeStore.apply

    def sent_first(self: PartitionHost) -> None:
        def send_then_apply(effects: Effects, memo: Memo, sends: list[OutboxEntry]) -> list[tuple[bytes, OutboxEntry]]:
            for entry in sends:
                self.sender.send(entry.topic, entry.partition, entry.value)
            failpoint("node.before_batch")
            for key, _ in apply(self.database, effects, memo, sends):
                self.database.acknowledged(key)
            return []

        patch.setattr(self.database, "apply", send_then_apply)
        commit(self)

    commit = PartitionHost.commit
    patch.setattr(PartitionHost, "commit", sent_first)


def commit_forgets_a_step(patch: pytest.MonkeyPatch) -> None:
    """Of several steps that are made durable together only the last one's sends are kept."""
    add = Effects.add

    def last_sends(self: Effects, then: Effects) -> None:
        self.sends.clear()
        add(self, then)

    patch.setattr(Effects, "add", last_sends)


def steps_not_told_apart(patch: pytest.MonkeyPatch) -> None:
    """A block of several steps is taken whole, though some of them were seen before."""

    def by_the_block(header: FromNode, rows: Rows, last: int) -> Rows | None:
        return None if header.sequence <= last else rows

    patch.setattr(arrivals_module, "unseen_of", by_the_block)
    patch.setattr(results_module, "unseen_of", by_the_block)


def outbox_not_resent(patch: pytest.MonkeyPatch) -> None:
    """A restart forgets what was durable but perhaps not sent."""
    patch.setattr(NodeStore, "outbox", lambda _self: [])


def trimmed_before_delivery(patch: pytest.MonkeyPatch) -> None:
    """An outbox entry is trimmed when it was handed to the producer, not when the broker has it."""

    def transmit(self: PartitionHost, key: bytes, entry: OutboxEntry) -> None:
        self.sender.send(entry.topic, entry.partition, entry.value)
        self.database.acknowledged(key)

    patch.setattr(PartitionHost, "_transmit", transmit)


def no_sequence_check_in_nodes(patch: pytest.MonkeyPatch) -> None:
    """A node takes every block of another node."""
    patch.setattr(arrivals_module, "_of_node", lambda _memo, _header, rows: rows)


def no_sequence_check_in_the_sink(patch: pytest.MonkeyPatch) -> None:
    """The sink writes every block it reads."""

    def anything(self: SequenceFilter, block: Block) -> Rows | None:
        assert isinstance(block.header, FromNode)
        self.last = max(self.last, block.header.sequence)
        return block.rows

    patch.setattr(SequenceFilter, "unseen", anything)


def no_source_offset_check(patch: pytest.MonkeyPatch) -> None:
    """A node takes every row of ingest."""
    patch.setattr(arrivals_module, "_of_source", lambda _memo, _header, rows, _where: rows)


def ingest_commits_before_the_flush(patch: pytest.MonkeyPatch) -> None:
    """Source offsets are stored while blocks are still under way."""

    def commit(self: Ingest) -> None:
        effects = self.core.commit()
        self._do([effect for effect in effects if not isinstance(effect, Flush | Commit)])
        for effect in effects:
            if isinstance(effect, Commit):
                self._write_offsets([TopicPartition(*offset) for offset in effect.offsets])
        failpoint("ingest.before_commit")
        self.sender.flush()

    patch.setattr(Ingest, "_commit", commit)


def ingest_commits_without_its_reading(patch: pytest.MonkeyPatch) -> None:
    """The largest event time is not stored with the offset, so that lateness starts afresh."""
    write = Ingest._write_offsets

    def bare(self: Ingest, offsets: list[TopicPartition]) -> None:
        write(self, [TopicPartition(o.topic, o.partition, o.offset) for o in offsets])

    patch.setattr(Ingest, "_write_offsets", bare)


def sink_offsets_outside_the_transaction(patch: pytest.MonkeyPatch) -> None:
    """Results are committed first, the offsets behind them afterwards."""

    def close(self: Sink) -> None:
        if self.started is None:
            return
        offsets = [
            TopicPartition(self.source, p, at, msgspec.json.encode(Seen(self.filters[p].last)).decode())
            for p, at in self.next.items()
        ]
        failpoint("sink.before_commit")
        self.producer.commit_transaction(60)
        failpoint("sink.after_commit")
        self.consumer.commit(offsets=offsets, asynchronous=False)
        self.started, self.pending = None, 0

    patch.setattr(Sink, "_close_transaction", close)


def sink_forgets_the_sequence(patch: pytest.MonkeyPatch) -> None:
    """The last sequence is not stored with the sink's offset."""
    original = Sink._assigned

    def assigned(self: Sink, consumer: Any, places: list[TopicPartition]) -> None:
        original(self, consumer, places)
        self.filters = {p: SequenceFilter() for p in self.filters}

    patch.setattr(Sink, "_assigned", assigned)


AUDITED: list[Patch] = [
    memo_after_the_sends,
    offset_before_the_batch,
    send_before_the_batch,
    outbox_not_resent,
    trimmed_before_delivery,
    no_sequence_check_in_nodes,
    no_sequence_check_in_the_sink,
    no_source_offset_check,
    ingest_commits_before_the_flush,
    ingest_commits_without_its_reading,
    sink_offsets_outside_the_transaction,
    sink_forgets_the_sequence,
    commit_forgets_a_step,
    steps_not_told_apart,
]
CHECKED: list[Patch] = [offset_after_the_sends, memo_after_the_sends, offset_before_the_batch, send_before_the_batch]


def first_caught(mutant: Patch, strict: bool) -> tuple[int, str]:
    """The first seed that fails with the mutant and holds without it."""
    for seed in SEEDS:
        try:
            with pytest.MonkeyPatch.context() as patch:
                mutant(patch)
                run_seed(seed, strict)
        except SimulationFailed as failure:
            run_seed(seed, strict)
            return seed, str(failure).splitlines()[0]
    pytest.fail(f"none of {len(SEEDS)} seeds caught it")


@pytest.mark.parametrize("mutant", AUDITED, ids=lambda m: m.__name__)
def test_the_audit_catches(mutant: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    begun = time.monotonic()
    seed, why = first_caught(mutant, strict=False)
    with capsys.disabled():
        print(f"\n  mutant {mutant.__name__} caught after {seed + 1} seeds, {time.monotonic() - begun:.1f} s: {why}")


@pytest.mark.parametrize("mutant", CHECKED, ids=lambda m: m.__name__)
def test_the_protocol_checks_catch(mutant: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    seed, why = first_caught(mutant, strict=True)
    assert "ProtocolBroken" in why
    with capsys.disabled():
        print(f"\n  mutant {mutant.__name__} caught after {seed + 1} seeds: {why}")
