"""GET /openapi.json: what the routes take and give, from the types that parse and write it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from services.http_shim.documentation.openapi_fields import (
    FIELDS,
    LIMITS,
    OWN_FIELDS,
    REQUIRED,
    UNTAGGED,
)
from services.http_shim.endpoints.multi_completion import MultiAnswer
from services.http_shim.endpoints.probes import State, Version
from services.http_shim.endpoints.tokenization import (
    AppliedTemplate,
    Detokenized,
    Tokenized,
    TokenizerInfo,
)
from services.http_shim.errors import ErrorBody
from services.http_shim.formats.chat_responses import ChatChoice, ChatChunkChoice
from services.http_shim.formats.completion_responses import Choice
from services.http_shim.formats.foreign_fields import ForeignFields
from services.http_shim.formats.model_cards import ModelCard, ModelList
from services.http_shim.formats.request_bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    MultiCompletionBody,
    TemplateBody,
    TokenizeBody,
)
from services.http_shim.formats.responses import PromptLogprobs, Usage

__all__ = ["document", "openapi"]

Json = dict[str, Any]


class Completion(Struct):
    """The answer of /v1/completions, and with one choice at most each chunk of its stream."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage | None = None


class ChatCompletion(Struct):
    """The answer of /v1/chat/completions."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Struct):
    """A chunk of its stream, with one choice at most."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operation:
    method: str
    path: str
    name: str
    summary: str
    body: type[Struct] | None = None
    required: Sequence[str] = ()
    """Fields of the body"""
    answer: type[Struct] | None = None
    media: Sequence[str] = ("application/json",)
    """Of the answer; what is not JSON is text"""
    chunk: type[Struct] | None = None
    """What the events of a stream hold"""
    errors: Sequence[int] = ()
    parameters: Sequence[Json] = ()
    example: Json | None = None
    """A body"""
    counts_tokens: bool = False
    needs_key: bool = True


