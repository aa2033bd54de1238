"""Operations of the API: path, body, answer and errors of each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from services.http_shim.dialects.chat.types import (
    ChatBody,
    ChatChoice,
    ChatChunkChoice,
    TemplateBody,
)
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
from services.http_shim.endpoints.adapters import LoadAdapterBody, UnloadAdapterBody
from services.http_shim.endpoints.batches import BatchBody, BatchList, BatchObject
from services.http_shim.endpoints.files import DeletedFile, FileList, FileObject
from services.http_shim.endpoints.keys import KeyList
from services.http_shim.endpoints.model_cards import ModelCard, ModelList
from services.http_shim.endpoints.model_loading import LoadBody, UnloadBody
from services.http_shim.endpoints.model_statuses import Status
from services.http_shim.endpoints.multi_completion import MultiAnswer, MultiCompletionBody
from services.http_shim.endpoints.probes import State, Version
from services.http_shim.endpoints.stored_responses import DeletedResponse, InputItemList
from services.http_shim.endpoints.tokenization import (
    AppliedTemplate,
    DetokenizeBody,
    Detokenized,
    TokenizeBody,
    Tokenized,
    TokenizerInfo,
)
from services.http_shim.endpoints.usage import UsagePage
from services.http_shim.errors import ErrorBody
from services.http_shim.vectors.embeddings import (
    EmbeddingBody,
    EmbeddingList,
    PoolingBody,
    PoolingList,
)
from services.http_shim.vectors.rankings import (
    Classification,
    ClassifyBody,
    RerankBody,
    Reranking,
    ScoreBody,
    ScoreList,
)

__all__ = ["OPERATIONS", "POST_ERRORS", "SCHEDULING", "Operation"]

Json = dict[str, Any]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A method of a path."""

    method: str
    path: str
    name: str
    """operationId"""
    summary: str
    body: type[Struct] | None = None
    required: Sequence[str] = ()
    """Required fields of the body"""
    answer: type[Struct] | None = None
    media: Sequence[str] = ("application/json",)
    """Media types of the answer; any but JSON is text"""
    chunk: type[Struct] | None = None
    """Data of a stream's events"""
    stream: str = "text/event-stream"
    """Media type of a stream"""
    last_event: str = "The data of each event; the last event's data is [DONE]."
    errors: Sequence[int] = ()
    """HTTP statuses of errors"""
    error: type[Struct] = ErrorBody
    """JSON of an error"""
    parameters: Sequence[Json] = ()
    example: Json | None = None
    """Example of a body"""
    form: Json | None = None
    """Fields of a form in place of a body, with their descriptions"""
    counts_tokens: bool = False
    needs_key: bool = True


SCHEDULING: Sequence[Json] = [
    {
        "name": "x-priority",
        "in": "header",
        "description": "Priority, higher first. Ignored unless the server trusts its callers.",
        "schema": {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1, "default": 0},
    },
    {
        "name": "x-tenant",
        "in": "header",
        "description": "Tenant whose prefix cache is used. Ignored unless the server trusts its "
        "callers.",
        "schema": {"type": "string"},
    },
]
POST_ERRORS = (400, 401, 403, 404, 408, 413, 429, 431, 499, 500, 501, 503, 504)
"""HTTP statuses of the errors of requests with a body"""
_post = partial(Operation, method="post", errors=POST_ERRORS)
_generate = partial(_post, counts_tokens=True, parameters=SCHEDULING)
_message = partial(_post, error=MessageError)
_get = partial(Operation, method="get")
_probe = partial(_get, needs_key=False)
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


def _kept(kind: str, *, rest: str = "", **fields: Any) -> Operation:
    """Return an operation on one file or batch; rest: of its path."""
    folder = {"file": "files", "batch": "batches"}[kind]
    parameter = {"name": f"{kind}_id", "in": "path", "required": True, "schema": {"type": "string"}}
    errors = fields.pop("errors", (401, 404))
    path = f"/v1/{folder}/{{{kind}_id}}{rest}"
    return Operation(path=path, parameters=[parameter], errors=errors, **fields)


def _with_unversioned(operation: Operation) -> Sequence[Operation]:
    path, name = operation.path.removeprefix("/v1"), f"{operation.name}Unversioned"
    return operation, replace(operation, path=path, name=name)


