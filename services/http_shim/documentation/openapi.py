"""OpenAPI document (GET /openapi.json), generated from the types of bodies and answers."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, get_args, get_type_hints

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from services.common.bounds import bounds_of
from services.http_shim.dialects.constraints import (
    JsonSchemaFormat,
    JsonSchemaSpec,
    StructuralTagFormat,
)
from services.http_shim.dialects.fields import STATED, keywords_of
from services.http_shim.dialects.foreign_fields import ForeignFields
from services.http_shim.dialects.generation import GenerationBody
from services.http_shim.dialects.messages.types import MessageError
from services.http_shim.dialects.ollama.types import OllamaError
from services.http_shim.dialects.tools import Typed
from services.http_shim.documentation.ollama_operations import OLLAMA_OPERATIONS
from services.http_shim.documentation.operation import Operation
from services.http_shim.documentation.operations import OPERATIONS
from services.http_shim.errors import ErrorBody
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["document", "openapi"]

Json = dict[str, Any]

_INTRODUCTION = (
    "Language models with OpenAI's APIs (completions, chats, responses, embeddings, files and "
    "batches), Anthropic's messages, Ollama's API if the operator allows it, rankings, scores and "
    "classes of texts, and routes for tokens. "
    "GET /v1/models lists the models with what they do."
)
_ERRORS: Mapping[int, str] = {
    400: "The request is invalid; `param` names the field.",
    401: "The API key is missing, unknown or revoked.",
    403: "The API key may not use the model or raise the priority.",
    404: "The model does not exist, or nothing serves it.",
    408: "The body did not arrive in time.",
    409: "Requests use the model.",
    413: "The body is too large.",
    429: "A limit of the API key or of the server is reached.",
    431: "The request's head is too large.",
    499: "An operator aborted the request.",
    500: "The server failed; its log has the details.",
    501: "The model or the server lacks the feature.",
    503: "The server is stopping or overloaded, or the model can't be reached.",
    504: "The request took too long.",
}

_NARROWED_TYPES: Mapping[str, Sequence[str]] = {
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
"""JSON types that a schema keyword narrows"""
_REQUIRED: Mapping[type[Struct], Sequence[str]] = {
    JsonSchemaFormat: ("json_schema",),
    JsonSchemaSpec: ("schema",),
    StructuralTagFormat: ("structures", "triggers"),
}
"""Fields of nested types that must be given. Their own errors say so, rather than the parser's"""
_HEADERS: Mapping[str, str] = {
    "x-request-id": "Id of the request in every log; the client's own if it sent a valid one.",
    "x-tokens-used": "Tokens of prompt and output; a trailer of a streamed answer.",
    "x-tokenwire-ignored": "Everything that was ignored: paths of unknown fields, paths of schema "
    "keywords that are not enforced, roles of messages that the chat template takes elsewhere, "
    "names of headers.",
    "retry-after": "Seconds after which a retry makes sense.",
    "x-ratelimit-limit-requests": "Requests per minute of the API key.",
    "x-ratelimit-remaining-requests": "Requests that the API key has left.",
    "x-ratelimit-reset-requests": "Time until all requests are available again: 20ms, 1.5s, 6m0s.",
    "x-ratelimit-limit-tokens": "Tokens per minute of the API key.",
    "x-ratelimit-remaining-tokens": "Tokens that the API key has left.",
    "x-ratelimit-reset-tokens": "Time until all tokens are available again.",
}
_OPERATIONS: Sequence[Operation] = (*OPERATIONS, *OLLAMA_OPERATIONS)
_RATE_HEADERS = [name for name in _HEADERS if name.startswith("x-ratelimit-")]


