"""The queue of compilations measures CPU time, so that a slow machine refuses nothing."""

import asyncio

import pytest

from services.grammar.compiling.compile_slots import CompileSlots
from tokenwire.errors import ServiceError

PATIENCE = 5.0


async def queued(slots: CompileSlots, count: int) -> list[asyncio.Task[None]]:
    """Start `count` waiters in order."""
    waiters = [asyncio.ensure_future(slots.take()) for _ in range(count)]
    await asyncio.sleep(0)
    return waiters


async def served(waiters: list[asyncio.Task[None]]) -> list[int]:
    """Return the indices of the waiters that have a slot."""
    await asyncio.sleep(0)
    done = [place for place, waiter in enumerate(waiters) if waiter.done()]
    return [place for place in done if not waiters[place].cancelled()]


async def test_slots_are_given_in_the_order_of_arrival() -> None:
    slots = CompileSlots(2, PATIENCE)
    waiters = await queued(slots, 5)
    for count in range(2, 6):
        assert await served(waiters) == list(range(count))
        slots.give_back(0.1)
    slots.give_back(0.1)
    await asyncio.gather(slots.take(), slots.take())


async def test_a_waiter_is_refused_once_others_took_too_much_cpu_time() -> None:
    slots = CompileSlots(2, PATIENCE)
    waiters = await queued(slots, 6)
    for _ in range(2):
        slots.give_back(PATIENCE)
    assert await served(waiters) == [0, 1, 2, 3]
    slots.give_back(0.1)
    assert await served(waiters) == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ServiceError) as refused:
        await waiters[5]
    assert refused.value.reason == "TOO_MANY_COMPILES"
    assert refused.value.retry_seconds == PATIENCE
    assert waiters[4].exception() is None


async def test_cpu_time_before_arrival_does_not_count() -> None:
    slots = CompileSlots(1, PATIENCE)
    await slots.take()
    for _ in range(3):
        [waiter] = await queued(slots, 1)
        slots.give_back(2 * PATIENCE)
        await waiter


async def test_a_cancelled_waiter_passes_its_slot_on() -> None:
    """It may be cancelled before it gets a slot or in the same turn."""
    slots = CompileSlots(1, PATIENCE)
    await slots.take()
    early, late, last = await queued(slots, 3)
    early.cancel()
    await asyncio.wait([early])
    slots.give_back(0.1)
    late.cancel()
    await last
    assert late.cancelled()
