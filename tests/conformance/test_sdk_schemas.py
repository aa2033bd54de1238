"""Schemas made by pydantic and LangChain: answers that follow them, and ignored keywords."""

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from pydantic import BaseModel, IPvAnyAddress, SecretStr

from tests.stack import Stack
from tokenwire.client import Client, GrammarSpec, Message, Tool, ToolChoice


class Account(BaseModel):
    """An account with pydantic's special types."""

    password: SecretStr
    home: Path
    token: bytes
    seen: datetime
    address: IPvAnyAddress


SCHEMA: dict[str, Any] = Account.model_json_schema()
for _property in SCHEMA["properties"].values():
    _property["maxLength"] = 30  # bounds the answer
IGNORED = [f"properties.{name}.format" for name in ("password", "home", "token", "address")]
# The result of LangChain's convert_to_openai_function for an OpenAPI operation.
FUNCTION: dict[str, Any] = {
    "name": "list_pets",
    "description": "List pets.",
    "parameters": {
        "type": "object",
        "properties": {
            "limit": {"type": "integer", "format": "int32", "minimum": 0, "maximum": 99},
            "price": {"type": "number", "format": "double", "minimum": 0, "maximum": 9},
            "since": {"type": "string", "format": "date-time"},
        },
        "required": ["limit", "price", "since"],
    },
}
OF_TOOL = "tools[0].function.parameters.properties."
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
CONSTRAINTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "response_format": (
        {"response_format": FORMAT},
        [f"response_format.json_schema.schema.{path}" for path in IGNORED],
    ),
    "json_object": (
        {"extra_body": {"response_format": {"type": "json_object", "schema": SCHEMA}}},
        [f"response_format.schema.{path}" for path in IGNORED],
    ),
    "grammar": (
        {"extra_body": {"grammar": {"type": "json_schema", "value": SCHEMA}}},
        [f"grammar.value.{path}" for path in IGNORED],
    ),
    "llguidance": (
        {"extra_body": {"grammar": {"type": "llguidance",
                                    "value": {"grammars": [{"json_schema": SCHEMA}]}}}},
        [f"grammar.value.grammars[0].json_schema.{path}" for path in IGNORED],
    ),
    "required tools": (
        {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
        [f"{OF_TOOL}limit.format", f"{OF_TOOL}price.format"],
    ),
    "strict tools": (
        {"tools": [{"type": "function", "function": FUNCTION | {"strict": True}}]},
        [f"{OF_TOOL}limit.format", f"{OF_TOOL}price.format"],
    ),
    "free tools": ({"tools": [{"type": "function", "function": FUNCTION}]}, []),
}  # fmt: skip


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def named_in(headers: Any) -> list[str]:
    header = headers.get("x-tokenwire-ignored")
    return header.split(", ") if header else []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_chat_header_names_the_ignored_keywords(client: OpenAI, name: str, stream: bool) -> None:
    fields, ignored = CONSTRAINTS[name]
    raw = client.chat.completions.with_raw_response.create(
        model="default", messages=[{"role": "user", "content": "Go."}], max_tokens=8, stream=stream,
        **fields,
    )  # fmt: skip
    assert named_in(raw.headers) == ignored


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_completion_header_names_the_ignored_keywords(
    client: OpenAI, name: str, stream: bool
) -> None:
    fields, ignored = CONSTRAINTS[name]
    body = {key: value for key, value in fields.items() if key != "extra_body"}
    raw = client.completions.with_raw_response.create(
        model="default", prompt="a", max_tokens=8, stream=stream,
        extra_body=body | fields.get("extra_body", {}),
    )  # fmt: skip
    assert named_in(raw.headers) == ignored


def test_answer_validates_with_the_pydantic_model(client: OpenAI) -> None:
    schema = {**SCHEMA, "properties": {**SCHEMA["properties"], "address": {"const": "::1"}}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for seed in range(4):
        answer = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "Go."}],
            response_format=form,
            seed=seed,
        )
        Account.model_validate_json(answer.choices[0].message.content or "")


def test_tool_call_arguments_follow_the_function_of_langchain(client: OpenAI) -> None:
    tools: Any = [{"type": "function", "function": FUNCTION | {"strict": True}}]
    for seed in range(4):
        answer = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "Which pets?"}],
            tools=tools,
            tool_choice="required",
            parallel_tool_calls=False,
            seed=seed,
        )
        [call] = answer.choices[0].message.tool_calls or []
        arguments = json.loads(call.function.arguments)  # type: ignore[union-attr]
        assert 0 <= arguments["limit"] <= 99
        assert datetime.fromisoformat(arguments["since"].upper())


async def test_grpc_answers_name_the_ignored_keywords_by_their_fields(stack: Stack) -> None:
    grammar = GrammarSpec(json_schema=json.dumps(SCHEMA))
    named = ToolChoice(name="list_pets")
    parameters = json.dumps(FUNCTION["parameters"])
    tools = [Tool(name="other", parameters_json=parameters),
             Tool(name="list_pets", parameters_json=parameters)]  # fmt: skip
    of_tool = [f"tools[1].parameters_json.properties.{n}.format" for n in ("limit", "price")]
    async with Client(stack.tokenizer) as client:
        free = await client.generate("a", max_tokens=1)
        complete = await client.generate("a", grammar=grammar, max_tokens=1)
        chat = await client.generate(Message("user", "a"), grammar=grammar, max_tokens=1)
        called = await client.generate(
            Message("user", "a"), tools=tools, tool_choice=named, max_tokens=1
        )
        forced = await client.generate("a", tools=tools, tool_choice=named, max_tokens=1)
    assert free.ignored == ()
    assert list(complete.ignored) == [f"grammar.json_schema.{path}" for path in IGNORED]
    assert chat.ignored == complete.ignored
    assert list(called.ignored) == list(forced.ignored) == of_tool
