"""Blocks that watchers are told of: what engines hold, with ids, and nothing else."""

import asyncio
from collections.abc import Mapping, Sequence

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.block_hash import prefix_hashes, tenant_salt
from services.tokenizer.engines import known_blocks
from services.tokenizer.engines.known_blocks import BlockWatch, KnownBlocks
from tokenwire.errors import ServiceError

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


class Engines:
    """Two engines' reports, and the blocks that are known of them."""

    def __init__(self) -> None:
        self.reported: list[set[bytes]] = [set(), set()]
        self.blocks = KnownBlocks(lambda each: any(each in held for held in self.reported))

    def report(self, engine: int, stored: set[bytes], removed: set[bytes]) -> None:
        self.reported[engine] -= removed
        self.reported[engine] |= stored
        self.blocks.on_changed(stored, removed)


def apply(watch: BlockWatch, seen: dict[bytes, Sequence[int]]) -> None:
    """Take an update as a subscriber does. Each block comes after the one before it."""
    update = watch.take()
    if update is None:
        return
    if update.is_whole:
        seen.clear()
    for each in update.removed:
        seen.pop(each, None)
    for each, block in update.stored:
        assert block.is_first or block.parent in seen
        seen[each] = list(block.ids)


def expected(engines: Engines, learned: set[int]) -> Mapping[bytes, Sequence[int]]:
    """Return the blocks that some engine holds with all blocks before them."""
    found: dict[bytes, Sequence[int]] = {}
    for index in learned:
        for place, each in enumerate(CHAINS[index]):
            if not any(each in held for held in engines.reported):
                break
            found[each] = PROMPTS[index][place * SIZE : (place + 1) * SIZE]
    return found


some_hashes = st.sets(st.sampled_from(HASHES))
learn = st.tuples(st.just("learn"), st.integers(0, len(PROMPTS) - 1))
report = st.tuples(st.just("report"), st.integers(0, 1), some_hashes, some_hashes)
read = st.tuples(st.just("read"))


@given(st.lists(st.one_of(learn, report, read), max_size=30))
@settings(max_examples=300, deadline=None)
def test_watcher_knows_what_is_held_from_the_first_block_on(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    engines, learned = Engines(), set[int]()
    seen: dict[bytes, Sequence[int]] = {}
    with engines.blocks.watch(asyncio.Event()) as watch:
        for step in steps:
            match step:
                case ("learn", index):
                    engines.blocks.learn(PROMPTS[index], SIZE)
                    learned.add(index)
                case ("report", engine, stored, removed):
                    engines.report(engine, stored, removed - stored)
                case _:
                    apply(watch, seen)
        apply(watch, seen)
        assert seen == expected(engines, learned)
    with engines.blocks.watch(asyncio.Event()) as late:
        fresh: dict[bytes, Sequence[int]] = {}
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
