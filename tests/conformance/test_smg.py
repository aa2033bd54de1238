"""Two Tokenwire stacks behind smg, which does the HTTP, the chat templates and the routing."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from tests.conformance.gateway import CHAT, WEATHER, Gateway, running_gateway, running_workers
from tokenwire.client import Client
from tokenwire.messages import Message

SAID = Message(role="user", content=CHAT[0]["content"])
FLAGS = (
    *("launch", "--policy", "cache_aware", "--log-level", "info"),
    *("--worker-startup-check-interval", "1", "--retry-initial-backoff-ms", "50"),
)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def smg(
    embedded_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    logs = tmp_path_factory.mktemp("smg")
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        workers = await enter(running_workers(embedded_model, logs, count=2))
        log = logs / "smg.log"
        gateway = await enter(running_gateway("smg", FLAGS, workers, embedded_model, log))
        while await count_ready(gateway) < len(workers):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.1)
        yield gateway


async def count_ready(gateway: Gateway) -> int:
    workers = (await gateway.http.get("/workers")).json()["workers"]
    return sum(worker["status"] == "ready" for worker in workers)


async def test_chat_is_what_tokenwire_answers_itself(smg: Gateway) -> None:
    await smg.check_chat()


async def test_stream_ends_with_the_usage(smg: Gateway) -> None:
    options = {"include_usage": True}
    _, usage = await smg.stream_chat(temperature=0, max_tokens=12, stream_options=options)
    assert usage["completion_tokens"] == 12


async def test_several_choices_each_have_their_tokens(smg: Gateway) -> None:
    answer = await smg.post("/v1/chat/completions", messages=CHAT, temperature=0, max_tokens=5, n=3)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(texts) == 3
    assert len(set(texts)) == 1
    assert answer["usage"]["completion_tokens"] == 15


async def test_stop_string_ends_the_text(smg: Gateway) -> None:
    body = {"prompt": "def add(a, b):\n", "temperature": 0, "max_tokens": 40}
    free = (await smg.post("/v1/completions", **body))["choices"][0]["text"]
    stop = free[len(free) // 2 : len(free) // 2 + 3]
    [choice] = (await smg.post("/v1/completions", **body, stop=[stop]))["choices"]
    assert choice["text"] == free[: free.index(stop)]
    assert choice["finish_reason"] == "stop"


async def test_logprobs_are_those_of_the_model(smg: Gateway) -> None:
    answer = await smg.post(
        "/v1/chat/completions",
        messages=CHAT,
        temperature=0,
        max_tokens=4,
        logprobs=True,
        top_logprobs=3,
    )
    async with Client(smg.workers[0].tokenizer.target) as client:
        expected = await client.generate([SAID], temperature=0, max_tokens=4, logprobs=3)
    shown = answer["choices"][0]["logprobs"]["content"]
    scores = expected.choices[0].scores
    assert scores is not None
    assert [each["token"].encode() for each in shown] == [*scores.data]
    assert [each["logprob"] for each in shown] == pytest.approx(scores.logprobs, abs=1e-4)
    assert all(len(each["top_logprobs"]) == 3 for each in shown)


async def test_answer_follows_a_schema(smg: Gateway) -> None:
    schema = {"name": "weather", "schema": WEATHER, "strict": True}
    answer = await smg.post(
        "/v1/chat/completions",
        messages=CHAT,
        max_tokens=100,
        seed=1,
        response_format={"type": "json_schema", "json_schema": schema},
    )
    value = json.loads(answer["choices"][0]["message"]["content"])
    assert list(value) == ["city"]
    assert len(value["city"]) <= 8


async def test_forced_tool_is_called_with_valid_arguments(smg: Gateway) -> None:
    function = {"name": "weather", "parameters": WEATHER}
    answer = await smg.post(
        "/v1/chat/completions",
        messages=CHAT,
        max_tokens=100,
        temperature=0,
        tools=[{"type": "function", "function": function}],
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )
    [call] = answer["choices"][0]["message"]["tool_calls"]
    call = call["function"]
    assert call["name"] == "weather"
    assert list(json.loads(call["arguments"])) == ["city"]


async def test_responses_and_messages_answer(smg: Gateway) -> None:
    response = await smg.post(
        "/v1/responses", input=CHAT[0]["content"], max_output_tokens=6, temperature=0
    )
    message = await smg.post("/v1/messages", messages=CHAT, max_tokens=6, temperature=0)
    chat = await smg.post("/v1/chat/completions", messages=CHAT, max_tokens=6, temperature=0)
    expected = chat["choices"][0]["message"]["content"]
    assert response["output"][0]["content"][0]["text"] == expected
    assert message["content"][0]["text"] == expected
    assert message["stop_reason"] == "max_tokens"


async def test_invalid_request_is_refused_with_its_field(smg: Gateway) -> None:
    body = {"model": smg.model, "messages": CHAT, "max_tokens": 4, "top_k": 5_000}
    answer = await smg.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "top_k" in answer.text


async def test_later_turns_find_what_the_first_computed(smg: Gateway) -> None:
    async def converse(number: int) -> list[int]:
        said = [{"role": "user", "content": f"{number}: " + "Explain this loop. " * 20}]
        cached = []
        for _ in range(3):
            answer = await smg.post(
                "/v1/chat/completions", messages=said, temperature=0, max_tokens=8
            )
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            said.append({"role": "assistant", "content": "It adds numbers."})
            said.append({"role": "user", "content": "And then?"})
        return cached

    conversations = await asyncio.gather(*(converse(number) for number in range(6)))
    # smg moves a turn to the other worker while one has more to do
    assert all(second or third for _, second, third in conversations), conversations


async def test_client_that_leaves_frees_its_blocks(smg: Gateway) -> None:
    await smg.leave_early("/v1/completions", prompt="x = 1", ignore_eos=True)


async def test_requests_go_on_when_a_worker_is_killed(smg: Gateway) -> None:
    """The last test: the worker stays dead."""
    lost = smg.workers[0].tokenizer.process
    lost.kill()
    await lost.wait()
    answers = await asyncio.gather(
        *(smg.post("/v1/completions", prompt=f"{number} = ", max_tokens=4) for number in range(12))
    )
    assert all(answer["usage"]["completion_tokens"] for answer in answers)