_ERRORS = {
    400: "Wrong: `param` names the field.",
    401: "No API key, or none that is known.",
    403: "The API key is not for this model.",
    404: "There is no such model, or nothing serves it.",
    408: "The body stopped coming.",
    413: "The body is too large.",
    429: "A limit of the API key, or of the server, is reached.",
    431: "The request's head is too large.",
    499: "An operator ended the request.",
    500: "The server failed; its log says more.",
    501: "This model, or this server, can't do it.",
    503: "The server is stopping, or the model can't be reached.",
    504: "It took too long.",
}
_WORK = (400, 401, 403, 404, 408, 413, 429, 431, 499, 500, 501, 503, 504)
_COMPLETION_EXAMPLE: Json = {
    "model": "default",
    "prompt": "def add(a, b):",
    "max_tokens": 32,
    "temperature": 0,
}
_CHAT_EXAMPLE: Json = {
    "model": "default",
    "messages": [{"role": "user", "content": "What is a mutex?"}],
    "max_tokens": 100,
}
_SCHEDULING: Sequence[Json] = [
    {
        "name": "x-priority",
        "in": "header",
        "description": "Higher is served first; heeded where the server trusts its callers.",
        "schema": {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1, "default": 0},
    },
    {
        "name": "x-tenant",
        "in": "header",
        "description": "Whose prefix cache is used; heeded where the server trusts its callers.",
        "schema": {"type": "string"},
    },
]
_OPERATIONS = (
    *(
        _Operation(
            method="post",
            path=path,
            name=name,
            summary="Complete prompts.",
            body=CompletionBody,
            required=("prompt",),
            answer=Completion,
            chunk=Completion,
            errors=_WORK,
            example=_COMPLETION_EXAMPLE,
            counts_tokens=True,
            parameters=_SCHEDULING,
        )
        for path, name in (
            ("/v1/completions", "createCompletion"),
            ("/completions", "createCompletionUnversioned"),
        )
    ),
    *(
        _Operation(
            method="post",
            path=path,
            name=name,
            summary="Continue a conversation.",
            body=ChatBody,
            required=("messages",),
            answer=ChatCompletion,
            chunk=ChatCompletionChunk,
            errors=_WORK,
            example=_CHAT_EXAMPLE,
            counts_tokens=True,
            parameters=_SCHEDULING,
        )
        for path, name in (
            ("/v1/chat/completions", "createChatCompletion"),
            ("/chat/completions", "createChatCompletionUnversioned"),
        )
    ),
    _Operation(
        method="post",
        path="/v1/completion",
        name="createMultiModelCompletion",
        summary="Complete a prompt with one or many models at once.",
        body=MultiCompletionBody,
        required=("model", "prompt"),
        answer=MultiAnswer,
        errors=_WORK,
        example={"model": ["default"], "prompt": "Once upon a time", "max_tokens": 50},
        counts_tokens=True,
        parameters=_SCHEDULING,
    ),
    _Operation(
        method="get",
        path="/v1/models",
        name="listModels",
        summary="List the models.",
        answer=ModelList,
        errors=(401, 503),
    ),
    _Operation(
        method="get",
        path="/v1/models/{model}",
        name="retrieveModel",
        summary="A model, by its id, an alias, or id:variant. Ids may contain slashes.",
        answer=ModelCard,
        errors=(401, 404, 503),
        parameters=[
            {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        ],
    ),
    _Operation(
        method="post",
        path="/tokenize",
        name="tokenize",
        summary="Text or messages to token ids.",
        body=TokenizeBody,
        answer=Tokenized,
        errors=_WORK,
        example={"prompt": "def add(a, b):", "return_token_strs": True},
    ),
    _Operation(
        method="post",
        path="/detokenize",
        name="detokenize",
        summary="Token ids to text.",
        body=DetokenizeBody,
        required=("tokens",),
        answer=Detokenized,
        errors=_WORK,
        example={"tokens": [1, 2, 3]},
    ),
    _Operation(
        method="post",
        path="/apply-template",
        name="applyTemplate",
        summary="Messages to the text of their prompt.",
        body=TemplateBody,
        required=("messages",),
        answer=AppliedTemplate,
        errors=_WORK,
        example={"messages": [{"role": "user", "content": "What is a mutex?"}]},
    ),
    _Operation(
        method="get",
        path="/tokenizer_info",
        name="getTokenizerInfo",
        summary="Special tokens, chat template, vocabulary size.",
        answer=TokenizerInfo,
        errors=(400, 401, 403, 404, 503),
        parameters=[{"name": "model", "in": "query", "schema": {"type": "string"}}],
    ),
    _Operation(
        method="get",
        path="/openapi.json",
        name="getOpenapi",
        summary="This document.",
        needs_key=False,
    ),
    _Operation(
        method="get",
        path="/health",
        name="getHealth",
        summary="The process lives.",
        answer=State,
        needs_key=False,
    ),
    _Operation(
        method="get",
        path="/ready",
        name="getReady",
        summary="A completion would be served now.",
        answer=State,
        errors=(503,),
        needs_key=False,
    ),
    _Operation(
        method="get",
        path="/metrics",
        name="getMetrics",
        summary="Prometheus' text.",
        media=("text/plain",),
        needs_key=False,
    ),
    _Operation(
        method="get",
        path="/version",
        name="getVersion",
        summary="Which version of the software serves.",
        answer=Version,
        needs_key=False,
    ),
)

_SAID_OF: Mapping[str, Sequence[str]] = {
    "minimum": ("integer", "number"),
    "exclusiveMinimum": ("integer", "number"),
    "maximum": ("integer", "number"),
    "minLength": ("string",),
    "maxLength": ("string",),
    "pattern": ("string",),
    "minItems": ("array",),
    "maxItems": ("array",),
    "propertyNames": ("object",),
    "const": ("boolean",),
}
"""Keywords of schemas, and the types that they narrow."""
_HEADERS: Mapping[str, str] = {
    "x-request-id": "Names the request in every log; the client's own, if it sent a sane one.",
    "x-tokens-used": "Tokens of prompt and output that were used; of a stream, a trailer.",
    "x-tokenwire-ignored": "Paths of the body's fields that are not known, and of keywords of its "
    "schemas that are not enforced, and names of headers: all were ignored.",
    "retry-after": "Seconds after which a retry makes sense.",
    "x-ratelimit-limit-requests": "Requests that the API key has in a minute.",
    "x-ratelimit-remaining-requests": "Requests that it has left.",
    "x-ratelimit-reset-requests": "When it has all of them again: 20ms, 1.5s, 6m0s.",
    "x-ratelimit-limit-tokens": "Tokens that the API key has in a minute.",
    "x-ratelimit-remaining-tokens": "Tokens that it has left.",
    "x-ratelimit-reset-tokens": "When it has all of them again.",
}
_RATE_HEADERS = [name for name in _HEADERS if name.startswith("x-ratelimit-")]


def document() -> Json:
    """The OpenAPI 3.1 document."""
    types = [part for each in _OPERATIONS for part in (each.body, each.answer, each.chunk)]
    _, schemas = msgspec.json.schema_components(
        [*dict.fromkeys(each for each in types if each is not None), ErrorBody],
        ref_template="#/components/schemas/{name}",
    )
    bodies = {each.body: each.required for each in _OPERATIONS if each.body is not None}
    for body, required in bodies.items():
        fields = {**FIELDS, **OWN_FIELDS.get(body, {})}
        _describe(schemas[body.__name__], required, fields)
        if issubclass(body, GenerationBody):
            schemas[body.__name__]["properties"] |= _foreign(body.foreign)
    for part, limits in LIMITS.items():
        for name, constraints in limits.items():
            _limit(schemas[part.__name__]["properties"][name], constraints)
    for part in UNTAGGED:
        schemas[part.__name__]["required"].remove("type")
    for part, required in REQUIRED.items():
        _require(schemas[part.__name__], required)
    paths: dict[str, Json] = {}
    for operation in _OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tokenwire",
            "version": version("tokenwire"),
            "description": "Language models behind OpenAI's completions and chat APIs.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {str(status): _error(status) for status in _ERRORS},
            "headers": {
                name: {"description": meaning, "schema": {"type": "string"}}
                for name, meaning in _HEADERS.items()
            },
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An API key; none is asked for where the server has no keys.",
                }
            },
        },
        "security": [{"key": []}, {}],
    }


