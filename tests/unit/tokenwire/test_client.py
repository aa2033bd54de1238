"""How options become requests, and what is refused before anything is sent."""

import pytest

from tokenwire.client import Client, EngineClient, GrammarSpec
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


async def test_a_misspelt_option_is_an_error() -> None:
    """An option that nobody reads would be a lie."""
    async with Client(NOWHERE) as client, EngineClient(NOWHERE) as engine:
        with pytest.raises(ValueError, match="max_token"):
            await client.complete("x", max_token=3)  # type: ignore[call-arg]
        with pytest.raises(ValueError, match="suffix"):
            await engine.generate([1], suffix="x")  # type: ignore[call-arg]
        with pytest.raises(TypeError):
            await client.complete("x", grammar=GrammarSpec(regex=3))  # type: ignore[arg-type]
