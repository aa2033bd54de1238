"""Tool calls of chats: calls by the model, forced and strict calls, and their schemas."""

import json

import jsonschema
import pytest

from tests.services.chat.chat_client import GREEDY, REQUIRED, WEATHER, Services, says, tool, user
from tokenwire.pb.completion.v1 import completion_pb2 as completion
from tokenwire.pb.tokenizer.v1 import tokenizer_pb2
from tokenwire.pb.types.v1 import types_pb2 as types

NONE = completion.ToolChoice(mode=completion.TOOL_MODE_NONE)


async def test_content_satisfies_its_grammar_with_and_without_tools(services: Services) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}  # fmt: skip
    grammar = types.GrammarSpec(json_schema=json.dumps(schema))
    for tools in ([], [tool()]):
        answer = await services.chat(
            user("Hello!"), grammar=grammar, tools=tools, sampling=GREEDY,
            stopping=types.StoppingParams(max_tokens=200),
        )  # fmt: skip
        message = answer.message
        assert message.reason == ("TOOL_CALLS" if message.calls else "STOP"), message
        if not message.calls:
            jsonschema.validate(json.loads(message.content), schema)


async def test_model_calls_a_tool_and_uses_its_result(services: Services) -> None:
    question = user("What is the weather in Paris?")
    tools = [tool()]
    streamed = await services.chat(question, tools=tools, sampling=GREEDY, logprobs=0)
    whole = await services.chat(
        question, tools=tools, sampling=GREEDY, delivery=completion.DELIVERY_WHOLE
    )
    message = streamed.message
    assert message.called() == whole.message.called()
    [(name, _)] = message.called()
    assert name == "get_weather"
    assert message.content == "" == whole.message.content
    assert message.reason == whole.message.reason == "TOOL_CALLS"
    assert message.scored == []  # none of its tokens is content
    [call] = message.calls
    assert call.id.startswith("call_")
    assert len(call.id) == 29
    assert call.id != whole.message.calls[0].id
    asked = completion.Message(role=completion.ROLE_ASSISTANT, tool_calls=[call])
    told = says(completion.ROLE_TOOL, '{"temperature": 21, "sky": "clear"}', tool_call_id=call.id)
    answer = await services.chat(question, asked, told, tools=tools, sampling=GREEDY)
    assert "21" in answer.message.content
    assert answer.usage.cached_tokens > 0
    hidden = await services.chat(question, tools=tools, tool_choice=NONE, sampling=GREEDY)
    assert hidden.message.calls == []
    assert hidden.message.reason == "STOP"


@pytest.mark.parametrize("seed", range(3))
async def test_forced_and_strict_calls_satisfy_their_schemas(services: Services, seed: int) -> None:
    """Temperature 1 and a prompt that asks for no tool: only the grammar forces the calls."""
    tools = [tool(strict=seed == 1), tool("get_time", None)]
    fields = {
        "sampling": types.SamplingParams(temperature=1, seed=seed),
        "stopping": types.StoppingParams(max_tokens=300),
        "tools": tools,
        "n": 4,
    }
    forced = await services.chat(user("Hello!"), tool_choice=REQUIRED, **fields)
    named = await services.chat(
        user("Hello!"), tool_choice=completion.ToolChoice(name="get_weather"), **fields
    )
    single = await services.chat(
        user("Hello!"), tool_choice=REQUIRED, parallel_tool_calls=False, **fields
    )
    strict = await services.chat(user("What is the weather in Oslo and Rome?"), **fields)
    for message in forced.messages.values():
        assert message.calls
        assert message.reason in ("TOOL_CALLS", "LENGTH")
    for message in named.messages.values():
        assert [call.name for call in message.calls] == ["get_weather"]
        assert message.reason == "STOP"
    for message in single.messages.values():
        assert len(message.calls) == 1
    for answer in (forced, named, single, *([strict] if seed == 1 else [])):
        for message in answer.messages.values():
            if message.reason == "LENGTH":
                continue
            for name, arguments in message.called():
                schema = WEATHER if name == "get_weather" else {"maxProperties": 0}
                jsonschema.validate(arguments, schema)
    for message in strict.messages.values():
        if message.reason != "LENGTH":
            assert (message.reason == "TOOL_CALLS") == bool(message.calls)


async def test_truncated_tool_call_is_accepted_in_the_next_turn(services: Services) -> None:
    """An agent continues its conversation after max_tokens truncated a call."""
    text = {"type": "string", "minLength": 200}
    schema: dict[str, object] = {"type": "object", "properties": {"s": text}}
    schema |= {"required": ["s"], "additionalProperties": False}
    cut = await services.chat(
        user("Call f."), tools=[tool("f", schema)], tool_choice=REQUIRED, sampling=GREEDY,
        stopping=types.StoppingParams(max_tokens=40),
    )  # fmt: skip
    [call] = cut.message.calls
    assert cut.message.reason == "LENGTH"
    with pytest.raises(json.JSONDecodeError):
        json.loads(call.arguments_json)
    rendered = await services.tokenizer.RenderChat(
        tokenizer_pb2.RenderChatRequest(
            conversation=completion.Conversation(
                messages=[
                    user("Call f."),
                    completion.Message(role=completion.ROLE_ASSISTANT, tool_calls=[call]),
                    says(completion.ROLE_TOOL, "cut", tool_call_id=call.id),
                ]
            )
        )
    )
    assert f'"arguments": {call.arguments_json}' in rendered.text  # this template accepts any text
    for arguments in (call.arguments_json, "", "Paris", "{'s': 1}", "[" * 200):
        call.arguments_json = arguments
        answer = await services.chat(
            user("Call f."),
            completion.Message(role=completion.ROLE_ASSISTANT, tool_calls=[call]),
            says(completion.ROLE_TOOL, "cut", tool_call_id=call.id),
            stopping=types.StoppingParams(max_tokens=1),
        )
        assert answer.message.reason
