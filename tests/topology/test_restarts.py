"""A node that is started again from what it stored goes on as if nothing had been: the same sends, step by step, with
feedback and heralds.

Receivers drop what they have by sequence, so a node that would send other rows under a number it has used loses them.
The inputs are those of the drawn cases of feedback; each node's log is stepped through twice, once with restarts at
drawn moments. A failing seed prints itself.
"""

import random
from collections import Counter, defaultdict
from typing import Any
from unittest import mock

import msgspec
import pytest

from schemas.block import decode_block
from schemas.rows import Rows
from tests.drawn import check_often, say
from tests.topology import test_feedback_equals_oracle as drawn
from topology.join.memo import Memo
from topology.join.partition import Partition
from topology.join.settings import Settings
from topology.message.effects import Effects
from topology.state.window_state import MemoryStore, StateName
from topology.testing.driver import TopologyDriver

SEEDS, CHUNK = 160, 40
AT_LEAST = {
    "restarts": 4_000,
    "steps": 20_000,
    "values suspended": 300,
    "composites not made for want of a herald": 600,
}
done: Counter[str] = Counter()


def stepped(
    made: Partition,
    driver: TopologyDriver,
    key: tuple[str, int],
    settings: Settings,
    restarts: random.Random | None,
    stores: defaultdict[StateName, MemoryStore],
) -> list[Any]:
    """What the node sends, step by step."""
    node, sent, tables = made, [], dict[str, bytes]()
    for offset, data in enumerate(driver.inputs[key].records[: driver.inputs[key].read]):
        effects: Effects = node.step(offset, decode_block(data, node.reads))
        for name, record in effects.tables.items():
            if record is None:
                tables.pop(name, None)
            else:
                tables[name] = record
        sent.append(
            [
                (send.target, send.partition, send.back, send.block.header, content(send.block.rows))
                for send in effects.sends
            ]
        )
        if restarts is not None and restarts.random() < 0.2:
            memo = msgspec.msgpack.decode(msgspec.msgpack.encode(node.memo), type=Memo)
            node = Partition(
                driver.plan, *key, driver.partitions, stores=stores.__getitem__, memo=memo, settings=settings
            )
            node.restore({name: list(store.segments.values()) for name, store in stores.items()}, tables)
            done["restarts"] += 1
    done["steps"] += len(sent)
    return sent


def content(rows: Rows | None) -> Any:
    """Rows as a set: their order within a block says nothing."""
    return (
        None
        if rows is None
        else (list(rows.columns), sorted(map(repr, zip(*(list(c) for c in rows.columns.values()), strict=True))))
    )


def check(seed: int) -> None:
    made: list[TopologyDriver] = []

    class Kept(TopologyDriver):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            made.append(self)

    heralds, feedback = seed % 2 == 0, seed % 5 != 0

    def replay(seed: int, settings: Settings) -> Counter[str]:
        """Within the constants that the case is drawn with."""
        found = run_case(seed, settings)
        driver = made[0]
        for key in driver.nodes:
            stores = [defaultdict[StateName, MemoryStore](MemoryStore) for _ in range(2)]
            runs = [
                stepped(
                    Partition(driver.plan, *key, driver.partitions, stores=s.__getitem__, settings=settings),
                    driver,
                    key,
                    settings,
                    restarts,
                    s,
                )
                for s, restarts in zip(stores, (None, random.Random(f"{seed} {key}")), strict=True)
            ]
            differ = next((k for k, (one, two) in enumerate(zip(*runs, strict=True)) if one != two), None)
            assert differ is None, (
                f"seed {seed}: {key[0]} partition {key[1]} sends something else at offset {differ} when it is started"
                " again before"
            )
        return found

    run_case = drawn.run_case
    with mock.patch.object(drawn, "TopologyDriver", Kept), mock.patch.object(drawn, "run_case", replay):
        counts = drawn.case(seed, heralds, feedback)
    done["values suspended"] += counts["values_suspended"]
    done["composites not made for want of a herald"] += counts["refused"]
    done["seeds"] += 1


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_a_restart_changes_nothing(first: int) -> None:
    for seed in range(first, first + CHUNK):
        check(seed)


def test_there_was_something_to_remember(capsys: pytest.CaptureFixture[str]) -> None:
    say(capsys, "restarts", done)
    check_often(done, SEEDS, AT_LEAST)
