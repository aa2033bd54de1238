"""The client's names of a request's fields, and what a reading holds."""

import gc
import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from services.http_shim.dialects.chat.read import read_chat
from services.http_shim.dialects.completions.read import read_completion
from services.http_shim.dialects.messages.read import read_message
from services.http_shim.dialects.reading import Reading
from services.http_shim.dialects.responses.read import read_response
from services.http_shim.dialects.responses.write import KeptResponse
from tokenwire.pb.completion.v1 import completion_pb2

JsonObject = dict[str, Any]
SECRET = "c2VjcmV0IGRvY3VtZW50" * 10


async def keep(_: KeptResponse) -> None:
    """Keep nothing."""


def response(**fields: Any) -> Reading:
    return read_response(fields, b"[]", keep)


def test_longest_noted_beginning_names_a_field() -> None:
    reading = Reading([], {"a": "table", "a.b.c": "deep"})
    reading.note("a.b", "noted")
    assert reading.field("a") == "table"
    assert reading.field("a.x") == "table"
    assert reading.field("a.b") == "noted"
    assert reading.field("a.b[3].x") == "noted"
    assert reading.field("a.b.c") == reading.field("a.b.c.d") == "deep"


def test_name_holds_only_for_whole_steps_of_a_path() -> None:
    """The tenth tool is not the first."""
    reading = Reading([], {"stop": "stop_sequences"})
    reading.note("tools[1]", "tools[7]")
    assert reading.field("tools[1].name") == "tools[7]"
    assert reading.field("tools[10].name") == "tools"
    assert reading.field("stop[0]") == "stop_sequences"
    assert reading.field("stopping.max_tokens") == "max_tokens"


def test_rest_of_a_path_follows_a_renamed_beginning() -> None:
    reading = Reading([], {})
    reading.rename("conversation.messages[0]", "messages[2]")
    reading.note("conversation.messages[0].parts", "messages[2].content")
    assert reading.field("conversation.messages[0]") == "messages[2]"
    assert reading.field("conversation.messages[0].role") == "messages[2].role"
    assert reading.field("conversation.messages[0].parts[1].text") == "messages[2].content"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("sampling.top_p", "top_p"),
        ("sampling.logit_bias[5]", "logit_bias"),
        ("stopping.stop_token_ids[0]", "stop_token_ids"),
        ("conversation.messages[4].role", "messages"),
        ("conversation.reasoning_effort", "reasoning_effort"),
        ("prompts.suffix", "suffix"),
        ("prompts.images[1].data", "images"),
        ("tools[3].name", "tools"),
        ("n", "n"),
        ("", ""),
    ],
)
def test_field_that_nobody_noted_has_its_name_in_the_contract(path: str, name: str) -> None:
    reading = Reading([], {})
    assert reading.field(path) == name
    assert reading.place(path) == name


def test_place_leads_into_a_schema_where_a_field_ends_before_it() -> None:
    reading = Reading([], {"grammar": "table"})
    reading.note("grammar", "response_format")
    reading.note_text("grammar.json_schema", "response_format.schema")
    path = "grammar.json_schema.properties.a[0].title"
    assert reading.field(path) == "response_format"
    assert reading.place(path) == "response_format.schema.properties.a[0].title"
    assert reading.place("grammar.choice.choices[1]") == "response_format"
    assert reading.place("grammar.json_schema") == "response_format.schema"


def test_part_of_a_message_has_its_own_name_and_others_the_messages() -> None:
    reading = Reading([], {})
    reading.add_message(completion_pb2.ROLE_SYSTEM, "system")
    made = reading.add_message(completion_pb2.ROLE_ASSISTANT, "input[3]")
    made.add_text("a", "input[3].content[0]")
    path = made.add_call("c", "f", "{}", "input[4]")
    reading.note(f"{path}.name", "input[4].name")
    message = "conversation.messages[1]"
    assert reading.field("conversation.messages[0].parts[0].text") == "system"
    assert reading.field(f"{message}.parts[0].text") == "input[3].content[0]"
    assert reading.field(f"{message}.parts[7]") == reading.field(f"{message}.role") == "input[3]"
    assert reading.field(f"{message}.tool_calls[0].name") == "input[4].name"
    assert reading.field(f"{message}.tool_calls[0].arguments_json") == "input[4]"
    assert reading.place(f"{message}.parts[0]") == "input[3].content[0]"


