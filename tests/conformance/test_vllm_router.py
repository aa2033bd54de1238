"""Two Tokenwire stacks behind vllm-router, which renders the chats and balances."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from tests.conformance.gateway import CHAT, WEATHER, Gateway, running_gateway, running_workers

FLAGS = ("--policy", "cache_aware", "--retry-initial-backoff-ms", "50")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def router(
    embedded_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    logs = tmp_path_factory.mktemp("router")
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        workers = await enter(running_workers(embedded_model, logs, count=2))
        module, log = "vllm_router.launch_router", logs / "router.log"
        yield await enter(running_gateway(module, FLAGS, workers, embedded_model, log))


async def test_chat_is_what_tokenwire_answers_itself(router: Gateway) -> None:
    await router.check_chat()


async def test_stop_string_ends_the_text(router: Gateway) -> None:
    body = {"messages": CHAT, "temperature": 0, "max_tokens": 24}
    free = (await router.post("/v1/chat/completions", **body))["choices"][0]["message"]["content"]
    stop = free[len(free) // 2 : len(free) // 2 + 3]
    [choice] = (await router.post("/v1/chat/completions", **body, stop=[stop]))["choices"]
    assert choice["message"]["content"] == free[: free.index(stop)]
    assert choice["finish_reason"] == "stop"


async def test_answer_follows_a_schema(router: Gateway) -> None:
    answer = await router.post(
        "/v1/chat/completions",
        messages=CHAT,
        max_tokens=100,
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": WEATHER}},
    )
    assert list(json.loads(answer["choices"][0]["message"]["content"])) == ["city"]


async def test_invalid_request_is_refused_with_its_field(router: Gateway) -> None:
    body = {"model": router.model, "messages": CHAT, "max_tokens": 4, "top_k": 5_000}
    answer = await router.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "top_k" in answer.text


async def test_client_that_leaves_frees_its_blocks(router: Gateway) -> None:
    await router.leave_early("/v1/chat/completions", messages=CHAT, ignore_eos=True)


async def test_requests_go_on_when_a_worker_is_killed(router: Gateway) -> None:
    """The last test: the worker stays dead."""
    lost = router.workers[0].tokenizer.process
    lost.kill()
    await lost.wait()
    answers = await asyncio.gather(
        *(
            router.post(
                "/v1/chat/completions",
                messages=[{"role": "user", "content": f"{number} = "}],
                max_tokens=4,
            )
            for number in range(12)
        )
    )
    assert all(answer["usage"]["completion_tokens"] for answer in answers)
