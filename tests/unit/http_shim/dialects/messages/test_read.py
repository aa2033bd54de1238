"""Requests of Anthropic's SDK: each field, block and tool that its types know has a meaning here.

A type that a new version of the SDK adds fails a test until it is used, ignored or refused.
"""

import json
import types
from typing import Any, Literal, Required, TypeAlias, Union, get_args, get_origin, get_type_hints

import pytest
from anthropic.types import (
    ContentBlockParam,
    MessageCountTokensParams,
    OutputConfigParam,
    ThinkingConfigParam,
    ToolChoiceParam,
    ToolUnionParam,
    message_create_params,
    tool_result_block_param,
)
from anthropic.types.beta import (
    BetaContentBlockParam,
    BetaThinkingConfigParam,
    BetaToolUnionParam,
    beta_tool_result_block_param,
    message_count_tokens_params,
)
from anthropic.types.beta import message_create_params as beta_create_params
from typing_extensions import is_typeddict

from services.http_shim.dialects.bodies import decoded
from services.http_shim.dialects.messages.read import read_counted_message, read_message
from services.http_shim.dialects.messages.types import CountTokensBody, MessagesBody
from services.http_shim.dialects.messages.write import message_error
from services.http_shim.dialects.reading import Reading
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2

Json: TypeAlias = dict[str, Any]
HELLO: Json = {"role": "user", "content": "Hello"}
BASE: Json = {"max_tokens": 1, "messages": [HELLO]}
HEADERS = {"betas", "user_profile_id", "workspace_id"}
"""Parameters of the SDK's methods that are headers of the request"""
REFUSED = {"compaction"}
PROMPT_FIELDS = ("conversation", "tools", "tool_choice")
IGNORED = {
    "billing_policy",
    "container",
    "context_management",
    "diagnostics",
    "fallback_credit_token",
    "fallbacks",
    "inference_geo",
    "mcp_servers",
    "service_tier",
    "speed",
}
USED = set(MessagesBody.__struct_fields__) - REFUSED
LEFT_OUT = {
    "advisor_tool_result",
    "bash_code_execution_tool_result",
    "browser_state",
    "code_execution_tool_result",
    "container_upload",
    "fallback",
    "mcp_tool_listing",
    "mcp_tool_result",
    "mcp_tool_use",
    "server_tool_use",
    "text_editor_code_execution_tool_result",
    "tool_addition",
    "tool_reference",
    "tool_removal",
    "tool_search_tool_result",
    "web_fetch_tool_result",
    "web_search_tool_result",
}
"""Types of blocks that are left out of the prompt"""


def members(*kinds: Any) -> list[Any]:
    """Return the members of unions that requests have."""
    found = []
    for kind in kinds:
        if get_origin(kind) in (Union, types.UnionType):
            found += members(*get_args(kind))
        elif is_typeddict(kind):
            found.append(kind)
    return found


