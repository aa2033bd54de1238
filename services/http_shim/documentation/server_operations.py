"""Operations on models, adapters, tokens, keys and usage, and probes."""

from collections.abc import Sequence
from functools import partial

from services.http_shim.dialects.chat.types import TemplateBody
from services.http_shim.documentation.operation import POST_ERRORS, Operation, get, post
from services.http_shim.endpoints.adapters import LoadAdapterBody, UnloadAdapterBody
from services.http_shim.endpoints.keys import KeyList
from services.http_shim.endpoints.model_cards import ModelCard, ModelList
from services.http_shim.endpoints.model_loading import LoadBody, UnloadBody
from services.http_shim.endpoints.model_statuses import Status
from services.http_shim.endpoints.probes import State, Version
from services.http_shim.endpoints.tokenization import (
    AppliedTemplate,
    DetokenizeBody,
    Detokenized,
    TokenizeBody,
    Tokenized,
    TokenizerInfo,
)
from services.http_shim.endpoints.usage import UsagePage

__all__ = ["SERVER_OPERATIONS"]

_probe = partial(get, needs_key=False)
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
SERVER_OPERATIONS: Sequence[Operation] = (
    get(
        path="/v1/models",
        name="listModels",
        summary="List the models.",
        answer=ModelList,
        errors=(401, 503),
    ),
    get(
        path="/v1/models/{model}",
        name="retrieveModel",
        summary="Describe a model, by its id, an alias, or id:variant. Ids may contain slashes.",
        answer=ModelCard,
        errors=(401, 404, 503),
        parameters=[
            {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        ],
    ),
    post(
        path="/v1/models/load",
        name="loadModel",
        summary="Load a model on demand, and answer with its card once it serves. For operators: "
        "with API keys, the key must be an admin's.",
        body=LoadBody,
        answer=ModelCard,
        required=("model",),
        example={"model": "small", "keep_alive": "30m"},
    ),
    post(
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
    post(
        path="/v1/load_lora_adapter",
        name="loadLoraAdapter",
        summary="Load a LoRA adapter on all engines of its model; only with --adapter-routes.",
        body=LoadAdapterBody,
        required=("lora_name", "lora_path"),
        media=("text/plain",),
        example={"lora_name": "sql", "lora_path": "/adapters/sql"},
    ),
    post(
        path="/v1/unload_lora_adapter",
        name="unloadLoraAdapter",
        summary="Unload a LoRA adapter; only with --adapter-routes.",
        body=UnloadAdapterBody,
        required=("lora_name",),
        media=("text/plain",),
        example={"lora_name": "sql"},
    ),
    post(
        path="/tokenize",
        name="tokenize",
        summary="Encode text or messages to token ids.",
        body=TokenizeBody,
        answer=Tokenized,
        example={"prompt": "def add(a, b):", "return_token_strs": True},
    ),
    get(
        path="/v1/keys",
        name="listKeys",
        summary="List the API keys with their limits and usage, for an admin key.",
        answer=KeyList,
        errors=(400, 401, 403),
        parameters=[{"name": "after", "in": "query", "schema": {"type": "string"}}],
    ),
    *(
        get(
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
    post(
        path="/detokenize",
        name="detokenize",
        summary="Decode token ids to text.",
        body=DetokenizeBody,
        required=("tokens",),
        answer=Detokenized,
        example={"tokens": [1, 2, 3]},
    ),
    post(
        path="/apply-template",
        name="applyTemplate",
        summary="Render messages to the text of their prompt.",
        body=TemplateBody,
        required=("messages",),
        answer=AppliedTemplate,
        example={"messages": [{"role": "user", "content": "What is a mutex?"}]},
    ),
    get(
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
    get(
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
