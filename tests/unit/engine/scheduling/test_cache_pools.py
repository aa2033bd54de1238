"""Caches of groups: whatever comes and goes, each token reads its own sequence and no other."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.cached_prefix import CachedGroup, longest_prefix, window_start
from services.engine.scheduling.cache_limits import CacheLimits, GroupLimits
from services.engine.scheduling.cache_pools import CachePools
from services.engine.scheduling.scheduler import Scheduler
from services.engine.scheduling.sequence import Request, TokenSequence
from services.engine.scheduling.step_plan import SchedulerLimits
from services.engine.scheduling.token_ids import Prompt
from tests.unit.engine.scheduling.cache_history import History
from tests.unit.engine.tiny import make_request

SIZE = 4
KINDS = {
    "all tokens": ((0,), False),
    "window": ((10,), False),
    "all and window": ((0, 10), False),
    "all and states": ((0,), True),
    "states": ((), True),
    "window and states": ((3, 9), True),
}


@st.composite
def limits(draw: st.DrawFn, windows: tuple[int, ...], has_states: bool) -> CacheLimits:
    blocks = st.integers(12, 60)
    return CacheLimits(
        SIZE,
        [GroupLimits(draw(blocks), window) for window in windows],
        state_slots=draw(st.integers(2, 24)) if has_states else 0,
        snapshot_interval=draw(st.sampled_from((4, 8, 16))),
        chunk_tokens=draw(st.integers(1, 24)),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["alone", "speculate", "overlaps"])
@settings(max_examples=12, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_tokens_read_their_own_sequence_alone(
    kind: str, mode: str, data: st.DataObject, seed: int
) -> None:
    history = History(
        data.draw(limits(*KINDS[kind])),
        seed,
        speculate=mode == "speculate",
        overlaps=mode == "overlaps",
    )
    history.play(30)


@given(
    held=st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=20),
    window=st.integers(1, 20),
    kinds=st.sets(st.sampled_from("aws"), min_size=1),
)
def test_prefix_is_the_longest_that_all_groups_can_continue(
    held: list[tuple[bool, bool, bool]], window: int, kinds: set[str]
) -> None:
    hashes = [bytes([index]) for index in range(len(held))]
    has = [{each for each, some in zip(hashes, held, strict=True) if some[i]} for i in range(3)]
    groups = {
        "a": CachedGroup(has[0]),
        "w": CachedGroup(has[1], window),
        "s": CachedGroup(has[2], holds_states=True),
    }

    def continues(count: int) -> bool:
        needed = window_start(count * SIZE, window) // SIZE
        return (
            ("a" not in kinds or has[0].issuperset(hashes[:count]))
            and ("w" not in kinds or has[1].issuperset(hashes[needed:count]))
            and ("s" not in kinds or not count or hashes[count - 1] in has[2])
        )

    longest = max(filter(continues, range(len(hashes) + 1)))
    assert longest_prefix(hashes, [groups[kind] for kind in sorted(kinds)], SIZE) == longest


def run_alone(caches: CachePools, prompt: list[int], output: int, step: int = 64) -> TokenSequence:
    """Compute a prompt and an answer of zeros, and end it. Returns the sequence."""
    scheduler = Scheduler(SchedulerLimits(4, step, 2.0, 4), caches)
    sequence = add(scheduler, prompt, output)
    while sequence.position < output:
        plan = scheduler.plan(0.0)
        assert not plan.is_empty
        if sequence.uncomputed == 0:
            sequence.append(0)
    scheduler.remove(sequence)
    return sequence


def add(scheduler: Scheduler, prompt: list[int], output: int) -> TokenSequence:
    request = Request(make_request(1, [prompt], max_tokens=output))
    sequence = TokenSequence(request, 0, Prompt(prompt, b"", SIZE), None, output)
    request.sequences.append(sequence)
    scheduler.add(sequence)
    return sequence


def test_long_sequence_holds_no_more_than_its_window() -> None:
    caches = CachePools(CacheLimits(SIZE, [GroupLimits(8, window=12)], chunk_tokens=8))
    scheduler = Scheduler(SchedulerLimits(4, 8, 2.0, 4), caches)
    sequence = add(scheduler, [1] * 500, 100)
    assert scheduler.fits(600)
    while sequence.position < 100:
        scheduler.plan(0.0)
        assert len(sequence.tables[0].held) <= 6
        if sequence.uncomputed == 0:
            sequence.append(0)


def test_prompt_that_follows_an_answer_continues_from_the_answers_end() -> None:
    caches = CachePools(CacheLimits(SIZE, [GroupLimits(64)], state_slots=8, snapshot_interval=64))
    first = run_alone(caches, [1] * 10, 21)
    following = [*first.tokens.tolist(), 5, 6, 7]
    hashes = Prompt(following, b"", SIZE).block_hashes(len(following) // SIZE)
    assert caches.find(hashes).tokens == 28


def test_long_answer_takes_one_place_among_the_snapshots() -> None:
    caches = CachePools(CacheLimits(SIZE, [GroupLimits(64)], state_slots=6, snapshot_interval=64))
    prompt = [2] * 10
    run_alone(caches, prompt, 1)
    run_alone(caches, [1] * 10, 100)
    assert caches.find(Prompt(prompt, b"", SIZE).block_hashes(2)).tokens == 8


def test_prompt_continues_from_snapshots_within_it() -> None:
    caches = CachePools(CacheLimits(SIZE, [GroupLimits(64)], state_slots=8, snapshot_interval=16))
    run_alone(caches, [*range(50)], 1)
    other = [*range(40), 7, 7, 7, 7, 7, 7]
    assert caches.find(Prompt(other, b"", SIZE).block_hashes(10)).tokens == 32


def test_equal_prompts_that_come_at_once_are_computed_once() -> None:
    """The later ones wait for the first one's snapshot."""
    caches = CachePools(CacheLimits(SIZE, [GroupLimits(64)], state_slots=16, snapshot_interval=64))
    scheduler = Scheduler(SchedulerLimits(4, 16, 2.0, 4), caches)
    sequences = [add(scheduler, [1] * 50, 1) for _ in range(3)]
    computed = 0
    while any(sequence.num_computed < 50 for sequence in sequences):
        plan = scheduler.plan(0.0)
        assert not plan.is_empty
        computed += sum(chunk.count for chunk in plan.chunks)
    assert computed == 50 + 2 * 2


def test_beam_continues_its_parents_window_and_state() -> None:
    caches = CachePools(
        CacheLimits(SIZE, [GroupLimits(32), GroupLimits(32, 6)], 16, 64, chunk_tokens=32)
    )
    scheduler = Scheduler(SchedulerLimits(4, 32, 2.0, 4), caches)
    parent, beam = (add(scheduler, [1 + i] * 18, 9) for i in range(2))
    scheduler.plan(0.0)
    copies = scheduler.fork([parent, beam], [0, 0])
    assert [copy.group for copy in copies] == [0, 1]
    assert parent.states is not None
    assert beam.states is not None
    assert beam.states.source == parent.states.slot_at(18)
    for number in range(2):
        shared = parent.tables[number]
        assert beam.tables[number].held[:-1] == shared.held[:-1]
        assert copies[number][1:] == (shared.blocks[4], beam.tables[number].blocks[4])
    for sequence in (parent, beam):
        sequence.append(sequence.index)
    scheduler.plan(0.0)
    caches.check(scheduler.running)
    assert parent.states.source == beam.states.source
    assert parent.states.planned[0].slot != beam.states.planned[0].slot