def least(kind: Any) -> Any:
    """Return the smallest value of a type of the SDK."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return inner[0]
    if origin in (Union, types.UnionType):
        return least(inner[0])
    if is_typeddict(kind):
        hints = get_type_hints(kind, include_extras=True)
        needed = {name: hint for name, hint in hints.items() if get_origin(hint) is Required}
        return {name: least(get_args(hint)[0]) for name, hint in needed.items()}
    if kind is bool:
        return False
    if kind in (int, float):
        return 1
    if kind is str:
        return "AAAA"  # also base64
    return {} if kind is object or origin is dict else []


def tag(kind: Any) -> str:
    return str(least(kind)["type"])


def params(*of: Any) -> set[str]:
    return {name for each in of for name in get_type_hints(each)}


def read(**fields: Any) -> Reading:
    return read_message(decoded(json.dumps(BASE | fields).encode()))


def asked(**fields: Any) -> tuple[completion_pb2.GenerateRequest, list[str]]:
    """Return the request, and what is ignored."""
    reading = read(**fields)
    counted = read_counted_message(decoded(json.dumps(BASE | fields).encode()))
    for name in PROMPT_FIELDS:
        assert getattr(counted.request, name) == getattr(reading.request, name)
    return reading.request, reading.ignored


def test_every_field_of_the_sdk_is_used_ignored_or_refused() -> None:
    created = params(
        message_create_params.MessageCreateParamsBase,
        beta_create_params.MessageCreateParamsBase,
        beta_create_params.ParseMessageCreateParamsBase,
    )
    assert created - HEADERS - USED == IGNORED | REFUSED
    counted = params(MessageCountTokensParams, message_count_tokens_params.MessageCountTokensParams)
    assert counted - HEADERS - set(CountTokensBody.__struct_fields__) <= IGNORED | REFUSED


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_ignored_field_is_named(name: str) -> None:
    for read_ in (read_message, read_counted_message):
        ignored = read_(BASE | {name: "x"}).ignored
        assert [path for path in ignored if path != "max_tokens"] == [name]


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_field_is_named(name: str) -> None:
    with pytest.raises(ServiceError) as refused:
        asked(**{name: {"type": "x"}})
    assert refused.value.field == name


@pytest.mark.parametrize("kind", members(ContentBlockParam, BetaContentBlockParam), ids=tag)
def test_every_block_of_the_sdk_is_read_or_left_out(kind: Any) -> None:
    block = least(kind)
    assistants = {"tool_use", "thinking", "redacted_thinking"}
    role = "assistant" if block["type"] in assistants | LEFT_OUT else "user"
    text = {"type": "text", "text": "said"}
    request, ignored = asked(messages=[HELLO, {"role": role, "content": [text, block]}])
    assert ignored == (["messages[1].content[1]"] if block["type"] in LEFT_OUT else [])
    assert request.conversation.messages[1].parts[0].text == "said"


@pytest.mark.parametrize(
    "kind",
    members(tool_result_block_param.Content, beta_tool_result_block_param.Content),
    ids=tag,
)
def test_every_block_of_a_result_is_read_or_left_out(kind: Any) -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [least(kind)]}
    _, ignored = asked(messages=[{"role": "user", "content": [result]}])
    place = "messages[0].content[0].content[0]"
    assert ignored == ([place] if tag(kind) in LEFT_OUT else [])


@pytest.mark.parametrize("kind", members(ToolUnionParam, BetaToolUnionParam))
def test_every_tool_of_the_sdk_is_used_or_left_out(kind: Any) -> None:
    tool = least(kind)
    request, ignored = asked(tools=[tool])
    is_own = "input_schema" in tool
    assert len(request.tools) == is_own
    assert ("tools[0]" in ignored) is not is_own


def test_every_choice_of_the_sdk_has_a_meaning() -> None:
    for kind in members(ToolChoiceParam):
        assert asked(tool_choice=least(kind))[1] == []
    for kind in members(ThinkingConfigParam, BetaThinkingConfigParam):
        thinks = tag(kind) != "disabled"
        request, _ = asked(thinking=least(kind))
        assert json.loads(request.conversation.template_arguments_json) == {
            "enable_thinking": thinks
        }
    assert asked(thinking={"type": "adaptive", "display": "omitted"})[1] == ["thinking.display"]
    [effort, _] = get_args(get_type_hints(OutputConfigParam)["effort"])
    for level in get_args(effort):
        assert asked(output_config={"effort": level})[0].conversation.reasoning_effort == level
    form = {"type": "json_schema", "schema": {"type": "object"}}
    for fields in ({"output_format": form}, {"output_config": {"format": form}}):
        assert asked(**fields)[0].grammar.json_schema == '{"type":"object"}'


def test_thread_that_begins_has_its_whole_conversation_in_the_request() -> None:
    request, ignored = asked(thread={"type": "create"})
    assert request == asked()[0]
    assert ignored == ["thread"]


def test_thread_that_goes_on_is_refused_with_the_code_that_clients_know() -> None:
    with pytest.raises(ServiceError) as refused:
        asked(thread={"type": "continue", "previous_message_id": "msg_1"})
    body = json.loads(message_error(refused.value, "req_1"))
    assert body["error"]["type"] == "not_found_error"
    assert body["error"]["details"] == {"error_code": "thread_not_found"}


@pytest.mark.parametrize("content", ["", [], [{"type": "text", "text": ""}]])
def test_empty_last_message_of_the_assistant_is_continued(content: Any) -> None:
    request, _ = asked(messages=[HELLO, {"role": "assistant", "content": content}])
    assert request.conversation.continue_last_message
    assert [part.text for part in request.conversation.messages[-1].parts] == [""]


def test_server_tools_of_a_history_are_left_out_and_the_answer_stays() -> None:
    history = [
        HELLO,
        {"role": "assistant", "content": [
            {"type": "server_tool_use", "id": "s", "name": "n", "input": {}},
        ]},
        {"role": "assistant", "content": [
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
            {"type": "text", "text": "Found.", "citations": [{"type": "char_location"}]},
        ]},
        HELLO,
    ]  # fmt: skip
    request, ignored = asked(messages=history)
    assert [part.text for each in request.conversation.messages for part in each.parts] == [
        "Hello",
        "Found.",
        "Hello",
    ]
    assert "messages[1].content[0]" in ignored
    assert "messages[2].content[1].citations" in ignored
    with pytest.raises(ServiceError) as refused:
        asked(messages=history[1:2])
    assert refused.value.field == "messages"


def test_citations_of_a_document_are_ignored_by_name() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "text"}
    block = {"type": "document", "source": source, "title": "T", "citations": {"enabled": True}}
    request, ignored = asked(messages=[{"role": "user", "content": [block]}])
    assert request.conversation.messages[0].parts[0].text == "T\n\ntext"
    assert ignored == ["messages[0].content[0].citations"]


@pytest.mark.parametrize("kind", ["text", "base64", "file"])
def test_content_of_a_document_of_another_kind_is_none(kind: str) -> None:
    """Its image has no place in the chat."""
    image = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"},
    }
    source = {
        "type": kind,
        "media_type": "text/plain",
        "data": "text",
        "file_id": "file-1",
        "content": [image],
    }
    message = {"role": "user", "content": [{"type": "document", "source": source}]}
    reading = read(messages=[message])
    reading.images.copy_into(reading.request)
    assert len(reading.images) == 0


def test_blocks_of_a_document_are_its_content() -> None:
    blocks = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    for content, texts in (("one", ["T\n\none"]), (blocks, ["T\n\n", "one", "two"])):
        block = {
            "type": "document",
            "title": "T",
            "source": {"type": "content", "content": content},
        }
        request, _ = asked(messages=[{"role": "user", "content": [block]}])
        assert [part.text for part in request.conversation.messages[0].parts] == texts


def test_tool_without_a_name_is_refused() -> None:
    with pytest.raises(ServiceError) as refused:
        asked(tools=[{"input_schema": {}}])
    assert refused.value.field == "tools[0].name"
