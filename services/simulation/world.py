"""The whole mesh in one process, under one seed: who runs, how much it gets, what arrives, who dies where and what is
left of it.

Faults: a crash at any failpoint and between any two actions; records under way that arrive late, in part or never; a
node's state deleted, moved to a worker with no state or with old state; processes that are taken for dead, succeeded,
and then go on.

Invariant: a run is a function of its seed (`run_seed` replays it, action by action), and whatever it did, once
everything is up and drained the committed results are the oracle's, each once, and late and broken records are on
record.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import msgspec
from confluent_kafka import KafkaException

from schemas import topics
from schemas.block import MAX_BLOCK_BYTES
from services.runtime import failpoints
from services.simulation.broker import Record, SimBroker, SimSender
from services.simulation.case import draw_case
from services.simulation.processes import Disk, IngestProcess, NodeProcess, Process, SimulatedCrash, SinkProcess
from topology.ingest.settings import IngestSettings
from topology.join.settings import Settings
from topology.restraint.heralding import heeding
from topology.restraint.suspension.policy import RESTLESS

NodeKey = tuple[str, int]
TRACE_SHOWN = 30


class SimulationFailed(AssertionError):
    """What went wrong, under which seed, and what happened before."""


class Clock:
    """Stands for the `time` module where it is handed in."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