MESSAGES = [
    {"role": "user", "content": "Hi"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "a"},
            {"type": "tool_use", "id": "t", "name": "f", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "b"}]},
            {"type": "text", "text": "c"},
        ],
    },
]
MESSAGE_BODY: JsonObject = {
    "max_tokens": 1,
    "system": [{"type": "text", "text": "s"}],
    "messages": MESSAGES,
    "tools": [{"type": "web_search_20250305", "name": "w"}, {"name": "f", "input_schema": {}}],
    "output_config": {"format": {"type": "json_schema", "schema": {}}, "effort": "low"},
}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("conversation.messages", "messages"),
        ("conversation.messages[0].parts[0].text", "system[0].text"),
        ("conversation.messages[0].parts", "system"),
        ("conversation.messages[1].parts[0].text", "messages[0].content"),
        ("conversation.messages[2].role", "messages[1]"),
        ("conversation.messages[2].parts[0].text", "messages[1].content[1]"),
        ("conversation.messages[2].tool_calls[0].name", "messages[1].content[2]"),
        ("conversation.messages[3].tool_call_id", "messages[2].content[0]"),
        ("conversation.messages[3].parts[0]", "messages[2].content[0].content[0]"),
        ("conversation.messages[4].parts[0]", "messages[2].content[1]"),
        ("conversation.template_arguments_json", "thinking"),
        ("conversation.continue_last_message", "messages"),
        ("conversation.reasoning_effort", "output_config.effort"),
        ("tools[0].name", "tools[1].name"),
        ("tools[0].parameters_json", "tools[1].input_schema"),
        ("tools[0].parameters_json.properties.a", "tools[1].input_schema"),
        ("tool_choice", "tool_choice"),
        ("stop[1]", "stop_sequences"),
        ("stopping.max_tokens", "max_tokens"),
        ("sampling.top_k", "top_k"),
        ("grammar.json_schema", "output_config.format.schema"),
    ],
)
def test_errors_of_a_message_have_the_clients_names(path: str, name: str) -> None:
    assert read_message(MESSAGE_BODY).field(path) == name


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("grammar.json_schema.properties.a", "output_config.format.schema.properties.a"),
        ("tools[0].parameters_json.title", "tools[1].input_schema.title"),
        ("conversation.messages[2].reasoning", "messages[1]"),
        ("conversation.messages[4].parts[0].text", "messages[2].content[1]"),
    ],
)
def test_ignored_parts_of_a_message_have_the_clients_paths(path: str, place: str) -> None:
    assert read_message(MESSAGE_BODY).place(path) == place


ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "reasoning", "summary": [{"text": "hm"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "b"},
]
RESPONSE_BODY: JsonObject = {
    "instructions": "s",
    "input": ITEMS,
    "tools": [
        {"type": "web_search"},
        {"type": "function", "name": "f", "parameters": {}},
        {
            "type": "custom",
            "name": "g",
            "format": {"type": "grammar", "syntax": "regex", "definition": "a"},
        },
    ],
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("conversation.messages", "input"),
        ("conversation.messages[0].parts[0].text", "instructions"),
        ("conversation.messages[1].parts[0].text", "input[0].content[0]"),
        ("conversation.messages[1].role", "input[0]"),
        ("conversation.messages[2].reasoning", "input[1]"),
        ("conversation.messages[2].tool_calls[0].arguments_json", "input[2]"),
        ("conversation.messages[3].tool_call_id", "input[3]"),
        ("conversation.messages[3].parts[0]", "input[3].output"),
        ("conversation.reasoning_effort", "reasoning.effort"),
        ("tools[0].name", "tools[1].name"),
        ("tools[0].parameters_json", "tools[1].parameters"),
        ("tools[1].name", "tools[2].name"),
        ("tools[1].parameters_json.properties.input", "tools[2].format.definition"),
        ("stopping.max_tokens", "max_output_tokens"),
        ("sampling.temperature", "temperature"),
        ("logprobs", "top_logprobs"),
        ("grammar.json_schema", "text.format"),
        ("drop_oldest_messages", "truncation"),
    ],
)
def test_errors_of_a_response_have_the_clients_names(path: str, name: str) -> None:
    assert response(**RESPONSE_BODY).field(path) == name


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("grammar.json_schema.properties.a", "text.format.schema.properties.a"),
        ("tools[0].parameters_json.title", "tools[1].parameters.title"),
        ("tools[1].parameters_json.properties.input.pattern", "tools[2].format.definition"),
        ("conversation.messages[2].reasoning", "input[1]"),
    ],
)
def test_ignored_parts_of_a_response_have_the_clients_paths(path: str, place: str) -> None:
    assert response(**RESPONSE_BODY).place(path) == place


