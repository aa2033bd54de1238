"""Requests that coding agents and litellm sent, and OpenAI's Agents SDK.

The files in requests/ keep the shape of what Codex 0.171 and Claude Code 2.1 sent for one question.
Their texts are replaced by others of the same length. litellm's are unchanged: messages, sent by
each of its providers, and responses.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

from tests.stack import Stack, served_stack

REQUESTS = Path(__file__).parent / "requests"
LITELLM = json.loads((REQUESTS / "litellm.json").read_text())
"""Paths and bodies that litellm 1.110 sends"""
LENGTH = re.compile(r"text of (\d+)")


@pytest.fixture(scope="module")
def small_prompts(
    embedded_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """A stack whose template drops all but the end of a conversation: agents' prompts are long."""
    template = REQUESTS / "last-message.jinja"
    logs = tmp_path_factory.mktemp("logs")
    with served_stack(embedded_model, logs, "--chat-template", str(template)) as stack:
        yield stack


def recorded(name: str, **fields: object) -> dict[str, Any]:
    """Return a recorded request whose texts have their length again."""

    def lengthened(value: Any) -> Any:
        if isinstance(value, str) and (match := LENGTH.fullmatch(value)):
            return ("some words " * int(match[1]))[: int(match[1])]
        if isinstance(value, list):
            return list(map(lengthened, value))
        if isinstance(value, dict):
            return {key: lengthened(each) for key, each in value.items()}
        return value

    request = lengthened(json.loads((REQUESTS / f"{name}.json").read_text()))
    assert isinstance(request, dict)
    return request | fields


def events(stream: str) -> list[str]:
    return [line.removeprefix("event: ") for line in stream.splitlines() if line[:6] == "event:"]


def test_codex_is_answered(small_prompts: Stack) -> None:
    """Tools that OpenAI runs and encrypted reasoning have no effect, and are named."""
    request = recorded("codex", max_output_tokens=8)
    answer = httpx.post(f"{small_prompts.url}/v1/responses", json=request, timeout=60)
    assert answer.status_code == 200, answer.text
    sent = events(answer.text)
    assert sent[0] == "response.created"
    assert sent[-1] in ("response.completed", "response.incomplete")
    ignored = answer.headers["x-tokenwire-ignored"].split(", ")
    kinds = [tool["type"] for tool in request["tools"]]
    others = [f"tools[{place}]" for place, kind in enumerate(kinds) if kind != "function"]
    assert len(others) == 2
    assert {*others, "include[0]", "reasoning.summary"} <= set(ignored)
    assert not [path for path in ignored if path.startswith("tools") and path not in others]


def test_claude_code_is_answered(small_prompts: Stack) -> None:
    """80 kB of tools; a forced call compiles all their schemas."""
    headers = {"x-api-key": "none", "anthropic-version": "2023-06-01"}
    for choice in ({"type": "auto"}, {"type": "any"}):
        request = recorded("claude-code", max_tokens=40, tool_choice=choice)
        assert len(json.dumps(request)) > 60_000
        answer = httpx.post(
            f"{small_prompts.url}/v1/messages?beta=true",
            json=request,
            headers=headers,
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        sent = events(answer.text)
        assert sent[0] == "message_start"
        assert sent[-1] == "message_stop"
        assert ("tool_use" in answer.text) or choice["type"] == "auto"


@pytest.mark.parametrize("place", range(len(LITELLM)))
def test_litellm_is_answered(stack: Stack, place: int) -> None:
    """Its messages over each of our APIs, and its responses."""
    path, body = LITELLM[place]["path"], LITELLM[place]["body"]
    answer = httpx.post(f"{stack.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    ignored = answer.headers.get("x-tokenwire-ignored")
    encrypted, summary = "include" in body, "summary" in body.get("reasoning", {})
    expected = "include[0]" if encrypted else "reasoning.summary" if summary else None
    assert ignored == expected
    if body.get("tool_choice") and not body.get("stream"):
        assert "get_weather" in answer.text


class _Answer(BaseModel):
    number: int
    is_sure: bool


@pytest.mark.parametrize("kind", [OpenAIResponsesModel, OpenAIChatCompletionsModel])
async def test_agents_sdk_runs_agents(
    stack: Stack, kind: type[OpenAIResponsesModel | OpenAIChatCompletionsModel]
) -> None:
    """Whole and streamed answers, calls of functions, sessions, answers of a type."""
    set_tracing_disabled(True)
    asked: list[str] = []

    @function_tool
    def get_weather(city: str) -> str:
        """Return the weather of a city."""
        asked.append(city)
        return "sunny"

    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
        model = kind(model=stack.model_id, openai_client=client)
        greedy = ModelSettings(max_tokens=400, temperature=0)
        agent = Agent(name="one", instructions="Help.", model=model, model_settings=greedy)
        whole = await Runner.run(agent, "Hello")
        streamed = Runner.run_streamed(agent, "Hello")
        kinds = [event.type async for event in streamed.stream_events()]
        assert "raw_response_event" in kinds
        assert streamed.final_output == whole.final_output != ""

        settings = ModelSettings(max_tokens=400, temperature=0, tool_choice="get_weather")
        with_tool = Agent(name="two", model=model, tools=[get_weather], model_settings=settings)
        called = await Runner.run(with_tool, "The weather in Bern?", max_turns=3)
        assert len(asked) == 1
        items = [item.type for item in called.new_items]
        assert items == ["tool_call_item", "tool_call_output_item", "message_output_item"]

        session = SQLiteSession("user")
        for question in ("Hello", "Who are you?"):
            await Runner.run(agent, question, session=session)
        roles = [item.get("role") for item in await session.get_items()]
        assert roles == ["user", "assistant"] * 2

        typed = Agent(
            name="three",
            model=model,
            output_type=_Answer,
            model_settings=ModelSettings(max_tokens=80),
        )
        assert isinstance((await Runner.run(typed, "Give.")).final_output, _Answer)