class World:
    def __init__(self, seed: int, strict: bool = True) -> None:
        self.seed, self.rng, self.strict = seed, Random(seed), strict
        self.case = draw_case(self.rng)
        self.broker, self.clock = SimBroker(), Clock()
        self.trace: list[str] = []
        self.stats: Counter[str] = Counter()
        self.incarnation = 0
        self.cache_bytes = self.rng.choice((0, 2_000, 1 << 20))
        self.block_bytes = self.rng.choice((150, 600, MAX_BLOCK_BYTES))
        self.ingest_settings, self.settings = IngestSettings(), Settings()
        self.history = [self.case.published]  # the query's plans
        # From numbers of its own, so that what happens otherwise stays what it was.
        self.own = Random(f"{seed} plans")
        self.changes = self.own.choice((0, 0, 0.01, 0.03))  # share of actions that change the plan
        self.crash_rate = self.rng.choice((0.0, 0.005, 0.02, 0.06))  # at each failpoint passed
        self.fault_rate = self.rng.choice((0.01, 0.04, 0.1))  # before each action
        self.delivery = self.rng.choice(
            (0.1, 0.33, 0.5) if self.case.talks else (0.03, 0.1, 0.33)
        )  # share of actions: how long records are under way
        self.heeding = self.rng.choice((heeding.EAGER, heeding.RESTLESS))  # which heralds nodes heed
        self.commits = self.rng.choice((0.4, 1.0, 1.0))  # share of records taken behind which a node commits
        self.running: Process | None = None
        self.calm = False
        self.coming = list(reversed(self.case.records))
        self.keys: list[NodeKey] = [(n.id, p) for n in self.case.plan.nodes for p in range(self.case.mesh.partitions)]
        self.disks = {key: Disk(strict) for key in self.keys}
        self.left_behind: dict[NodeKey, list[Disk]] = {
            key: [] for key in self.keys
        }  # on workers that had the partition once
        self.alive: dict[str, Process | None] = {
            "ingest": None,
            **{f"{n}.{p}": None for n, p in self.keys},
            "sink": None,
        }
        self.victim = self.rng.choice(list(self.alive))  # faults that meet are worse than faults that are spread
        self.going_back: dict[NodeKey, int] = {}  # actions until the partition returns to where it was
        self.zombies: list[Process] = []
        self.ghosts: list[SimSender] = []  # records of dead processes that are still under way
        for stream, partition in ((s, p) for s, count in self.case.counts.items() for p in range(count)):
            self.broker.log((stream, partition))

    def tick(self) -> int:
        """A number larger than any before it, as the machine's clock gives."""
        self.incarnation += 1
        return self.incarnation

    def run(self) -> None:
        with self.patched():
            for _ in range(180 + (14 if self.case.talks else 5) * len(self.case.records)):
                self._act()
            self.drain()
        self.audit()

    # -- what happens next

    def _act(self) -> None:
        rng = self.rng
        self.clock.now += rng.choice((0, 0.01, 0.01, 1))
        self._go_back()
        if self.own.random() < self.changes:
            self.change_plan()
        if rng.random() < self.fault_rate:
            self._fault()
            return
        roll = rng.random()
        if roll < 0.12 and self.coming:
            if not self.case.talks or rng.random() < 0.6:
                self.append(1 if self.case.talks else rng.randint(1, 5))
        elif roll < 0.12 + self.delivery:
            self._deliver()
        elif roll < 0.22 + self.delivery:
            self._acknowledge()
        else:
            name = self._someone()
            process = self.alive[name]
            if self.zombies and rng.random() < 0.3:
                self._step(rng.choice(self.zombies))
            elif process is None:
                if rng.random() < 0.5:
                    self.start(name)
            else:
                self._step(process)

    def change_plan(self) -> None:
        """The control topic gets a plan of the same tree."""
        newest = self.history[-1]
        self.history.append(msgspec.structs.replace(newest, epoch=newest.epoch + 1))
        self.stats["plans changed"] += 1
        self._note(f"plan of epoch {newest.epoch + 1}")

    def _someone(self) -> str:
        """Ingest and sink as often as they would be with few nodes, however many there are."""
        return self.rng.choice(("ingest", "sink", *[self.rng.choice(list(self.alive)) for _ in range(3)]))

    def append(self, count: int) -> None:
        self._note(f"source gets {min(count, len(self.coming))} records")
        for _ in range(min(count, len(self.coming))):
            stream, partition, value, key = self.coming.pop()
            self.broker.log((stream, partition)).append(Record(value, key))

    def _senders(self) -> list[SimSender]:
        return [p.sender for p in [*self.alive.values(), *self.zombies] if p is not None] + self.ghosts

    def _deliver(self) -> None:
        waiting = [(sender, place) for sender in self._senders() for place in sender.waiting]
        if waiting:
            sender, place = self.rng.choice(waiting)
            count = sender.deliver(place, self.rng.randint(1, 6))
            self._note(
                f"{count} records arrive in {place[0]}:{place[1]}{' from the dead' if sender in self.ghosts else ''}"
            )
            self.stats["arrived from the dead"] += count if sender in self.ghosts else 0

    def _acknowledge(self) -> None:
        told = [p for p in [*self.alive.values(), *self.zombies] if p is not None and p.sender.done]
        if told:
            process = self.rng.choice(told)
            count = self.rng.randint(1, len(process.sender.done))
            self._note(f"{process.name} hears of {count} deliveries")
            process.sender.acknowledge(count)

    def _step(self, process: Process) -> None:
        zombie = process in self.zombies
        self._note(f"{'zombie ' if zombie else ''}{process.name} steps")
        self._as(process, process.step)
        if process in self.zombies:
            self.stats["zombie steps"] += 1
            process.left -= 1
            if process.left <= 0:
                self._crash(process, "found out")

    def _as(self, process: Process, do: Callable[[], Any]) -> None:
        self.running = process
        try:
            do()
        except SimulatedCrash as crash:
            self._crash(process, str(crash))
        except KafkaException as refused:
            if process not in self.zombies:
                raise
            self.stats[f"refused {process.name.split('.')[0]}"] += 1
            self._crash(process, f"refused: {refused.args[0].name()}")
        finally:
            self.running = None

    # -- faults

    def _passed(self, point: str) -> None:
        """Called by every failpoint of the services."""
        if (
            not self.calm
            and self.running is not None
            and self.rng.random() < self.crash_rate * (1 if point[0] == "n" else 3)
        ):
            self.stats[f"crash at {point}"] += 1
            raise SimulatedCrash(point)

    def _fault(self) -> None:
        rng = self.rng
        name = self.victim if rng.random() < 0.6 else self._someone()
        process = self.alive[name]
        if process is None:
            return
        kind = rng.choice(("crash", "crash", "zombie", "delete", "move"))
        if kind == "zombie":
            self._note(f"{name} is taken for dead")
            self.stats[f"zombie {'node' if isinstance(process, NodeProcess) else name}"] += 1
            process.left = rng.randint(1, 8)
            self.zombies.append(process)
            self.alive[name] = None
            if isinstance(process, NodeProcess):
                self._successor_disk(process)
            if rng.random() < 0.7:
                self.start(name)
            return
        self.stats["crash between actions"] += 1
        self._crash(process, "between actions")
        if isinstance(process, NodeProcess) and kind != "crash":
            key = (process.node, process.partition)
            if kind == "delete":
                self.disks[key] = Disk(self.strict)
                self.stats["state deleted"] += 1
                self._note(f"{name} lost its state")
            else:
                self.left_behind[key].append(process.disk)
                self._move(key)
                if rng.random() < 0.5:
                    self.going_back[key] = rng.randint(5, 60)

    def _go_back(self) -> None:
        """Partitions that were moved away return after a while, as when workers come and go."""
        for key in list(self.going_back):
            self.going_back[key] -= 1
            if self.going_back[key] == 0:
                del self.going_back[key]
                process = self.alive[f"{key[0]}.{key[1]}"]
                if process is not None and self.left_behind[key]:
                    self._crash(process, "moves back")
                    self.disks[key], old = self.left_behind[key].pop(), self.disks[key]
                    self.left_behind[key].append(old)
                    self.stats["moved to old state"] += 1

    def _successor_disk(self, process: NodeProcess) -> None:
        key = (process.node, process.partition)
        if self.rng.random() < 0.5:
            self.disks[key] = Disk(self.strict, process.disk.data)
            self.stats["successor on a copy"] += 1
        else:
            self._move(key)

    def _move(self, key: NodeKey) -> None:
        """To a worker that never had this partition, or had it some time ago."""
        old = self.left_behind[key]
        if old and self.rng.random() < 0.7:
            self.disks[key] = old.pop(self.rng.randrange(len(old)))
            self.stats["moved to old state"] += 1
            self._note(f"{key[0]}.{key[1]} moves to a worker with old state")
        else:
            self.disks[key] = Disk(self.strict)
            self.stats["moved to no state"] += 1
            self._note(f"{key[0]}.{key[1]} moves to a worker without state")

    def _crash(self, process: Process, why: str) -> None:
        zombie = process in self.zombies
        lost = process.sender.lose(self.rng)
        self._note(f"{'zombie ' if zombie else ''}{process.name} is gone ({why}), {lost} records lost")
        self.stats["records lost under way"] += lost
        if process.sender.waiting:
            self.ghosts.append(process.sender)
        if zombie:
            self.zombies.remove(process)
            if isinstance(process, NodeProcess):
                self.left_behind[process.node, process.partition].append(process.disk)
        else:
            self.alive[process.name] = None

    def start(self, name: str) -> Process:
        self._note(f"{name} starts")
        self.stats["starts"] += 1
        process: Process
        if name == "ingest":
            process = IngestProcess(self)
        elif name == "sink":
            process = SinkProcess(self)
        else:
            node, _, partition = name.partition(".")
            key = (node, int(partition))
            process = NodeProcess(self, *key, self.disks[key])
            if process.at == 0 and self.broker.log(process.place):
                self.stats["rebuilt from the input topic"] += 1
        self.alive[name] = process
        return process

    # -- the end

    def drain(self) -> None:
        self.calm = True
        self._note("calm")
        for zombie in list(self.zombies):
            self._crash(zombie, "at last")
        self.append(len(self.coming))
        moved = True
        while moved:
            moved = False
            for name in self.alive:
                if self.alive[name] is None:
                    self.start(name)
            for sender in self._senders():
                for place in sender.waiting:
                    moved = sender.deliver(place, 1 << 30) > 0 or moved
                sender.acknowledge(len(sender.done))
            for process in self.alive.values():
                assert process is not None
                moved = process.finish() or moved
        for process in self.alive.values():
            if isinstance(process, NodeProcess):
                memo = process.host.memo
                self.stats["rows repeated"] += memo.rows_repeated
                self.stats["blocks fenced"] += memo.blocks_fenced
                newest = self.history[-1].epoch
                assert memo.live == [newest], f"{process.name} runs plans {memo.live}, the newest is {newest}"
                for herald in memo.heralds.each:
                    self.stats["composites not made for want of a herald"] += herald.refused
                    self.stats["composites made for a herald"] += herald.made
                    self.stats["heralds heeded or let be"] += herald.changes
                for held in (memo.feedback, memo.hiding):
                    self.stats["values suspended"] += held.values_suspended
                    self.stats["values resumed"] += held.values_resumed
                    self.stats["pairs avoided"] += held.pairs_avoided
                    self.stats["rows diverted"] += held.rows_diverted
                self.stats["pairs resumed"] += memo.feedback.pairs_resumed
                self.stats["sides that began or ceased to speak"] += sum(w.changes for w in memo.feedback.weighed or ())

    def audit(self) -> None:
        case = self.case
        found = [
            (str(r.key), (json.loads(r.value or b""), r.time)) for _, r in self.broker.topic(topics.results("m", "q"))
        ]
        self._same("results", Counter(key for key, _ in found), Counter(case.expected))
        assert dict(found) == case.expected, "a result has a wrong value"
        late = {bytes(r.key).decode() for _, r in self.broker.topic(topics.late("m"))}  # type: ignore[arg-type]
        self._same("late records", Counter(late), Counter(case.late))
        dead = {bytes(r.key or b"a block").decode() for _, r in self.broker.topic(topics.dead("m"))}  # type: ignore[arg-type]
        self._same("dead records", Counter(dead), Counter(case.dead))
        for (stream, partition), log in ((k, v) for k, v in self.broker.logs.items() if k[0] in case.counts):
            committed = self.broker.offsets.get(("m.ingest", stream, partition), (0, ""))[0]
            end = case.published.table_cuts.get(stream, {}).get(partition, len(log))
            assert committed == end, f"{stream}:{partition} is committed up to {committed} of {end}"
        self.stats["with a table"] += bool(case.published.table_cuts)
        self.stats["results"] += len(found)

    def _same(self, what: str, found: Counter[str], wanted: Counter[str]) -> None:
        wanted = Counter(dict.fromkeys(wanted, 1))
        missing, extra = wanted - found, found - wanted
        assert not missing, f"{what}: {len(missing)} missing, such as {sorted(missing)[:3]}"
        assert not extra, f"{what}: {sum(extra.values())} twice or too many, such as {sorted(extra)[:3]}"

    # -- around it

    def _note(self, text: str) -> None:
        self.trace.append(text)

    @contextmanager
    def patched(self) -> Iterator[None]:
        """The services with this world's settings and crashes."""
        self.settings = Settings(block_bytes=self.block_bytes, weights=RESTLESS, heeding=self.heeding, rows_least=10**9)
        self.ingest_settings = IngestSettings(self.rng.choice((1, 5, 4_000)), block_bytes=self.block_bytes)
        logging.disable(logging.ERROR)
        before, failpoints.hook = failpoints.hook, self._passed
        try:
            yield
        finally:
            failpoints.hook = before
            logging.disable(logging.NOTSET)


def run_seed(seed: int, strict: bool = True) -> World:
    """Run one seed to its end; raises `SimulationFailed` with the seed and the last actions."""
    world = World(seed, strict)
    try:
        world.run()
    except Exception as error:
        shown = "\n  ".join(world.trace[-TRACE_SHOWN:])
        raise SimulationFailed(
            f"seed {seed}: {type(error).__name__}: {error}\n  query: {world.case.published.text}\n  plan:"
            f" {world.case.published.tree}\n  the last {TRACE_SHOWN} of {len(world.trace)} actions:\n  {shown}"
        ) from error
    return world