def _operation(operation: _Operation) -> Json:
    described: Json = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": {
            str(status): {"$ref": f"#/components/responses/{status}"} for status in operation.errors
        },
    }
    if operation.parameters:
        described["parameters"] = list(operation.parameters)
    if operation.body is not None:
        content: Json = {"schema": _reference(operation.body)}
        if operation.example is not None:
            content["example"] = operation.example
        described["requestBody"] = {"required": True, "content": {"application/json": content}}
    described["responses"]["200"] = _answer(operation)
    if not operation.needs_key:
        described["security"] = []
    return described


def _answer(operation: _Operation) -> Json:
    headers = ["x-request-id"]
    if operation.counts_tokens:
        headers.append("x-tokens-used")
    if operation.body is not None:
        headers += ["x-tokenwire-ignored", *_RATE_HEADERS]
    content: Json = {media: {"schema": {"type": "string"}} for media in operation.media}
    if "application/json" in content:
        answer = operation.answer
        content["application/json"] = {
            "schema": {"type": "object"} if answer is None else _reference(answer)
        }
    if operation.chunk is not None:
        events = "What each event holds, but for the last, whose data is [DONE]."
        schema = {**_reference(operation.chunk), "description": events}
        content["text/event-stream"] = {"schema": schema}
    return {
        "description": operation.summary,
        "headers": _header_references(headers),
        "content": content,
    }


def _error(status: int) -> Json:
    headers = ["x-request-id", *(["retry-after"] if status in (429, 503) else [])]
    error = {"message": _ERRORS[status], "type": "…", "param": None, "code": None}
    return {
        "description": _ERRORS[status],
        "headers": _header_references(headers),
        "content": {
            "application/json": {"schema": _reference(ErrorBody), "example": {"error": error}}
        },
    }


def _describe(
    schema: Json, required: Sequence[str], fields: Mapping[str, tuple[str, Json]]
) -> None:
    """Adds to a body's fields what types don't say: meaning, and the ranges that are checked later.

    `null` means absent everywhere, so the types require nothing; what must be there is told here.
    """
    for name, field in schema["properties"].items():
        meaning, constraints = fields[name]
        field["description"] = meaning
        _limit(field, constraints)
    _require(schema, required)


def _foreign(fields: ForeignFields) -> Json:
    """Fields of other servers, with the values that are taken."""
    return {
        name: {
            "description": f"Refused: {field.effect}; {field.remedy}.",
            "enum": [None, *field.neutral],
        }
        for name, field in fields.items()
    }


def _limit(field: Json, constraints: Json) -> None:
    """Narrows what the type of a field says, or replaces it."""
    for keyword, value in constraints.items():
        if keyword in _SAID_OF:
            _narrow(field, keyword, value)
        else:
            field[keyword] = value


def _narrow(part: Json, keyword: str, value: Any) -> None:
    """Says a keyword of all that it can be said of: "minLength" of strings, and of those in
    arrays."""
    for inner in (*part.get("anyOf", ()), part.get("items"), part.get("additionalProperties")):
        if inner:
            _narrow(inner, keyword, value)
    if part.get("type") in _SAID_OF[keyword]:
        narrower = max if keyword in ("minimum", "exclusiveMinimum") else min
        part[keyword] = narrower(value, part[keyword]) if keyword in part else value


def _require(schema: Json, names: Sequence[str]) -> None:
    """Fields that must be there, though their types have null."""
    schema["required"] = [*schema["required"], *names]
    for name in names:
        field = schema["properties"][name]
        del field["default"]
        field["anyOf"] = [part for part in field["anyOf"] if part != {"type": "null"}]


def _reference(of: type[Struct]) -> Json:
    return {"$ref": f"#/components/schemas/{of.__name__}"}


def _header_references(names: Sequence[str]) -> Json:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


_ENCODED = msgspec.json.encode(document())


async def openapi(request: Request) -> Response:
    """The same for everybody, so it is made once."""
    return Response(_ENCODED, media_type="application/json")
