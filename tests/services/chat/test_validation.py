"""Validation of chats: each field that is refused, and large requests."""

import json

import grpc

from tests.services.chat.chat_client import GREEDY, REQUIRED, Services, says, tool, user
from tokenwire.pb.completion.v1 import completion_pb2 as completion
from tokenwire.pb.types.v1 import types_pb2 as types


async def test_invalid_chat_is_refused_with_the_field_to_blame(services: Services) -> None:
    hello = user("Hello!")
    call = completion.ToolCall(id="c", name="f", arguments_json="{" + " " * 2**20)
    bounded = {"type": "object", "properties": {"a": {"unevaluatedItems": False}}}
    bad: list[tuple[str, list[completion.Message], dict[str, object]]] = [
        ("conversation.messages", [], {}),
        ("conversation.messages[0].role", [says(completion.ROLE_UNSPECIFIED, "a")], {}),
        (
            "conversation.messages[1].parts",
            [hello, completion.Message(role=completion.ROLE_USER)],
            {},
        ),
        ("conversation.messages[0].tool_call_id", [says(completion.ROLE_TOOL, "a")], {}),
        (
            "conversation.messages[0].tool_calls[0].arguments_json",
            [completion.Message(role=completion.ROLE_ASSISTANT, tool_calls=[call])],
            {},
        ),
        (
            "conversation.messages[0].parts[1].image",
            [
                completion.Message(
                    role=completion.ROLE_USER,
                    parts=[
                        completion.ContentPart(text="a"),
                        completion.ContentPart(image=b"GIF89a"),
                    ],
                )
            ],
            {},
        ),
        ("tools", [hello], {"tools": [tool(f"f{place}") for place in range(129)]}),
        ("tools[0].name", [hello], {"tools": [tool("a b")]}),
        ("tools[0].name", [hello], {"tools": [tool("a" * 129)]}),
        (
            "tool_choice",
            [hello],
            {"tools": [tool()], "tool_choice": completion.ToolChoice(name="x")},
        ),
        ("tool_choice", [hello], {"tool_choice": REQUIRED}),
        (
            "tools[1].parameters_json",
            [hello],
            {"tools": [tool(), tool("f", bounded, strict=True)], "tool_choice": REQUIRED},
        ),
        ("tools[0].parameters_json", [hello], {"tools": [tool("f", bounded, strict=True)]}),
        ("conversation.template", [hello], {"template": "nope"}),
        ("conversation.template_arguments_json", [hello], {"template_arguments_json": "[]"}),
        (
            "conversation.template_arguments_json",
            [hello],
            {"template_arguments_json": '{"messages": []}'},
        ),
        ("conversation.continue_last_message", [hello], {"continue_last_message": True}),
        (
            "conversation.add_generation_prompt",
            [hello, says(completion.ROLE_ASSISTANT, "a")],
            {"continue_last_message": True, "add_generation_prompt": True},
        ),
        ("logprobs", [hello], {"logprobs": 21}),
        ("n", [hello], {"n": 0}),
        ("stopping.max_tokens", [hello], {"stopping": types.StoppingParams(max_tokens=0)}),
        ("sampling.top_p", [hello], {"sampling": types.SamplingParams(top_p=2)}),
        ("grammar.regex", [hello], {"grammar": types.GrammarSpec(regex="[")}),
        ("model", [hello], {"model": "nope"}),
        ("conversation.messages", [user("long " * 3_000)], {}),
    ]
    for path, messages, fields in bad:
        error = await services.refused(*messages, **fields)
        assert error.field == path, error
        assert error.code in (
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.NOT_FOUND,
            grpc.StatusCode.OUT_OF_RANGE,
        )
    none = await services.refused(hello, stopping=types.StoppingParams(max_tokens=0))
    assert "echo" not in none.message, "only completions have it"
    assert (await services.chat(hello, sampling=GREEDY)).message.content


async def test_large_chat_is_validated_like_a_small_one(services: Services) -> None:
    """The service refuses a prompt that is too long before it encodes all of it."""
    hello, long = user("Hello!"), user("long " * 30_000)
    padding = {"template_arguments_json": json.dumps({"unused": "x" * 20_000})}
    error = await services.refused(long)
    assert (error.code, error.field) == (grpc.StatusCode.OUT_OF_RANGE, "conversation.messages")
    assert "The prompt has at least " in error.message
    call = completion.ToolCall(id="c", name="f", arguments_json="{" + " " * 2**20)
    huge = {"type": "object", "properties": {"a": {"description": "x" * 2**20}}}
    bad: list[tuple[str, list[completion.Message], dict[str, object]]] = [
        (
            "conversation.messages[0].tool_calls[0].arguments_json",
            [completion.Message(role=completion.ROLE_ASSISTANT, tool_calls=[call])],
            {},
        ),
        ("logprobs", [hello], {"logprobs": 21, **padding}),
        ("model", [hello], {"model": "nope", **padding}),
        (
            "conversation.template_arguments_json",
            [hello],
            {"template_arguments_json": " " * 70_000},
        ),
        ("tools", [hello], {"tools": [tool(schema=huge)]}),
    ]
    for path, messages, fields in bad:
        error = await services.refused(*messages, **fields)
        assert error.field == path, error
    plain = await services.chat(hello, sampling=GREEDY, logprobs=20)
    padded = await services.chat(hello, sampling=GREEDY, logprobs=20, **padding)
    assert padded.message.content == plain.message.content != ""