_USAGE_PARAMETERS = [
    {"name": name, "in": "query", "schema": {"type": kind}}
    for name, kind in (
        ("start", "string"),
        ("end", "string"),
        ("group_by", "string"),
        ("key", "string"),
        ("model", "string"),
        ("limit", "integer"),
        ("page", "string"),
    )
]
OPERATIONS: Sequence[Operation] = (
    *_with_unversioned(
        _generate(
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
    *_with_unversioned(
        _generate(
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
    _generate(
        path="/v1/responses",
        name="createResponse",
        summary="Continue a conversation, as in OpenAI's Responses API.",
        body=ResponseBody,
        answer=ResponseObject,
        chunk=ResponseEvent,
        last_event="The data of each event, whose name is its type; the last has the response.",
        example={"model": "default", "input": "What is a mutex?", "max_output_tokens": 100},
    ),
    _post(
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
    *_with_unversioned(
        _generate(
            path="/v1/embeddings",
            name="createEmbedding",
            summary="Embed texts; only with a model that makes embeddings.",
            body=EmbeddingBody,
            required=("input",),
            answer=EmbeddingList,
            example={"model": "default", "input": ["What is a mutex?", "A lock."]},
        )
    ),
    *_with_unversioned(
        _generate(
            path="/v1/rerank",
            name="rerank",
            summary="Order documents by how well they fit a query.",
            body=RerankBody,
            required=("query", "documents"),
            answer=Reranking,
            example={
                "model": "default",
                "query": "What is a mutex?",
                "documents": ["A lock.", "A fruit."],
            },
        )
    ),
    *_with_unversioned(
        _generate(
            path="/v1/score",
            name="score",
            summary="Score pairs of texts.",
            body=ScoreBody,
            required=("text_1", "text_2"),
            answer=ScoreList,
            example={"model": "default", "text_1": "A lock.", "text_2": ["A key.", "A fruit."]},
        )
    ),
    *_with_unversioned(
        _generate(
            path="/v1/classify",
            name="classify",
            summary="Sort texts into classes; only with a model that has a head for it.",
            body=ClassifyBody,
            required=("input",),
            answer=Classification,
            example={"model": "default", "input": ["What a day!", "A lock."]},
        )
    ),
    *_with_unversioned(
        _generate(
            path="/v1/pooling",
            name="pooling",
            summary="Embed texts without making the vectors' length 1, or embed their tokens.",
            body=PoolingBody,
            required=("input",),
            answer=PoolingList,
            example={"model": "default", "input": ["A lock."], "task": "token_embed"},
        )
    ),
    _post(
        path="/v1/files",
        name="createFile",
        summary="Upload a file of batch requests or a document, as multipart/form-data.",
        form={"purpose": "`batch`, or `user_data` for a document.", "file": "The file's content."},
        answer=FileObject,
    ),
    _get(
        path="/v1/files",
        name="listFiles",
        summary="List files; `limit`, `after` and `order` page through, `purpose` selects.",
        answer=FileList,
        errors=(400, 401),
    ),
    _kept(
        "file",
        method="get",
        name="getFile",
        summary="Describe a file.",
        answer=FileObject,
    ),
    _kept(
        "file",
        method="delete",
        name="deleteFile",
        summary="Drop a file, unless a batch that has not ended reads it.",
        answer=DeletedFile,
        errors=(400, 401, 404),
    ),
    _kept(
        "file",
        method="get",
        rest="/content",
        name="getFileContent",
        summary="Return a file's content.",
        media=("application/jsonl",),
    ),
    _post(
        path="/v1/batches",
        name="createBatch",
        summary="Run the requests of a file in the background, behind all others.",
        body=BatchBody,
        required=("input_file_id", "endpoint"),
        answer=BatchObject,
        example={"input_file_id": "file-0", "endpoint": "/v1/completions"},
    ),
    _get(
        path="/v1/batches",
        name="listBatches",
        summary="List batches; `limit`, `after` and `order` page through.",
        answer=BatchList,
        errors=(400, 401),
    ),
    _kept(
        "batch",
        method="get",
        name="getBatch",
        summary="Describe a batch.",
        answer=BatchObject,
    ),
    _kept(
        "batch",
        method="post",
        rest="/cancel",
        name="cancelBatch",
        summary="End a batch with the answers that it has.",
        answer=BatchObject,
    ),
    _generate(
        path="/v1/completion",
        name="createMultiModelCompletion",
        summary="Complete a prompt with one or several models at once.",
        body=MultiCompletionBody,
        required=("model", "prompt"),
        answer=MultiAnswer,
        example={"model": ["default"], "prompt": "Once upon a time", "max_tokens": 50},
    ),
    _get(
        path="/v1/models",
        name="listModels",
        summary="List the models.",
        answer=ModelList,
        errors=(401, 503),
    ),
    _get(
        path="/v1/models/{model}",
        name="retrieveModel",
        summary="Describe a model, by its id, an alias, or id:variant. Ids may contain slashes.",
        answer=ModelCard,
        errors=(401, 404, 503),
        parameters=[
            {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        ],
    ),
    _post(
        path="/v1/models/load",
        name="loadModel",
        summary="Load a model on demand, and answer with its card once it serves. For operators: "
        "with API keys, the key must be an admin's.",
        body=LoadBody,
        answer=ModelCard,
        required=("model",),
        example={"model": "small", "keep_alive": "30m"},
    ),
    _post(
        path="/v1/models/unload",
        name="unloadModel",
        summary="Unload a model on demand, and answer with its card once its memory is free. 409 "
        "while requests use it, unless `force` is true. For operators, as /v1/models/load.",
        body=UnloadBody,
        answer=ModelCard,
        required=("model",),
        errors=(*POST_ERRORS, 409),
        example={"model": "small"},
    ),
    _post(
        path="/v1/load_lora_adapter",
        name="loadLoraAdapter",
        summary="Load a LoRA adapter on all engines of its model; only with --adapter-routes.",
        body=LoadAdapterBody,
        required=("lora_name", "lora_path"),
        media=("text/plain",),
        example={"lora_name": "sql", "lora_path": "/adapters/sql"},
    ),
    _post(
        path="/v1/unload_lora_adapter",
        name="unloadLoraAdapter",
        summary="Unload a LoRA adapter; only with --adapter-routes.",
        body=UnloadAdapterBody,
        required=("lora_name",),
        media=("text/plain",),
        example={"lora_name": "sql"},
    ),
    _post(
        path="/tokenize",
        name="tokenize",
        summary="Encode text or messages to token ids.",
        body=TokenizeBody,
        answer=Tokenized,
        example={"prompt": "def add(a, b):", "return_token_strs": True},
    ),
    _get(
        path="/v1/keys",
        name="listKeys",
        summary="List the API keys with their limits and usage, for an admin key.",
        answer=KeyList,
        errors=(400, 401, 403),
        parameters=[{"name": "after", "in": "query", "schema": {"type": "string"}}],
    ),
    *(
        _get(
            path=path,
            name=name,
            summary="Return the usage of the key, or of all keys, by day, model and key.",
            answer=UsagePage,
            errors=(400, 401, 403, 501, 503),
            parameters=_USAGE_PARAMETERS,
        )
        for path, name in (
            ("/v1/usage", "getUsage"),
            ("/v1/organization/usage/completions", "getCompletionsUsage"),
        )
    ),
    _post(
        path="/detokenize",
        name="detokenize",
        summary="Decode token ids to text.",
        body=DetokenizeBody,
        required=("tokens",),
        answer=Detokenized,
        example={"tokens": [1, 2, 3]},
    ),
    _post(
        path="/apply-template",
        name="applyTemplate",
        summary="Render messages to the text of their prompt.",
        body=TemplateBody,
        required=("messages",),
        answer=AppliedTemplate,
        example={"messages": [{"role": "user", "content": "What is a mutex?"}]},
    ),
    _get(
        path="/tokenizer_info",
        name="getTokenizerInfo",
        summary="Describe the tokenizer: special tokens, chat template, vocabulary size.",
        answer=TokenizerInfo,
        errors=(400, 401, 403, 404, 503),
        parameters=[{"name": "model", "in": "query", "schema": {"type": "string"}}],
    ),
    _probe(path="/openapi.json", name="getOpenapi", summary="Return this document."),
    _probe(
        path="/health",
        name="getHealth",
        summary="Report that the process is alive.",
        answer=State,
    ),
    _probe(
        path="/ready",
        name="getReady",
        summary="Report whether the server accepts completions.",
        answer=State,
        errors=(503,),
    ),
    _probe(
        path="/metrics",
        name="getMetrics",
        summary="Return the metrics in Prometheus' text format.",
        media=("text/plain",),
    ),
    _get(
        path="/status.json",
        name="getStatus",
        summary="Return the counts and the load of each served model.",
        answer=Status,
        errors=(400, 401),
        parameters=[{"name": "since", "in": "query", "schema": {"type": "number"}}],
    ),
    _probe(
        path="/version",
        name="getVersion",
        summary="Return the version of the server.",
        answer=Version,
    ),
)
