"""What several steps send together is what they sent one by one: the same rows, in the same order, once, however a
sender that starts again bundles them."""

from random import Random

import msgspec
import numpy as np
import pytest

from schemas.block import Block, Composites, FromNode, NodeEnded, ResumeDone, Step, decode_block, encode_block
from schemas.rows import Rows
from topology.message.bundle import bundled, unseen_of
from topology.message.effects import Effects, Send
from topology.results.results import SequenceFilter
from topology.state.window import HASH
from topology.state.window_state import Run, Segment, StateName


def made(sequence: int, ids: list[int], partition: int = 0, back: bool = False, epoch: int = 1) -> Send:
    header = Composites(epoch, "j1", 0, 1, 1, sequence, watermark=sequence)
    return Send("j2", partition, Block(header, Rows({"id": np.array(ids, np.int64)}) if ids else None), back)


def word(header: FromNode) -> Send:
    return Send("j2", 0, Block(header))


def ids(rows: Rows | None) -> list[int]:
    return [] if rows is None else rows.ints("id").tolist()


def header_of(send: Send) -> Composites:
    assert isinstance(send.block.header, Composites)
    return send.block.header


def test_blocks_to_one_place_become_one() -> None:
    sends = [made(1, [1, 2]), made(2, [3], partition=1), made(3, []), made(4, [4])]
    first, second = bundled(sends)
    assert ids(first.block.rows) == [1, 2, 4]
    assert header_of(first).sequence == header_of(first).watermark == 4
    assert header_of(first).steps == (Step(1, 2), Step(4, 1))
    assert second is sends[1]


@pytest.mark.parametrize("header", [ResumeDone(1, "j1", 0, 1, 1, 2, ticket=9), NodeEnded(1, "j1", 0, 1, 1, 2)])
def test_rows_stay_on_their_side_of_a_word(header: FromNode) -> None:
    """`resume-done` says that what was owed stands before it, `node-ended` that all of its epoch does."""
    sends = [made(1, [1]), word(header), made(3, [2]), made(4, [3])]
    assert [(s.block.header.kind, ids(s.block.rows)) for s in bundled(sends)] == [
        ("composites", [1]),
        (header.kind, []),
        ("composites", [2, 3]),
    ]


def test_a_block_holds_rows_of_one_epoch() -> None:
    sends = [made(1, [1]), made(2, [2], epoch=2), made(3, [3], epoch=2), made(4, [4])]
    assert [(s.block.header.epoch, ids(s.block.rows)) for s in bundled(sends)] == [(1, [1]), (2, [2, 3]), (1, [4])]


def test_the_time_alone_stays_the_time_alone() -> None:
    (only,) = bundled([made(1, []), made(2, [])])
    assert only.block.rows is None
    assert header_of(only).watermark == 2
    assert not header_of(only).steps


def test_no_block_grows_beyond_the_limit() -> None:
    sends = [made(k, [k] * 10) for k in range(1, 20)]
    bundles = bundled(sends, limit=300)
    assert [len(ids(s.block.rows)) for s in bundles] == [30] * 6 + [10]


@pytest.mark.parametrize("seed", range(300))
def test_each_step_is_taken_once_however_it_is_bundled(seed: int) -> None:
    """A sender dies again and again and starts again from an earlier step: what it bundles differs, what is taken does
    not."""
    rng = Random(seed)
    steps = [made(10 * k + 10, [100 * k + i for i in range(rng.choice((0, 1, 3)))]) for k in range(30)]
    taken: list[int] = []
    at, last, incarnation, seen = 0, -1, 1, SequenceFilter()
    by_filter: list[int] = []
    while at < len(steps):
        count = rng.randint(1, 6)
        for send in bundled(steps[at : at + count], limit=rng.choice((24, 100, 10_000))):
            block = decode_block(
                encode_block(
                    Block(msgspec.structs.replace(send.block.header, incarnation=incarnation), send.block.rows)
                )
            )
            assert isinstance(block.header, Composites)
            new = unseen_of(
                block.header, block.rows if block.rows is not None else Rows({"id": np.empty(0, np.int64)}), last
            )
            taken += ids(new)
            by_filter += ids(seen.unseen(block))
            last = max(last, block.header.sequence)
        at += count
        if rng.random() < 0.3:
            at, incarnation = max(0, at - rng.randint(1, 8)), incarnation + 1
    assert taken == by_filter == [i for s in steps for i in ids(s.block.rows)]


def test_a_segment_that_is_made_and_merged_before_the_batch_is_not_written() -> None:
    run = Run.of(
        Rows({"#a": np.zeros(1, np.int64), "@a": np.zeros(1, np.int64), HASH: np.zeros(1, np.uint64)}), {"a": 10}
    )
    segments = [Segment(id, 0, 1, 8, 0, 10, 0, 10) for id in range(3)]
    one, two = StateName(("a",), ("a.k",)), StateName(("a",), ("a.m",))
    effects = Effects(
        puts=[(one, segments[0], run), (two, segments[0], run)], tables={"s0": b"old", "d0": b"kept", "h0": b"goes"}
    )
    effects.add(Effects(puts=[(one, segments[1], run)], drops=[(one, 0), (two, 7)], tables={"s0": b"new", "h0": None}))
    assert [(name, segment.id) for name, segment, _ in effects.puts] == [(two, 0), (one, 1)]
    assert effects.drops == [(two, 7)]
    assert effects.tables == {"s0": b"new", "d0": b"kept", "h0": None}
