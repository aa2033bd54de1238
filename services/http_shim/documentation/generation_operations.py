"""Operations that generate text, count their tokens, and keep responses."""

from collections.abc import Sequence
from functools import partial

from msgspec import UNSET, Struct, UnsetType

from services.http_shim.dialects.chat.types import ChatBody, ChatChoice, ChatChunkChoice
from services.http_shim.dialects.choices import AnswerHead, PromptLogprobs, Usage
from services.http_shim.dialects.completions.types import Choice, CompletionBody
from services.http_shim.dialects.messages.types import (
    AnswerBlock,
    CountTokensBody,
    ErrorDetail,
    MessageAnswer,
    MessageError,
    MessagesBody,
    MessageUsage,
    TokenCount,
)
from services.http_shim.dialects.responses.types import (
    InputTokenCount,
    OutputItem,
    ResponseBody,
    ResponseObject,
)
from services.http_shim.documentation.operation import (
    SCHEDULING,
    Json,
    Operation,
    generate,
    post,
    with_unversioned,
)
from services.http_shim.endpoints.multi_completion import MultiAnswer, MultiCompletionBody
from services.http_shim.endpoints.stored_responses import DeletedResponse, InputItemList

__all__ = ["GENERATION_OPERATIONS"]


class Completion(AnswerHead):
    """The answer of /v1/completions; a chunk of its stream has one choice at most."""

    choices: list[Choice]
    usage: Usage | None = None


class ChatCompletion(AnswerHead):
    """The answer of /v1/chat/completions."""

    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class MessageEvent(Struct):
    """An event of a streamed message."""

    type: str
    message: MessageAnswer | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: AnswerBlock | UnsetType = UNSET
    delta: Json | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET
    error: ErrorDetail | UnsetType = UNSET


class ResponseEvent(Struct):
    """An event of a streamed response."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    part: Json | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class ChatCompletionChunk(AnswerHead):
    """A chunk of a streamed chat, with one choice at most."""

    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET


_message = partial(post, error=MessageError)
_RESPONSE_ID = {
    "name": "response_id",
    "in": "path",
    "required": True,
    "schema": {"type": "string"},
}
_kept_response = partial(
    Operation,
    path="/v1/responses/{response_id}",
    errors=(401, 404),
    parameters=[_RESPONSE_ID],
)


GENERATION_OPERATIONS: Sequence[Operation] = (
    *with_unversioned(
        generate(
            path="/v1/completions",
            name="createCompletion",
            summary="Complete prompts.",
            body=CompletionBody,
            required=("prompt",),
            answer=Completion,
            chunk=Completion,
            example={
                "model": "default",
                "prompt": "def add(a, b):",
                "max_tokens": 32,
                "temperature": 0,
            },
        )
    ),
    *with_unversioned(
        generate(
            path="/v1/chat/completions",
            name="createChatCompletion",
            summary="Continue a conversation.",
            body=ChatBody,
            required=("messages",),
            answer=ChatCompletion,
            chunk=ChatCompletionChunk,
            example={
                "model": "default",
                "messages": [{"role": "user", "content": "What is a mutex?"}],
                "max_tokens": 100,
            },
        )
    ),
    _message(
        path="/v1/messages",
        name="createMessage",
        summary="Continue a conversation, as in Anthropic's Messages API.",
        body=MessagesBody,
        required=("max_tokens", "messages"),
        answer=MessageAnswer,
        chunk=MessageEvent,
        last_event="The data of each event, whose name is its type; the last is message_stop.",
        counts_tokens=True,
        parameters=SCHEDULING,
        example={
            "model": "default",
            "max_tokens": 100,
            "messages": [{"role": "user", "content": "What is a mutex?"}],
        },
    ),
    _message(
        path="/v1/messages/count_tokens",
        name="countMessageTokens",
        summary="Count the tokens of a message's prompt.",
        body=CountTokensBody,
        required=("messages",),
        answer=TokenCount,
        example={
            "model": "default",
            "messages": [{"role": "user", "content": "What is a mutex?"}],
        },
    ),
    generate(
        path="/v1/responses",
        name="createResponse",
        summary="Continue a conversation, as in OpenAI's Responses API.",
        body=ResponseBody,
        answer=ResponseObject,
        chunk=ResponseEvent,
        last_event="The data of each event, whose name is its type; the last has the response.",
        example={"model": "default", "input": "What is a mutex?", "max_output_tokens": 100},
    ),
    post(
        path="/v1/responses/input_tokens",
        name="countInputTokens",
        summary="Count the tokens of a response's prompt.",
        body=ResponseBody,
        answer=InputTokenCount,
        example={"model": "default", "input": "What is a mutex?"},
    ),
    _kept_response(
        method="get",
        name="getResponse",
        summary="Return a kept or running response, or the kept events of one in the background.",
        answer=ResponseObject,
        parameters=[
            _RESPONSE_ID,
            {"name": "stream", "in": "query", "schema": {"type": "boolean"}},
            {"name": "starting_after", "in": "query", "schema": {"type": "integer"}},
        ],
        errors=(400, 401, 404),
    ),
    _kept_response(
        method="delete",
        name="deleteResponse",
        summary="Drop a kept response.",
        answer=DeletedResponse,
    ),
    _kept_response(
        method="post",
        path="/v1/responses/{response_id}/cancel",
        name="cancelResponse",
        summary="End a response in the background with the output that it has.",
        answer=ResponseObject,
        errors=(400, 401, 404),
    ),
    _kept_response(
        method="get",
        path="/v1/responses/{response_id}/input_items",
        name="listInputItems",
        summary="List the items of a response's input; `limit`, `order` and `after` page through.",
        answer=InputItemList,
        errors=(400, 401, 404),
    ),
    generate(
        path="/v1/completion",
        name="createMultiModelCompletion",
        summary="Complete a prompt with one or several models at once.",
        body=MultiCompletionBody,
        required=("model", "prompt"),
        answer=MultiAnswer,
        example={"model": ["default"], "prompt": "Once upon a time", "max_tokens": 50},
    ),
)