def test_items_of_earlier_responses_are_named_by_the_response_that_is_continued() -> None:
    context = json.dumps([{"role": "user", "content": "a"}]).encode()
    reading = read_response({"input": "b", "previous_response_id": "r"}, context, keep)
    assert reading.field("conversation.messages[0].parts[0]") == "previous_response_id.content"
    assert reading.field("conversation.messages[1].parts[0]") == "input.content"


def held_secrets(root: object) -> list[str | bytes]:
    """Return the texts with the secret that an object holds, itself or through others."""
    seen: set[int] = set()
    texts: list[str | bytes] = []
    waiting = [root]
    while waiting:
        each = waiting.pop()
        is_code = isinstance(each, type | ModuleType) or (
            isinstance(each, dict) and "__builtins__" in each
        )
        if id(each) in seen or is_code:
            continue
        seen.add(id(each))
        if isinstance(each, str | bytes):
            texts += [each] if any(part in str(each) for part in (SECRET, "secret")) else []
        waiting += gc.get_referents(each)
    return texts


IMAGE = f"data:image/png;base64,{SECRET}"
FILE = f"data:text/plain;base64,{SECRET}"


@pytest.mark.parametrize(
    ("read", "fields"),
    [
        (read_completion, {"prompt": "x", "images": [IMAGE]}),
        (
            read_chat,
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image_url", "image_url": {"url": IMAGE}},
                            {"type": "file", "file": {"file_data": FILE, "filename": "title"}},
                        ],
                    }
                ]
            },
        ),
        (
            read_message,
            {
                "max_tokens": 1,
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image", "source": {"type": "base64", "data": SECRET}},
                            {
                                "type": "document",
                                "title": "title",
                                "source": {"type": "base64", "data": SECRET},
                            },
                        ],
                    }
                ],
            },
        ),
    ],
)
def test_encoded_images_and_documents_are_not_held(
    read: Callable[[JsonObject], Reading], fields: JsonObject
) -> None:
    """A reading lives as long as its answer, and the memory of bodies is counted until then."""
    reading = read(fields)
    assert len(reading.images) == 1
    for document in reading.documents:
        document.put("text")
    assert held_secrets(reading.documents) == held_secrets(reading.writer) == []
    reading.images.drop()
    assert held_secrets(reading) == []
    parts = [part.text for each in reading.request.conversation.messages for part in each.parts]
    assert parts in ([], ["", "title\n\ntext"])


def test_documents_of_a_response_are_held_only_to_be_kept() -> None:
    part = {"type": "input_file", "file_data": FILE, "filename": "title"}
    reading = response(input=[{"role": "user", "content": [part]}])
    [document] = reading.documents
    document.put("text")
    assert held_secrets(document) == []
    assert reading.request.conversation.messages[0].parts[0].text == "title\n\ntext"