def document() -> Json:
    """Return the OpenAPI 3.1 document."""
    types = [part for each in _OPERATIONS for part in (each.body, each.answer, each.chunk)]
    errors = (ErrorBody, MessageError, OllamaError)
    _, schemas = msgspec.json.schema_components(
        [*dict.fromkeys(each for each in types if each is not None), *errors],
        ref_template="#/components/schemas/{name}",
    )
    for schema in schemas.values():
        for field in schema.get("properties", {}).values():
            _state(field, field.pop(STATED, {}))
    bodies = {each.body: each.required for each in _OPERATIONS if each.body is not None}
    for body, required in bodies.items():
        _require(schemas[body.__name__], required)
        if issubclass(body, GenerationBody):
            schemas[body.__name__]["properties"] |= _foreign(body.foreign)
    for part, required in _REQUIRED.items():
        _require(schemas[part.__name__], required)
    for name in ("structures", "triggers"):
        bounds = bounds_of(types_pb2.StructuralTag, name)
        _state(schemas[StructuralTagFormat.__name__]["properties"][name], keywords_of(bounds))
    for typed in Typed.__subclasses__():
        kinds = get_args(get_type_hints(typed)["type"])
        schemas[typed.__name__]["allOf"] = [_typed(kind, kinds) for kind in kinds]
    paths: dict[str, Json] = {}
    for operation in _OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tokenwire",
            "version": version("tokenwire"),
            "description": _INTRODUCTION,
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
                    "description": "API key; a server without keys needs none.",
                }
            },
        },
        "security": [{"key": []}, {}],
    }


def _operation(operation: Operation) -> Json:
    described: Json = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": {str(status): _refusal(operation, status) for status in operation.errors},
    }
    if operation.parameters:
        described["parameters"] = list(operation.parameters)
    if operation.body is not None:
        content: Json = {"schema": _reference(operation.body)}
        if operation.example is not None:
            content["example"] = operation.example
        described["requestBody"] = {"required": True, "content": {"application/json": content}}
    if operation.form is not None:
        fields = {
            name: {"type": "string", "description": of} for name, of in operation.form.items()
        }
        schema = {"type": "object", "required": [*fields], "properties": fields}
        form = {"multipart/form-data": {"schema": schema}}
        described["requestBody"] = {"required": True, "content": form}
    described["responses"]["200"] = _answer(operation)
    if not operation.needs_key:
        described["security"] = []
    return described


def _refusal(operation: Operation, status: int) -> Json:
    if operation.error is ErrorBody:
        return {"$ref": f"#/components/responses/{status}"}
    content = {"application/json": {"schema": _reference(operation.error)}}
    return {"description": _ERRORS[status], "content": content}


def _answer(operation: Operation) -> Json:
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
        schema = {**_reference(operation.chunk), "description": operation.last_event}
        content[operation.stream] = {"schema": schema}
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


def _foreign(fields: ForeignFields) -> Json:
    """Describe the unsupported fields of other servers, with the values that are accepted."""
    return {
        name: {
            "description": f"Not supported: it {field.effect}; {field.remedy}.",
            "enum": [None, *field.neutral],
        }
        for name, field in fields.items()
    }


def _state(field: Json, keywords: Json) -> None:
    """Add keywords to the schema of a field; those of no type replace the schema's own."""
    for keyword, value in keywords.items():
        if keyword not in _NARROWED_TYPES:
            field[keyword] = value
    for keyword, value in keywords.items():
        if keyword in _NARROWED_TYPES:
            _narrow(field, keyword, value)


def _narrow(part: Json, keyword: str, value: Any) -> None:
    """Add a keyword to all parts that it applies to: "minLength" to strings, also in arrays."""
    for inner in (*part.get("anyOf", ()), part.get("items"), part.get("additionalProperties")):
        if inner:
            _narrow(inner, keyword, value)
    if part.get("type") in _NARROWED_TYPES[keyword]:
        narrower = max if keyword in ("minimum", "exclusiveMinimum") else min
        part[keyword] = narrower(value, part[keyword]) if keyword in part else value


def _require(schema: Json, names: Sequence[str]) -> None:
    """Mark fields as required, and remove null from their types."""
    schema["required"] = [*schema["required"], *names]
    for name in names:
        field = schema["properties"][name]
        del field["default"]
        field["anyOf"] = [part for part in field["anyOf"] if part != {"type": "null"}]


def _typed(kind: str, kinds: Sequence[str]) -> Json:
    """Return the condition that an object of a type has the field of this name alone."""
    is_kind: Json = {"properties": {"type": {"const": kind}}}
    if kind != kinds[0]:
        is_kind["required"] = ["type"]
    fields = {each: {"type": "object" if each == kind else "null"} for each in kinds}
    return {"if": is_kind, "then": {"required": [kind], "properties": fields}}


def _reference(of: type[Struct]) -> Json:
    return {"$ref": f"#/components/schemas/{of.__name__}"}


def _header_references(names: Sequence[str]) -> Json:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def openapi(described: Json) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint of GET /openapi.json. described: the document."""
    encoded = msgspec.json.encode(described)

    async def answer(request: Request) -> Response:
        return Response(encoded, media_type="application/json")

    return answer
