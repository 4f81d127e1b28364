"""The rule itself: whatever a restraint holds and whenever it lets go, alone or beside others, with nodes that die and
plans that change, the results are the oracle's, each once.

A failing seed prints itself; `case(seed)` replays it.
"""

import random
from collections import Counter, defaultdict
from typing import Any

import msgspec
import pytest

from schemas.block import Block
from tests.drawn import check_often, say
from tests.random_restraint import Drawn
from tests.topology.test_feedback_equals_oracle import HEEDING, run_case
from topology.join.memo import Memo
from topology.join.partition import Partition
from topology.join.settings import Settings
from topology.message.effects import Effects
from topology.restraint.suspension.policy import RESTLESS
from topology.state.window_state import MemoryStore, StateName
from topology.testing.driver import TopologyDriver, with_modes

SEEDS, CHUNK = 1_000, 50
MODES: tuple[tuple[str, bool | str, bool, bool], ...] = (  # name, feedback, heralds, M-Joins
    ("alone", False, False, False),
    ("beside feedback", True, False, False),
    ("beside heralds", False, True, False),
    ("beside both", True, True, False),
    ("alone, M-Joins", False, False, True),
    ("beside both, M-Joins", True, True, True),
)
AT_LEAST = {
    "held": 15_000,
    "let go": 20_000,
    "restarts": 10_000,
    "plan changes": 600,
    "results": 20_000,
    "pairs_avoided": 1_000,
    "refused": 2_500,
    **{f"results {name}": 2_000 for name, *_ in MODES},
}
done: Counter[str] = Counter()


class Dying(TopologyDriver):
    """At drawn moments a node dies and is made anew from what it stored."""

    share = 0.0
    restarts = 0

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._restrain = more["restrain"]
        self._chance = random.Random(f"{self.plan.tree} {len(self.inputs)}")
        self._stores = {key: defaultdict[StateName, MemoryStore](MemoryStore) for key in self.nodes}
        self._tables: dict[tuple[str, int], dict[str, bytes]] = {key: {} for key in self.nodes}
        self._restrain.made.clear()
        for key in self.nodes:
            self.nodes[key] = self._started(key, Memo())

    def _started(self, key: tuple[str, int], memo: Memo) -> Partition:
        stores, tables = self._stores[key], self._tables[key]
        node = Partition(
            self.plan,
            *key,
            self.partitions,
            stores=stores.__getitem__,
            memo=memo,
            settings=self.settings,
            restrain=self._restrain,
        )
        if memo.live != [1] or memo.offsets:
            node.restore({name: list(store.segments.values()) for name, store in stores.items()}, tables)
        step = node.step

        def stored(offset: int, block: Block) -> Effects:
            effects = step(offset, block)
            for name, record in effects.tables.items():
                if record is None:
                    tables.pop(name, None)
                else:
                    tables[name] = record
            return effects

        node.step = stored  # type: ignore[method-assign]
        return node

    def advance(self, actor: tuple[str, Any], count: int) -> None:
        super().advance(actor, count)
        if self._chance.random() < self.share:
            key = self._chance.choice(list(self.nodes))
            for store in self._stores[key].values():
                for run in store.runs.values():
                    run.indexes.clear()
            memo = msgspec.msgpack.decode(msgspec.msgpack.encode(self.nodes[key].memo), type=Memo)
            self.nodes[key] = self._started(key, memo)
            type(self).restarts += 1


def case(seed: int) -> Counter[str]:
    name, feedback, heralds, flat = MODES[seed % len(MODES)]
    settings = Settings(weights=RESTLESS, heeding=HEEDING[seed % len(HEEDING)])
    mode = "auto" if feedback and seed % 4 == 3 else feedback
    drawn = Drawn(seed)
    driven = type("Dying", (Dying,), {"share": (0, 0.02, 0.1)[seed // 6 % 3]})
    counts = run_case(
        seed,
        with_modes(settings, mode, "eddy" if flat and seed % 4 else "fixed", heralds),
        drawn,
        changes=(0, 0.03)[seed // 18 % 2],
        flat=flat,
        lengths=(12, 20),
        driven_by=driven,
    )
    counts["held"] = sum(made.held for made in drawn.made)
    counts["let go"] = sum(made.let_go for made in drawn.made)
    counts["restarts"] = driven.restarts  # type: ignore[attr-defined]
    counts[f"results {name}"] = counts["results"]
    return counts


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_results_are_the_oracles(first: int) -> None:
    for seed in range(first, first + CHUNK):
        done.update(case(seed))
        done["seeds"] += 1


def test_it_happened_often(capsys: pytest.CaptureFixture[str]) -> None:
    say(capsys, "the random restraint: 1,000 drawn cases, with crashes", done)
    check_often(done, SEEDS, AT_LEAST)
