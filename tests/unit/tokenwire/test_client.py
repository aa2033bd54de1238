"""Client: requests from options, and refusals before anything is sent."""

import asyncio
from typing import Any

import pytest

from tokenwire.client import Client, EngineClient, GrammarSpec, Message
from tokenwire.errors import ServiceError

NOWHERE = "127.0.0.1:1"


async def test_missing_server_raises_service_error() -> None:
    async with Client(NOWHERE) as client:
        with pytest.raises(ServiceError) as refused:
            await client.generate("x")
        assert refused.value.code.name == "UNAVAILABLE"
        assert refused.value.retry_seconds is not None
        with pytest.raises(ServiceError):
            await client.encode("x")


async def test_closed_client_refuses_requests() -> None:
    """A call to a closed client must not wait forever."""
    client, engine = Client(NOWHERE), EngineClient(NOWHERE)
    await client.aclose()
    await engine.aclose()
    calls = (
        client.generate("x"),
        client.generate(Message("user", "x")),
        client.encode("x"),
        engine.generate([1]),
    )
    for call in (*calls, engine.load()):
        with pytest.raises(ServiceError, match="closed") as refused:
            await asyncio.wait_for(call, 30)
        assert refused.value.code.name == "UNAVAILABLE"


async def test_closing_a_client_ends_a_stream_that_has_not_connected() -> None:
    client = Client(NOWHERE)
    stream = client.stream("x")  # the task that connects has not run yet
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
async def test_value_out_of_a_fields_range_names_the_field(
    options: dict[str, Any], field: str
) -> None:
    """The error is that of the server for a value which the field can hold."""
    async with Client(NOWHERE) as client:
        for given in ("x", Message("user", "x")):
            with pytest.raises(ServiceError) as refused:
                await client.generate(given, **options)
            assert refused.value.code.name == "INVALID_ARGUMENT"
            assert refused.value.field == field
            assert field in refused.value.message


async def test_texts_and_ids_that_protobuf_cannot_hold_are_refused() -> None:
    text = "\udcff"  # Python's form of a byte that is not UTF-8
    async with Client(NOWHERE) as client, EngineClient(NOWHERE) as engine:
        for call, field in (
            (client.generate(text), "prompts.items[0].text"),
            (client.generate([1, -1]), "prompts.items[0].token_ids.ids"),
            (
                client.generate([Message("user", "x"), Message("user", text)]),
                "conversation.messages[1]",
            ),
            (client.encode(text), "texts"),
            (client.decode([2**40]), "sequences.ids"),
            (engine.generate([1, 2**40]), "prompts.ids"),
            (engine.generate([1], n=-1), "n"),
        ):
            with pytest.raises(ServiceError) as refused:
                await call
            assert (refused.value.code.name, refused.value.field) == ("INVALID_ARGUMENT", field)


async def test_misspelt_option_raises() -> None:
    """An option without effect must not be accepted."""
    async with Client(NOWHERE) as client, EngineClient(NOWHERE) as engine:
        with pytest.raises(ValueError, match="max_token"):
            await client.generate("x", max_token=3)  # type: ignore[call-arg]
        with pytest.raises(ValueError, match="suffix"):
            await engine.generate([1], suffix="x")  # type: ignore[call-arg]
        with pytest.raises(TypeError):
            await client.generate("x", grammar=GrammarSpec(regex=3))  # type: ignore[arg-type]
