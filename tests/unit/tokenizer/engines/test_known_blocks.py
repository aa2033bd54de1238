"""Blocks that watchers are told of: what engines hold, with ids, and nothing else."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.block_hash import prefix_hashes, tenant_salt
from services.tokenizer.engines import known_blocks
from services.tokenizer.engines.known_blocks import BlockKey, BlockWatch, KnownBlocks
from tokenwire.errors import ServiceError
from tokenwire.pb.engine.v1 import engine_pb2

SIZE = 2
SALT = tenant_salt("")
PROMPTS: Sequence[Sequence[int]] = [
    [1, 1, 2, 2, 3, 3, 4],
    [1, 1, 2, 2, 5, 5],
    [1, 1, 6, 6],
    [7, 7, 2, 2, 3, 3],
]
CHAINS = [prefix_hashes(prompt, SALT, SIZE) for prompt in PROMPTS]
HASHES = sorted({each for chain in CHAINS for each in chain})
GROUPS = (
    engine_pb2.CacheGroup(blocks=100),
    engine_pb2.CacheGroup(blocks=100, window=3),
    engine_pb2.CacheGroup(blocks=100, snapshot_interval=2),
)


class Engines:
    """Two engines' reports, and the blocks that are known of them."""

    def __init__(self) -> None:
        self.reported: list[list[set[bytes]]] = [[set() for _ in GROUPS] for _ in range(2)]
        self.blocks = KnownBlocks(self.holds)

    def holds(self, group: int, block_hash: bytes) -> bool:
        return any(block_hash in groups[group] for groups in self.reported)

    def report(self, engine: int, stored: set[bytes], removed: set[bytes], group: int = 0) -> None:
        self.reported[engine][group] -= removed
        self.reported[engine][group] |= stored
        self.blocks.on_changed(group, GROUPS[group], stored, removed)


def apply(watch: BlockWatch, seen: dict[BlockKey, Sequence[int]]) -> None:
    """Take an update as a subscriber does. Each block comes after the one before it."""
    update = watch.take()
    if update is None:
        return
    if update.is_whole:
        seen.clear()
    for each in update.removed:
        seen.pop(each, None)
    for each, block in update.stored:
        assert each.group or block.is_first or BlockKey(0, block.parent) in seen
        seen[each] = list(block.ids)


def expected(engines: Engines, learned: set[int]) -> Mapping[BlockKey, Sequence[int]]:
    """Return the blocks that some engine holds, in the first group with all blocks before them."""
    found: dict[BlockKey, Sequence[int]] = {}
    for index, group in itertools.product(learned, range(len(GROUPS))):
        for place, each in enumerate(CHAINS[index]):
            if engines.holds(group, each):
                ids = PROMPTS[index][place * SIZE : (place + 1) * SIZE]
                found[BlockKey(group, each)] = ids
            elif group == 0:
                break
    return found


some_hashes = st.sets(st.sampled_from(HASHES))
learn = st.tuples(st.just("learn"), st.integers(0, len(PROMPTS) - 1))
report = st.tuples(
    st.just("report"), st.integers(0, 1), some_hashes, some_hashes, st.integers(0, 2)
)
read = st.tuples(st.just("read"))


@given(st.lists(st.one_of(learn, report, read), max_size=30))
@settings(max_examples=300, deadline=None)
def test_watcher_knows_what_each_group_of_layers_holds(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    engines, learned = Engines(), set[int]()
    seen: dict[BlockKey, Sequence[int]] = {}
    with engines.blocks.watch(asyncio.Event()) as watch:
        for step in steps:
            match step:
                case ("learn", index):
                    engines.blocks.learn(PROMPTS[index], SIZE)
                    learned.add(index)
                case ("report", engine, stored, removed, group):
                    engines.report(engine, stored, removed - stored, group)
                case _:
                    apply(watch, seen)
        apply(watch, seen)
        assert seen == expected(engines, learned)
    with engines.blocks.watch(asyncio.Event()) as late:
        fresh: dict[BlockKey, Sequence[int]] = {}
        apply(late, fresh)
        assert fresh == seen


def test_watcher_that_reads_nothing_costs_no_more_than_the_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_blocks, "_MOST_IDLE", 2)
    engines = Engines()
    with engines.blocks.watch(asyncio.Event()) as watch:
        watch.take()
        for number in range(100):
            engines.blocks.learn([number] * SIZE, SIZE)
            [each] = prefix_hashes([number] * SIZE, SALT, SIZE)
            engines.report(0, {each}, set())
            engines.report(0, set(), {each})
        update = watch.take()
        assert update is not None
        assert update.is_whole
        assert not update.stored


def test_blocks_that_no_engine_holds_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_blocks, "_MOST_IDLE", 3)
    engines = Engines()
    for prompt in PROMPTS:
        engines.blocks.learn(prompt, SIZE)
    assert len(engines.blocks._idle) == 3
    engines.report(0, set(CHAINS[-1]), set())
    assert engines.blocks.num_held == len(CHAINS[-1])


def test_number_of_watchers_is_limited() -> None:
    blocks = Engines().blocks
    wake = asyncio.Event()
    watches = [blocks.watch(wake) for _ in range(65)]
    for watch in watches[:64]:
        watch.__enter__()
    with pytest.raises(ServiceError) as refused:
        watches[64].__enter__()
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    for watch in watches[:64]:
        watch.__exit__(None, None, None)
