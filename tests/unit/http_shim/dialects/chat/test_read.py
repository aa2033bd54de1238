"""Reading of chats, and the client's names in errors."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.http_shim.dialects.bodies import body_of, decoded
from services.http_shim.dialects.chat.read import read_chat, read_template
from services.http_shim.dialects.chat.types import ChatBody, TemplateBody
from services.http_shim.dialects.custom_tools import InputGrammar, custom_tool
from services.http_shim.dialects.reading import Reading, render_request
from services.http_shim.errors import http_status
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.tokenizer.v1 import tokenizer_pb2
from tokenwire.pb.types.v1 import types_pb2

PIXELS = "data:image/png;base64,AAEC"
HELLO = {"role": "user", "content": "Hello"}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"b": 1.10}, "strict": True},
}

SHELL = {
    "type": "custom",
    "custom": {
        "name": "shell",
        "description": "Runs.",
        "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "ls|pwd"}},
    },
}
DEFINITION = "custom.format.grammar.definition"
CALLER = {
    "role": "assistant",
    "tool_calls": [
        {"id": "c", "function": {"name": "f", "arguments": "{}"}},
        {"id": "d", "type": "custom", "custom": {"name": "shell", "input": 'ls "a"'}},
    ],
}


def read(**fields: object) -> Reading:
    return read_chat(decoded(json.dumps({"messages": [HELLO]} | fields).encode()))


def rendered(**fields: object) -> Reading:
    """Return the reading of a body whose prompt alone is made."""
    return read_template(*body_of(TemplateBody, {"messages": [HELLO]} | fields))


def translated(**fields: object) -> completion_pb2.GenerateRequest:
    return read(**fields).request


def expected(**fields: object) -> completion_pb2.GenerateRequest:
    base = completion_pb2.GenerateRequest(
        conversation=completion_pb2.Conversation(messages=[message("USER", text("Hello"))]),
        sampling=types_pb2.SamplingParams(),
        stopping=types_pb2.StoppingParams(),
        delivery=completion_pb2.DELIVERY_WHOLE,
    )
    base.MergeFrom(completion_pb2.GenerateRequest(**fields))  # type: ignore[arg-type]
    return base


def text(value: str) -> completion_pb2.ContentPart:
    return completion_pb2.ContentPart(text=value)


def message(
    role: str, *parts: completion_pb2.ContentPart, **fields: object
) -> completion_pb2.Message:
    number = completion_pb2.Role.Value(f"ROLE_{role}")
    return completion_pb2.Message(role=number, parts=parts, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given_", "wanted"),
    [
        ({"role": "system", "content": "a"}, message("SYSTEM", text("a"))),
        ({"role": "developer", "content": "a"}, message("DEVELOPER", text("a"))),
        ({"role": "user", "content": ""}, message("USER", text(""))),
        ({"role": "user", "content": "a", "name": "n"}, message("USER", text("a"), name="n")),
        ({"role": "user", "content": []}, message("USER")),
        (
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "a"},
                    {"type": "image_url", "image_url": {"url": PIXELS, "detail": "low"}},
                ],
            },
            message("USER", text("a"), completion_pb2.ContentPart(image=b"")),
        ),
        (
            {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "tool_calls": [
                    {
                        "id": "c",
                        "type": "function",
                        "function": {"name": "f", "arguments": '{"a": 1}'},
                    }
                ],
            },
            message(
                "ASSISTANT", tool_calls=[{"id": "c", "name": "f", "arguments_json": '{"a": 1}'}]
            ),
        ),
        (
            {"role": "assistant", "content": "a", "reasoning_content": "r"},
            message("ASSISTANT", text("a"), reasoning="r"),
        ),
        (
            {"role": "assistant", "content": "a", "reasoning": "r"},
            message("ASSISTANT", text("a"), reasoning="r"),
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            message("ASSISTANT", text("no")),
        ),
        (
            {"role": "assistant", "content": None, "refusal": "no"},
            message("ASSISTANT", text("no")),
        ),
        ({"role": "tool", "tool_call_id": "c"}, message("TOOL", tool_call_id="c")),
        ({"role": "tool", "content": [], "tool_call_id": "c"}, message("TOOL", tool_call_id="c")),
        (
            {"role": "tool", "content": "a", "tool_call_id": "c"},
            message("TOOL", text("a"), tool_call_id="c"),
        ),
    ],
)
def test_messages_are_converted(given_: dict[str, object], wanted: completion_pb2.Message) -> None:
    assert list(translated(messages=[given_]).conversation.messages) == [wanted]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ({"role": "user"}, "messages"),
        ([HELLO, 5], "messages[1]"),
        ([HELLO, {"role": "function", "content": "a"}], "messages[1].role"),
        ([{"content": "a"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": {"text": "a"}}], "messages[0].content"),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0]"),
        (
            [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
            "messages[0].content[0].type",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": 5}]}],
            "messages[0].content[0].image_url",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0].image_url.url",
        ),
        ([HELLO, {"role": "assistant", "tool_calls": [{}]}], "messages[1].tool_calls[0].id"),
        (
            [{"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "custom": {}}]}],
            "messages[0].tool_calls[0].custom.name",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"id": "c", "type": "custom"}]}],
            "messages[0].tool_calls[0].custom",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"id": "c", "type": "computer"}]}],
            "messages[0].tool_calls[0].type",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            [{"role": "assistant", "content": "a", "function_call": {"name": "f"}}],
            "messages[0].function_call",
        ),
    ],
)
def test_invalid_messages_are_refused(messages: object, param: str) -> None:
    with pytest.raises(ServiceError) as caught:
        translated(messages=messages)
    assert http_status(caught.value.code) == 400
    assert caught.value.field == param


def test_messages_are_required() -> None:
    with pytest.raises(ServiceError) as caught:
        translated(messages=None)
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    ("fields", "request_"),
    [
        ({}, {}),
        ({"model": "m", "user": "u", "n": 2}, {"model": "m", "user": "u", "n": 2}),
        ({"max_tokens": 3}, {"stopping": {"max_tokens": 3}}),
        ({"max_completion_tokens": 3}, {"stopping": {"max_tokens": 3}}),
        ({"temperature": 0, "seed": 5}, {"sampling": {"temperature": 0, "seed": 5}}),
        ({"stop": "a"}, {"stop": ["a"]}),
        (
            {"stop": ["a"], "include_stop_str_in_output": True},
            {"stop": ["a"], "include_stop_string": True},
        ),
        (
            {"dry_multiplier": 1, "dry_sequence_breakers": ["\n"]},
            {"sampling": {"dry": {"multiplier": 1}}, "dry_sequence_breakers": ["\n"]},
        ),
        ({"logprobs": False}, {}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 20}, {"logprobs": 20}),
        (
            {"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False},
            {
                "tools": [
                    {
                        "name": "f",
                        "description": "d",
                        "parameters_json": '{"b":1.1}',
                        "strict": True,
                    }
                ],
                "tool_choice": {"mode": completion_pb2.TOOL_MODE_AUTO},
                "parallel_tool_calls": False,
            },
        ),
        ({"parallel_tool_calls": True}, {"parallel_tool_calls": True}),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            {"tool_choice": {"name": "f"}},
        ),
        (
            {"tool_choice": {"type": "custom", "custom": {"name": "shell"}}},
            {"tool_choice": {"name": "shell"}},
        ),
        ({"response_format": {"type": "json_object"}}, {"grammar": {"json_object": {}}}),
        ({"grammar": {"type": "regex", "value": "a+"}}, {"grammar": {"regex": "a+"}}),
        (
            {"context_length_exceeded_behavior": "error"},
            {"context_overflow": completion_pb2.CONTEXT_OVERFLOW_ERROR},
        ),
        (
            {"chat_template": "rag", "chat_template_kwargs": {"thinking": False}},
            {
                "conversation": {
                    "template": "rag",
                    "template_arguments_json": '{"thinking":false}',
                }
            },
        ),
        ({"add_generation_prompt": False}, {"conversation": {"add_generation_prompt": False}}),
        (
            {"continue_final_message": True, "add_generation_prompt": False},
            {"conversation": {"continue_last_message": True, "add_generation_prompt": False}},
        ),
        ({"stream": True}, {"delivery": completion_pb2.DELIVERY_DELTAS}),
        ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
        ({"spaces_between_special_tokens": False}, {}),
        ({"truncate_prompt_tokens": -1}, {"truncate_prompt_tokens": -1}),
        ({"prompt_logprobs": 0}, {"prompt_logprobs": 0}),
        ({"bad_words": ["a", "b"]}, {"bad_words": ["a", "b"]}),
        (
            {"allowed_token_ids": [4, 5]},
            {"sampling": {"allowed_token_ids": {"ids": [4, 5]}}},
        ),
        ({"allowed_token_ids": []}, {"sampling": {"allowed_token_ids": {}}}),
        (
            {"reasoning_effort": "none", "echo": True},
            {"conversation": {"reasoning_effort": "none"}, "echo": True},
        ),
    ],
)
def test_fields_are_converted(fields: dict[str, object], request_: dict[str, object]) -> None:
    assert translated(**fields) == expected(**request_)


@pytest.mark.parametrize(
    "name", [name for name in ChatBody.__struct_fields__ if name != "messages"]
)
def test_null_means_absent(name: str) -> None:
    assert translated(**{name: None}) == expected()


def test_every_field_of_the_proto_has_a_json_field() -> None:
    """HTTP clients must have every feature of the contract."""
    complete = translated(
        model="m", tools=[TOOL], tool_choice="auto", parallel_tool_calls=True, max_tokens=1,
        temperature=1, stop="a", include_stop_str_in_output=True, n=1, logprobs=True,
        response_format={"type": "json_object"}, context_length_exceeded_behavior="error",
        chat_template="t", chat_template_kwargs={}, continue_final_message=True,
        add_generation_prompt=False, user="u", dry_multiplier=1, dry_sequence_breakers=["a"],
        skip_special_tokens=False, truncate_prompt_tokens=5, prompt_logprobs=1, bad_words=["a"],
        reasoning_effort="low", echo=True, truncation="auto",
        prediction={"type": "content", "content": "a"},
    )  # fmt: skip
    without_breakers = translated(dry_multiplier=1, dry_sequence_breakers=[])
    fields = [*complete.ListFields(), *without_breakers.ListFields()]
    names = {field.name for field in completion_pb2.GenerateRequest.DESCRIPTOR.fields}
    of_prompts = {"prompts", "best_of", "truncate_prompt", "beam_search"}
    # the shim itself resumes
    assert {field.name for field, _ in fields} == names - of_prompts - {"resume"}
    of_conversation = {field.name for field, _ in complete.conversation.ListFields()}
    assert of_conversation == {*completion_pb2.Conversation.DESCRIPTOR.fields_by_name}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
        ({"functions": []}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"stream_options": {}}, "stream_options"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        (
            {
                "grammar": {"type": "regex", "value": "a"},
                "response_format": {"type": "json_object"},
            },
            "grammar",
        ),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
        (
            {
                "tools": [SHELL],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "f"}}]},
                },
            },
            "tool_choice",
        ),
        ({"logprobs": 3}, "logprobs"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
)
def test_unsupported_and_contradictory_fields_are_refused(
    fields: dict[str, object], param: str
) -> None:
    with pytest.raises(ServiceError) as caught:
        translated(**fields)
    assert http_status(caught.value.code) == 400
    assert caught.value.field == param


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("conversation.messages", "messages"),
        ("conversation.messages[1].role", "messages[1].role"),
        ("conversation.messages[1].parts", "messages[1].content"),
        ("conversation.messages[1].parts[1].image", "messages[1].content[1].image_url.url"),
        ("conversation.messages[1].parts[2].image", "messages[1].content[2].image_url"),
        ("conversation.messages[0].tool_call_id", "messages[0].tool_call_id"),
        ("conversation.messages[0].reasoning", "messages[0].reasoning_content"),
        ("conversation.messages[2].tool_calls", "messages[2].tool_calls"),
        ("conversation.messages[2].tool_calls[0].id", "messages[2].tool_calls[0].id"),
        ("conversation.messages[2].tool_calls[0].name", "messages[2].tool_calls[0].function.name"),
        (
            "conversation.messages[2].tool_calls[0].arguments_json",
            "messages[2].tool_calls[0].function.arguments",
        ),
        ("conversation.messages[2].tool_calls[1].name", "messages[2].tool_calls[1].custom.name"),
        (
            "conversation.messages[2].tool_calls[1].arguments_json",
            "messages[2].tool_calls[1].custom.input",
        ),
        ("conversation.messages[0].name", "messages[0].name"),
        ("tools", "tools"),
        ("tools[0].name", "tools[0].function.name"),
        ("tools[0].parameters_json", "tools[0].function.parameters"),
        ("tools[1].name", "tools[1].custom.name"),
        ("tools[1].parameters_json.properties.input", f"tools[1].{DEFINITION}"),
        ("tool_choice", "tool_choice"),
        ("conversation.template", "chat_template"),
        ("conversation.template_arguments_json", "chat_template_kwargs"),
        ("conversation.continue_last_message", "continue_final_message"),
        ("conversation.add_generation_prompt", "add_generation_prompt"),
        ("conversation.reasoning_effort", "reasoning_effort"),
    ],
)
def test_error_fields_have_the_clients_names(path: str, param: str) -> None:
    text_part = {"type": "text", "text": "a"}
    parts = [text_part, image({"url": PIXELS}), image(PIXELS)]
    messages = [HELLO, {"role": "user", "content": parts}, CALLER]
    for reading in (read, rendered):
        assert reading(messages=messages, tools=[TOOL, SHELL]).field(path) == param


def image(url: object) -> dict[str, object]:
    return {"type": "image_url", "image_url": url}


def test_images_stay_apart_from_the_messages_until_they_are_sent() -> None:
    """A request lives as long as its answer, which would then hold all images in memory."""
    text_part = {"type": "text", "text": "a"}
    parts = [image({"url": PIXELS}), text_part, image("data:image/gif;base64,/w==")]
    for read_ in (read, rendered):
        reading = read_(messages=[HELLO, {"role": "user", "content": parts}])
        of_request = reading.request.conversation.messages[1].parts
        assert [part.image for part in of_request] == [b"", b"", b""]
        sent = render_request(reading, "m").conversation.messages[1].parts
        assert [part.image for part in sent] == [b"\0\1\2", b"", b"\xff"]
        assert sent[1].text == "a"
        assert [part.image for part in of_request] == [b"", b"", b""]


@pytest.mark.parametrize(
    ("url", "param"),
    [
        ({"url": "AAEC"}, "messages[1].content[1].image_url.url"),
        ("AAEC", "messages[1].content[1].image_url"),
    ],
)
def test_error_of_an_image_names_the_place_of_its_url(url: object, param: str) -> None:
    messages = [HELLO, {"role": "user", "content": [image(PIXELS), image(url)]}]
    with pytest.raises(ServiceError) as caught:
        read(messages=messages)
    assert caught.value.field == param


def test_error_field_is_the_alias_that_the_client_sent() -> None:
    assert read(logprobs=True).field("logprobs") == "logprobs"
    assert read(logprobs=True, top_logprobs=21).field("logprobs") == "top_logprobs"
    assert read().field("stop[1]") == "stop"
    assert read().field("sampling.top_p") == "top_p"
    assert read(response_format={"type": "json_object"}).field("grammar") == "response_format"
    assert read(max_completion_tokens=5).field("stopping.max_tokens") == "max_completion_tokens"
    assert read(truncation="auto").field("drop_oldest_messages") == "truncation"
    thought = [{"role": "assistant", "reasoning": "r"}]
    assert read(messages=thought).field("conversation.messages[0].reasoning") == (
        "messages[0].reasoning"
    )


def test_render_request_has_the_fields_of_a_chat() -> None:
    fields = {
        "messages": [HELLO],
        "tools": [TOOL],
        "chat_template": "rag",
        "chat_template_kwargs": {"a": 1},
        "add_generation_prompt": False,
    }
    request = render_request(rendered(**fields), "m", with_texts=True)
    assert request == tokenizer_pb2.RenderChatRequest(
        model="m",
        conversation=completion_pb2.Conversation(
            messages=[message("USER", text("Hello"))],
            template="rag",
            template_arguments_json='{"a":1}',
            add_generation_prompt=False,
        ),
        tools=translated(tools=[TOOL]).tools,
        with_texts=True,
    )


def test_custom_tool_and_its_call_are_shown_as_a_function() -> None:
    request = translated(messages=[HELLO, CALLER], tools=[TOOL, SHELL])
    assert request.tools[1] == custom_tool("shell", "Runs.", InputGrammar("regex", "ls|pwd"))
    call = request.conversation.messages[1].tool_calls[1]
    assert (call.id, call.name) == ("d", "shell")
    assert json.loads(call.arguments_json) == {"input": 'ls "a"'}


def test_model_sees_only_the_allowed_tools() -> None:
    """Errors name the tools by their places in the client's list."""
    named = {"type": "custom", "custom": {"name": "shell"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    reading = read(tools=[TOOL, SHELL], tool_choice=allowed)
    request = reading.request
    assert [tool.name for tool in request.tools] == ["shell"]
    assert request.tool_choice.mode == completion_pb2.TOOL_MODE_REQUIRED
    assert reading.field("tools[0]") == "tools[1]"
    assert reading.field("tools[0].name") == "tools[1].custom.name"
    assert reading.place("tools[0].parameters_json.properties") == f"tools[1].{DEFINITION}"


def test_format_that_constrains_nothing_is_named() -> None:
    form = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"'}}
    lark = {"type": "custom", "custom": {"name": "g", "format": form}}
    plain = {"type": "custom", "custom": {"name": "h", "format": {"type": "text"}}}
    assert read(tools=[TOOL, SHELL, lark, plain]).ignored == ["tools[2].custom.format"]


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text("aé0", max_size=3),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["role", "content", "type", "text", "tool_calls", "function", "custom", "name"]
            ),
            children | st.sampled_from(["user", "assistant", "text", "function", "custom"]),
            max_size=3,
        )
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(ChatBody.__struct_fields__), _json, max_size=4))
def test_any_json_is_accepted_or_a_400_with_a_field(fields: dict[str, object]) -> None:
    """No body may cause a 500."""
    error = None
    try:
        assert translated(**fields).SerializeToString()
    except ServiceError as refusal:
        error = refusal
    assert error is None or http_status(error.code) == 400
    assert error is None or re.split(r"[.\[]", error.field)[0] in ChatBody.__struct_fields__
