"""How options become requests, and what is refused before anything is sent."""

import asyncio
from typing import Any

import pytest

from tokenwire.client import Client, EngineClient, GrammarSpec, Message
from tokenwire.errors import ServiceError

NOWHERE = "127.0.0.1:1"


async def test_a_server_that_is_not_there_is_a_service_error() -> None:
    async with Client(NOWHERE) as client:
        with pytest.raises(ServiceError) as refused:
            await client.complete("x")
        assert refused.value.code.name == "UNAVAILABLE"
        assert refused.value.retry_seconds is not None
        with pytest.raises(ServiceError):
            await client.encode("x")


async def test_a_closed_client_says_so() -> None:
    """It must not keep whoever asks it waiting for ever."""
    client, engine = Client(NOWHERE), EngineClient(NOWHERE)
    await client.aclose()
    await engine.aclose()
    every = (client.complete("x"), client.chat("x"), client.encode("x"), engine.generate([1]))
    for asked in (*every, engine.load()):
        with pytest.raises(ServiceError, match="closed") as refused:
            await asyncio.wait_for(asked, 30)
        assert refused.value.code.name == "UNAVAILABLE"


async def test_closing_a_client_ends_what_it_has_just_begun() -> None:
    client = Client(NOWHERE)
    stream = client.stream("x")  # what opens the connection has had no turn yet
    await client.aclose()
    with pytest.raises(ServiceError) as lost:
        await asyncio.wait_for(anext(stream), 30)
    assert lost.value.reason == "SESSION_LOST"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"n": -1}, "n"),
        ({"max_tokens": -1}, "stopping.max_tokens"),
        ({"seed": 10**20}, "sampling.seed"),
        ({"logit_bias": {-1: 1.0}}, "sampling.logit_bias"),
        ({"priority": 2**40}, "context.priority"),
        ({"stop": ["ok", "\udcff"]}, "stop"),
    ],
)
async def test_a_value_that_no_field_holds_is_named(options: dict[str, Any], field: str) -> None:
    """As the server would say it of one that a field holds."""
    async with Client(NOWHERE) as client:
        for ask in (client.complete, client.chat):
            with pytest.raises(ServiceError) as refused:
                await ask("x", **options)
            assert refused.value.code.name == "INVALID_ARGUMENT"
            assert refused.value.field == field
            assert field in refused.value.message


async def test_texts_and_ids_that_can_not_be_sent_are_refused() -> None:
    text = "\udcff"  # what Python makes of a byte that is no UTF-8
    async with Client(NOWHERE) as client, EngineClient(NOWHERE) as engine:
        for asked, field in (
            (client.complete(text), "prompts.text"),
            (client.complete([1, -1]), "prompts.ids"),
            (client.chat([Message("user", "x"), Message("user", text)]), "messages[1]"),
            (client.encode(text), "texts"),
            (client.decode([2**40]), "sequences.ids"),
            (engine.generate([1, 2**40]), "prompts.ids"),
            (engine.generate([1], n=-1), "n"),
        ):
            with pytest.raises(ServiceError) as refused:
                await asked
            assert (refused.value.code.name, refused.value.field) == ("INVALID_ARGUMENT", field)


async def test_a_misspelt_option_is_an_error() -> None:
    """An option that nobody reads would be a lie."""
    async with Client(NOWHERE) as client, EngineClient(NOWHERE) as engine:
        with pytest.raises(ValueError, match="max_token"):
            await client.complete("x", max_token=3)  # type: ignore[call-arg]
        with pytest.raises(ValueError, match="suffix"):
            await engine.generate([1], suffix="x")  # type: ignore[call-arg]
        with pytest.raises(TypeError):
            await client.complete("x", grammar=GrammarSpec(regex=3))  # type: ignore[arg-type]
