"""Turns go to tenants in fair order, and none is lost with a caller that leaves."""

import asyncio

import pytest

from services.common.sharing.fair_turns import FairTurns


async def test_another_tenant_waits_for_one_turn() -> None:
    turns = FairTurns(1)
    waits = [turns.request(tenant) for tenant in ("a", "a", "a", "b")]
    order = []
    for _ in waits:
        [begun] = [place for place, turn in enumerate(waits) if turn.done() and place not in order]
        order.append(begun)
        turns.give_back()
    assert order == [0, 3, 1, 2]
    async with turns.turn("c"):
        pass


async def test_a_cancelled_caller_passes_its_turn_on() -> None:
    """It may be cancelled before its turn, or as it begins."""
    turns = FairTurns(1)
    first = turns.request("")
    assert first.done()
    early, late, last = (asyncio.ensure_future(turns.wait(turns.request(""))) for _ in range(3))
    await asyncio.sleep(0)
    early.cancel()
    await asyncio.wait([early])
    turns.give_back()
    late.cancel()
    await last
    assert late.cancelled()


async def test_a_refused_turn_is_skipped() -> None:
    turns = FairTurns(1)
    await turns.wait(turns.request(""))
    refused, last = turns.request(""), turns.request("")
    refused.set_exception(ValueError("refused"))
    turns.give_back()
    await turns.wait(last)
    with pytest.raises(ValueError, match="refused"):
        await turns.wait(refused)
