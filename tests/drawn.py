"""What tests over many drawn cases share: how a mesh is worked, that its results are the truth, and that what was to be
shown happened often enough.

Invariant: draws come from the caller's `choice` alone, so a seed replays.
"""

from collections import Counter
from collections.abc import Mapping
from random import Random
from typing import Any, TypeVar

import pytest

from topology.join.partition import Partition
from topology.restraint.interface import Restraint
from topology.testing.driver import TopologyDriver

Kind = TypeVar("Kind", bound=Restraint)


def work(driver: TopologyDriver, choice: Random, patience: float, most: int, to_the_end: bool) -> None:
    """Let actors run in a drawn order, mostly those behind ingest; to the end, or for a while."""
    while ready := driver.ready():
        inner = [actor for actor in ready if actor[0] != "ingest"]
        if inner and choice.random() > patience:
            ready = inner
        driver.advance(ready[choice.randrange(len(ready))], 1 + choice.randrange(most))
        if not to_the_end and choice.random() < 0.02:
            return


def let_all_go(driver: TopologyDriver, choice: Random, most: int, ticks: int) -> None:
    """Work until restraints that let go by themselves hold nothing any more, at any node."""
    for _ in range(ticks):
        driver.tick()
        work(driver, choice, 0, most, to_the_end=True)


def restraint_of(node: Partition, kind: type[Kind]) -> Kind | None:
    """The node's restraint of a kind, if it has one."""
    return next((restraint for restraint in node.restraints if isinstance(restraint, kind)), None)


def check_results(driver: TopologyDriver, wanted: Mapping[str, Any], where: str) -> int:
    """The results are those wanted, each once; how many there are."""
    found = {key: (value, at) for key, value, at in driver.results}
    assert len(found) == len(driver.results), f"{where}: a result came twice"
    assert found == wanted, (
        f"{where}: {len(wanted.keys() - found.keys())} of {len(wanted)} are missing,"
        f" {len(found.keys() - wanted.keys())} are too many"
    )
    return len(found)


def say(capsys: pytest.CaptureFixture[str], title: str, done: Counter[str]) -> None:
    with capsys.disabled():
        print(f"\n  {title}: " + ", ".join(f"{what} {count:,}" for what, count in sorted(done.items())))


def check_often(done: Counter[str], seeds: int, at_least: Mapping[str, int]) -> None:
    """Unless only a part of the seeds was asked for."""
    if done["seeds"] == seeds:
        rare = {what: done[what] for what, least in at_least.items() if done[what] < least}
        assert not rare, "too rare to prove anything"
