"""One partition of one join node: `step(message) -> Effects`, the same for the same state and message.

A step is a list of stages, whatever the node joins and whoever restrains it: refuse what does not belong here, drop
what was seen before, work (probe and insert rows, or take a word), purge, say what was made and how far we are, retire
operators, and let restraints finish.

Invariants
- A block that is not what the plan says is refused before anything changes (`admission`).
- Each row is taken once (`arrivals`), each pair made once (`kernel`), all that is said numbered in order (`voice`).
- The operator of an epoch makes the pairs of that epoch, and of those before it that no operator runs for any more. An
  epoch is that of the newer of two rows, and every sender says when it sends no more of one.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from schemas.block import Block, Composites, Events, Header, Heralds, NodeEnded, PlanChanged, SourceEnded
from schemas.errors import BlockError, StateError
from schemas.rows import I64, Rows
from topology.join.admission import Admission, HeraldAdmission, check_barrier, check_epoch, check_header
from topology.join.arrivals import advance, unseen
from topology.join.kernel import Kernel, let_go, rows_of
from topology.join.memo import Memo
from topology.join.recording import Recorder
from topology.join.routing import Paths
from topology.join.settings import Settings
from topology.join.voice import Speaker
from topology.message.effects import Effects
from topology.plan.heralds import heralds_of
from topology.plan.plan import Plan, side_name, tree_text
from topology.restraint.heralding.heralding import SLICES, Heard, Heralding
from topology.restraint.hiding import Hiding
from topology.restraint.interface import Freed, Ground, Restraint
from topology.restraint.suspension.suspension import PARTITIONS_MOST, Suspension
from topology.state.meeting import ARRIVED
from topology.state.window_state import (
    EVER,
    MemoryStore,
    Run,
    Segment,
    SegmentStore,
    StateName,
    WindowState,
    least,
)

Stores = Callable[[StateName], SegmentStore]
Restrain = Callable[[Ground], Sequence[Restraint]]


@dataclass(frozen=True)
class Operator:
    """Makes the pairs of the epochs behind `above` up to its own."""

    epoch: int
    above: int


class Partition:
    def __init__(
        self,
        plan: Plan,
        node: str,
        partition: int,
        partitions: int,
        *,
        epoch: int | None = 1,
        incarnation: int = 1,
        stores: Stores | None = None,
        memo: Memo | None = None,
        settings: Settings | None = None,
        known: Mapping[int, bytes] | None = None,
        derive: Callable[[bytes], Plan] | None = None,
        restrain: Restrain | None = None,
    ) -> None:
        """`epoch`: of the first plan, or None if the first block says it, as when the input topic has lost its
        beginning; `known`: plans that may stand in that lost part. `derive` gives the plan that a `PlanChanged` speaks
        of; `restrain` makes further restraints."""
        self.plan, self.node, self.settings = plan, plan.node(node), settings or Settings()
        self.partition, self.partitions = partition, partitions
        self._known, self._derive = known or {}, derive or (lambda _: plan)
        inputs = self.node.inputs
        heralds = heralds_of(plan, self.node) if self.settings.heralds else ()
        self.memo = (memo if memo is not None else Memo()).sized(len(inputs), len(heralds))
        if not self.memo.live and epoch is not None:
            self.memo.live = [epoch]
        self.voice = Speaker(
            plan, self.node, self.memo, (partition, partitions), incarnation, self.settings.block_bytes
        )
        windows = {source.alias: source.window_ms for source in plan.query.sources}
        self._recorders: dict[StateName, Recorder] = {}
        self._stores = stores or (lambda _: MemoryStore())
        states = [
            self._state(StateName(edge.aliases, tuple(map(str, edge.key))), {a: windows[a] for a in edge.aliases})
            for edge in inputs
        ]
        heralded = [
            self._state(StateName((h.alias,), tuple(map(str, h.columns)), True), {h.alias: windows[h.alias]}, SLICES)
            for h in heralds
        ]
        self.all_states = dict(zip(self._recorders, (*states, *heralded), strict=True))
        self.ground = Ground(
            plan,
            self.node,
            partition,
            partitions,
            tuple(states),
            self.memo.watermarks,
            self.memo.counts,
            self.voice,
        )
        self.restraints: tuple[Restraint, ...] = (
            *self._hiding(),
            *self._suspension(),
            *([Heralding(self.ground, heralds, heralded, self.memo.heralds, self.settings.heeding)] if heralds else []),
            *(restrain(self.ground) if restrain is not None else ()),
        )
        self.ground.restraints = self.restraints
        self.kernel = Kernel(self.ground, self.restraints, Paths(self.settings.routing, self.memo.paths))
        self._keeps_moments = any(restraint.keeps_moments for restraint in self.restraints)
        self._side_of = {edge.name: side for side, edge in enumerate(inputs)}
        self._admission = {edge.name: Admission(plan, edge, partition, partitions) for edge in inputs} | {
            h.alias: HeraldAdmission(plan, h, k, partition, partitions) for k, h in enumerate(heralds)
        }
        self._open()

    def _state(self, name: StateName, windows: Mapping[str, int], slices: int | None = None) -> WindowState:
        recorder = self._recorders[name] = Recorder(self._stores(name), name)
        state = WindowState(windows, recorder, key=name.key)
        if slices is not None:
            state.slices_per_window = slices
        return state

    def _hiding(self) -> list[Restraint]:
        if self.settings.feedback == "off" or not self.node.is_flat:
            return []
        return [Hiding(self.ground, self.memo.hiding, weighs=self.settings.feedback == "auto")]

    def _suspension(self) -> list[Restraint]:
        settings, mode = self.settings, self.settings.feedback
        if mode == "off" or self.partitions > PARTITIONS_MOST or len(self.plan.nodes) == 1:
            return []
        return [Suspension(self.ground, self.memo.feedback, mode == "auto", settings.weights, settings.rows_least)]

    # -- what others ask

    @property
    def states(self) -> tuple[WindowState, ...]:
        return self.ground.states

    @property
    def windows(self) -> tuple[Mapping[str, int], ...]:
        return self.ground.windows

    @property
    def heard(self) -> Sequence[Heard]:
        """The heralds and what has come of each."""
        return next((r.heard for r in self.restraints if isinstance(r, Heralding)), ())

    @property
    def stored_windows(self) -> dict[StateName, Mapping[str, int]]:
        return {name: state.windows_ms for name, state in self.all_states.items()}

    def restore(
        self, segments: Mapping[StateName, Sequence[Segment]], tables: Mapping[str, bytes] | None = None
    ) -> None:
        """Take over what was stored."""
        for name, found in segments.items():
            if name not in self.all_states:
                raise StateError(
                    f"{self._where}: there is a state of {name}, which this plan does not have; delete this node's"
                    " state directory and start again: it is rebuilt from the input topic"
                )
            self.all_states[name].restore(list(found))
        for restraint in self.restraints if tables else ():
            restraint.restore(tables or {})

    def reads(self, header: Header) -> bool:
        """Whether the rows of a block are to be read."""
        return all(restraint.reads(header) for restraint in self.restraints)

    def describe(self) -> list[dict[str, Any]]:
        """What each input holds, for reports."""
        held = []
        for side, (edge, state) in enumerate(zip(self.node.inputs, self.states, strict=True)):
            segments, static = list(state.segments()), self.ground.is_static[side]
            held.append(
                {
                    "side": side_name(self.node, side),
                    "name": edge.name,
                    "rows": state.rows,
                    "bytes": sum(s.bytes for s in segments),
                    "segments": len(segments),
                    "oldest_ms": None if static else min((s.min_start for s in segments), default=None),
                    "newest_ms": None if static else max((s.max_start for s in segments), default=None),
                    "window_ms": -1 if static else min(state.windows_ms.values()),
                }
            )
        return held

    @cached_property
    def _where(self) -> str:
        return f"{self.plan.query.name}.{self.node.id} partition {self.partition}"

    # -- a step

    def step(self, offset: int, block: Block) -> Effects:
        """Take the block at `offset` of the input topic; a `BlockError` leaves the state as it was."""
        self._admit(block)
        before = self.ground.watermark
        self._begin(offset, block.header.epoch)
        made = self._ripe()
        rows = unseen(self.memo, block.header, block.rows, self._where)
        if rows is not None:
            made += self._work(block, rows)
        if made or (rows is not None and self._has_more(block.header, rows, before)):
            self._purge()
            self.voice.emit(made, before, self.ground.watermark, self.ground.watermark_step)
            self._retire()
            self._finish()
        return self._collect()

    def _admit(self, block: Block) -> None:
        """Refuse what does not belong here."""
        header = block.header
        if isinstance(header, PlanChanged):
            if block.rows is not None or not 0 < header.epoch < 1 << 62:
                raise BlockError(f"a plan of epoch {header.epoch} with rows, or out of range")
            if header.epoch > max(self.memo.live, default=0):
                self._check_plan(header)
            return
        check_epoch(header, max((*self.memo.live, *self._known)))
        taker = self._taker(header)
        if taker is not None:
            check_header(header, self.partitions)
            if not isinstance(header, Heralds):
                taker.check(block)
                return
        if isinstance(header, SourceEnded | NodeEnded):
            check_barrier(block, self._admission.get(header.sender), self.partitions)
        elif header.sender not in self._admission or not isinstance(header, Events | Heralds | Composites):
            raise BlockError(f"{header.kind} of {header.sender!r}, which sends nothing of that kind here")
        else:
            self._admission[header.sender].check(block)

    def _taker(self, header: Header) -> Restraint | None:
        """The restraint that a message is for."""
        return next((restraint for restraint in self.restraints if isinstance(header, restraint.takes)), None)

    def _begin(self, offset: int, epoch: int) -> None:
        if not self.memo.live:
            self.memo.live = [epoch]
            self._open()
        if epoch > self.memo.live[-1] and epoch in self._known:  # what said so is no longer in the topic
            self._change_plan(PlanChanged(epoch, self._known[epoch]))
        self.memo.offsets["in"] = offset + 1
        self.memo.counts.blocks_in += 1
        self.ground.now = offset
        self.voice.begin(offset)

    def _work(self, block: Block, rows: Rows) -> list[tuple[int, Rows]]:
        """Take rows that are new and the sender's time, or a word; gives the composites that are made, by epoch."""
        header, made = block.header, list[tuple[int, Rows]]()
        taker = self._taker(header)
        if isinstance(header, PlanChanged):
            self._change_plan(header)
        elif isinstance(header, SourceEnded | NodeEnded):
            self._ended(header)
        elif taker is not None:
            made = self._let_go(taker, taker.take(block, rows))
        elif len(rows):
            made = self._rows(self._side_of[header.sender], header, rows)
        if isinstance(header, Heralds):
            advance(self.memo, header, len(self.states) + header.herald)
        elif isinstance(header, Events | Composites | SourceEnded) and header.sender in self._side_of:
            advance(self.memo, header, self._side_of[header.sender])
        return made

    def _rows(self, side: int, header: Header, rows: Rows) -> list[tuple[int, Rows]]:
        """Rows of one input: probe, then insert."""
        self.memo.counts.rows_in[side] += len(rows)
        run = probe = self._arriving(side, rows)
        for restraint in self.restraints:
            restraint.arrive(side, run)
        for restraint in self.restraints:
            probe = restraint.probing(side, probe)
        made = []
        for operator in self.operators:
            pairs = self.kernel.of_new(side, probe, header.epoch, operator.above, operator.epoch)
            output = rows_of(pairs, self.kernel.carried)
            if output is not None:
                made.append((operator.epoch, output))
        self._insert(side, run, header.epoch)
        for restraint in self.restraints:
            restraint.stored(side, run, header)
        return made

    def _arriving(self, side: int, rows: Rows) -> Run:
        """New rows of an input, ready to be stored: with the moment they came, where composites of them may wait."""
        if self._keeps_moments:
            came: I64 = np.full(len(rows), self.ground.now, np.int64)
            rows = rows.with_column(ARRIVED, came)
        return Run.of(rows, self.windows[side])

    def _insert(self, side: int, run: Run, epoch: int) -> None:
        horizon = self.horizon(side)
        if least(run.ends) < horizon:  # no later row of another input can meet these
            run = run.take(np.flatnonzero(run.ends >= horizon))
        self.states[side].insert(run, epoch)

    def _ripe(self) -> list[tuple[int, Rows]]:
        """What restraints let go because the moment has come."""
        ripening = [restraint for restraint in self.restraints if restraint.ripens]
        return [one for restraint in ripening for one in self._let_go(restraint, restraint.ripe())]

    def _let_go(self, by: Restraint, taking: Generator[Freed, int, None]) -> list[tuple[int, Rows]]:
        """What a restraint lets go is made now, by the operator that it belongs to."""
        kernels = [(self.kernel, operator.above, operator.epoch) for operator in self.operators]
        made = []
        for operator, runs in zip(self.operators, let_go(kernels, taking, by), strict=True):
            output = rows_of(runs, self.kernel.carried)
            if output is not None:
                made.append((operator.epoch, output))
        return made

    def _has_more(self, header: Header, rows: Rows, before: int) -> bool:
        """Whether the end of a step is needed: not for a herald that is let be, while the time stands still."""
        if not isinstance(header, Heralds) or len(rows) or self.ground.watermark != before:
            return True
        return any(restraint.is_due for restraint in self.restraints)

    def horizon(self, side: int) -> int:
        """Rows of an input that end before this nobody needs."""
        horizon = self.ground.others_reached(side)
        for restraint in self.restraints:
            horizon = restraint.horizon(side, horizon)
        return horizon

    def _purge(self) -> None:
        horizons = [self.horizon(side) for side in range(len(self.states))]
        for state, horizon in zip(self.states, horizons, strict=True):
            self.memo.rows_purged += state.purge(horizon)
        for restraint in self.restraints:
            restraint.purge(horizons)

    def _finish(self) -> None:
        for restraint in self.restraints:
            restraint.finish()
        for restraint in self.restraints:
            restraint.weigh()

    def _collect(self) -> Effects:
        effects = Effects(sends=self.voice.sends)
        for recorder in self._recorders.values():
            recorder.collect(effects)
        for restraint in self.restraints:
            effects.tables.update(restraint.changed())
        return effects

    # -- epochs

    def _open(self) -> None:
        """One operator for each epoch that is alive, over the same states."""
        live = self.memo.live or [EVER + 1]
        self.operators = [Operator(epoch, above) for epoch, above in zip(live, (EVER, *live[:-1]), strict=True)]
        for state in self.all_states.values():
            state.oldest = live[0]

    def _check_plan(self, header: PlanChanged) -> None:
        plan = self._derive(header.plan)
        if plan != self.plan:
            raise StateError(
                f"{self._where}: plan {tree_text(plan.tree)} of epoch {header.epoch} came, but this version changes a"
                f" running query only to the same tree, {tree_text(self.plan.tree)}; upgrade it"
            )

    def _change_plan(self, header: PlanChanged) -> None:
        if header.epoch <= self.memo.live[-1]:
            return  # said again
        self.memo.live.append(header.epoch)
        self.memo.plans[header.epoch] = header.plan
        self._open()

    def _ended(self, header: SourceEnded | NodeEnded) -> None:
        """A partition of a sender brings no more of an epoch."""
        if header.epoch < self.memo.live[0] or header.sender not in self._side_of:
            return  # said again; or of a stream that is only heralded here
        ended = self.memo.ended.setdefault(header.epoch, {}).setdefault(header.sender, [])
        partitions = [p.partition for p in header.positions] if isinstance(header, SourceEnded) else [header.partition]
        ended += [p for p in partitions if p not in ended]
        self.memo.senders[header.sender] = header.partitions

    def _retire(self) -> None:
        """End the oldest operators of which every sender has said that no more comes; the next takes over what is still
        held of theirs."""
        while len(self.memo.live) > 1 and self._has_ended(self.memo.live[0]):
            epoch = self.memo.live.pop(0)
            self.memo.ended.pop(epoch, None)
            self.memo.plans.pop(epoch, None)
            self.voice.end(epoch)
            self._open()

    def _has_ended(self, epoch: int) -> bool:
        ended = self.memo.ended.get(epoch, {})
        return all(name in ended and len(ended[name]) >= self.memo.senders.get(name, 1 << 62) for name in self._side_of)
