"""Responses in the background through OpenAI's SDK for Python: read, streamed, cancelled, lost."""

import asyncio
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response

from tests.conformance.test_sdk_responses import BASE, without_ids
from tests.services.shim import shim_with_jobs
from tests.stack import Stack


def numbers(count: int) -> dict[str, Any]:
    """Return a request for an array of `count` numbers, each of some tokens."""
    schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": count, "maxItems": count}
    return BASE | {
        "text": {"format": {"type": "json_schema", "name": "numbers", "schema": schema}},
        "max_output_tokens": 3 * count,
        "background": True,
    }


ENDLESS = numbers(600)
"""A request whose answer takes some seconds"""


@pytest.fixture
def client(stack: Stack) -> OpenAI:
    return client_of(stack.url)


def client_of(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def begun(client: OpenAI, **fields: Any) -> Response:
    """Start an endless response."""
    response: Response = client.responses.create(**ENDLESS | fields)
    return response


def streamed(client: OpenAI, fields: dict[str, Any]) -> Iterator[Any]:
    return iter(client.responses.create(**fields | {"background": True, "stream": True}))


def ended(client: OpenAI, identity: str) -> Response:
    """Ask for a response until it has ended, as clients do."""
    while (response := client.responses.retrieve(identity)).status in ("queued", "in_progress"):
        pass
    return response


def dumped(events: Iterator[Any]) -> list[dict[str, Any]]:
    return [event.model_dump() for event in events]


def test_response_in_the_background_is_queued_and_ends_as_any_other(client: OpenAI) -> None:
    queued = client.responses.create(**BASE, background=True)
    assert (queued.status, queued.background, queued.output) == ("queued", True, [])
    whole = without_ids(client.responses.create(**BASE))
    assert without_ids(ended(client, queued.id)) == whole | {"background": True}


def test_stream_goes_on_without_its_client_and_is_read_from_any_event_on(client: OpenAI) -> None:
    stream = client.responses.create(**numbers(200) | {"stream": True})
    seen = dumped(islice(iter(stream), 6))
    stream.close()
    identity, last = seen[0]["response"]["id"], seen[-1]["sequence_number"]
    rest = dumped(client.responses.retrieve(identity, stream=True, starting_after=last))
    replayed = dumped(client.responses.retrieve(identity, stream=True))
    assert replayed == seen + rest
    kinds = [event["type"] for event in replayed]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert [event["sequence_number"] for event in replayed] == [*range(len(replayed))]
    kept = client.responses.retrieve(identity)
    assert kinds[-1] == f"response.{kept.status}"
    text = "".join(each["delta"] for each in replayed if each["type"].endswith("text.delta"))
    assert text == kept.output_text


def test_cancelled_response_keeps_the_output_it_had(client: OpenAI) -> None:
    stream = streamed(client, ENDLESS)
    seen = dumped(islice(stream, 8))
    identity = seen[0]["response"]["id"]
    cancelled = client.responses.cancel(identity)
    assert cancelled.status == "cancelled"
    assert cancelled.output_text
    assert next(reversed(dumped(stream)))["type"] == "response.cancelled"
    assert client.responses.retrieve(identity) == cancelled
    assert client.responses.cancel(identity) == cancelled


def test_cancel_of_an_ended_response_returns_it(client: OpenAI) -> None:
    response = ended(client, client.responses.create(**BASE, background=True).id)
    assert client.responses.cancel(response.id) == response


def test_deleted_response_ends(client: OpenAI) -> None:
    stream = streamed(client, ENDLESS)
    first = next(stream)
    client.responses.delete(first.response.id)
    assert dumped(stream)[-1]["type"] == "response.cancelled"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.response.id, stream=True)


def test_running_response_is_not_continued(client: OpenAI) -> None:
    running = begun(client)
    assert client.responses.input_items.list(running.id).data
    with pytest.raises(openai.BadRequestError, match="not complete") as caught:
        client.responses.create(**BASE, previous_response_id=running.id)
    assert caught.value.param == "previous_response_id"
    cancelled = client.responses.cancel(running.id)
    client.responses.create(**BASE, previous_response_id=cancelled.id)


@pytest.mark.parametrize("stream", [False, True])
def test_wrong_input_is_refused_before_it_is_queued(client: OpenAI, stream: bool) -> None:
    for fields, param in (({"store": False}, "background"), ({"temperature": 9.0}, "temperature")):
        with pytest.raises(openai.BadRequestError) as caught:
            begun(client, stream=stream, **fields)
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"starting_after": "x", "stream": "true"}, "starting_after"),
        ({"starting_after": "1000000", "stream": "true"}, "starting_after"),
        ({"starting_after": "9" * 5000, "stream": "true"}, "starting_after"),
        ({"starting_after": "1"}, "starting_after"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_wrong_places_in_a_stream_are_refused(
    client: OpenAI, query: dict[str, str], param: str
) -> None:
    *_, last = streamed(client, BASE)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.retrieve(last.response.id, extra_query=query)
    assert caught.value.param == param


def test_response_that_was_not_streamed_has_no_events(client: OpenAI) -> None:
    response = client.responses.create(**BASE, background=True)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.retrieve(response.id, stream=True)
    assert caught.value.param == "stream"


async def test_too_many_responses_in_the_background_are_refused(stack: Stack) -> None:
    async with shim_with_jobs(stack.tokenizer, "--max-background", "1") as (shim, _):
        client = client_of(shim.url)
        running = begun(client)
        with pytest.raises(openai.RateLimitError) as caught:
            begun(client)
        assert caught.value.code == "too_many_background"
        client.responses.cancel(running.id)
        client.responses.cancel(begun(client).id)


async def test_dropped_events_are_refused_and_the_response_is_whole(stack: Stack) -> None:
    async with shim_with_jobs(stack.tokenizer, "--max-event-bytes", "5000") as (shim, _):
        client = client_of(shim.url)
        stream = client.responses.create(**numbers(60) | {"stream": True})
        first = next(iter(stream))
        stream.close()
        whole = await asyncio.to_thread(ended, client, first.response.id)
        assert whole.output_text
        with pytest.raises(openai.BadRequestError, match="no longer") as caught:
            client.responses.retrieve(whole.id, stream=True)
        assert caught.value.param == "starting_after"


async def test_response_that_a_lost_server_ran_is_failed(stack: Stack, tmp_path: Path) -> None:
    flags = ("--response-store", str(tmp_path / "store.sqlite"))
    async with shim_with_jobs(stack.tokenizer, *flags) as (shim, jobs):
        running = begun(client_of(shim.url))
        jobs.process.kill()
        await jobs.process.wait()
    async with shim_with_jobs(stack.tokenizer, *flags) as (shim, _):
        client = client_of(shim.url)
        failed = client.responses.retrieve(running.id)
        assert failed.status == "failed"
        assert failed.error is not None
        assert failed.error.code == "server_error"
        assert client.responses.cancel(running.id) == failed


async def test_stopping_server_lets_responses_fail(stack: Stack, tmp_path: Path) -> None:
    store = ("--response-store", str(tmp_path / "store.sqlite"))
    flags = (*store, "--grace", "0")
    async with shim_with_jobs(stack.tokenizer, *flags) as (shim, _):
        running = begun(client_of(shim.url))
    async with shim_with_jobs(stack.tokenizer, *flags) as (shim, _):
        failed = client_of(shim.url).responses.retrieve(running.id)
        assert failed.status == "failed"
        assert failed.error is not None
        assert "stopped" in failed.error.message
