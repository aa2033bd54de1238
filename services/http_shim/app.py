"""ASGI application: routes and middleware.

The server passes HTTP requests only: it serves no WebSockets and runs no lifespan.
"""

import dataclasses
import sqlite3
from collections.abc import Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route

from services.common.accounts.keyring import Keyring
from services.common.network.hosts import AllowedHosts
from services.common.settings import StartupError
from services.http_shim.backends.model_source import ModelSource
from services.http_shim.batches.batch_runner import BatchRunner
from services.http_shim.batches.inner_calls import CreatorMiddleware
from services.http_shim.dialects.chat.read import read_chat
from services.http_shim.dialects.completions.read import read_completion
from services.http_shim.dialects.messages.read import read_counted_message, read_message
from services.http_shim.dialects.messages.types import TokenCount
from services.http_shim.dialects.messages.write import MESSAGE_ERRORS
from services.http_shim.dialects.responses.types import InputTokenCount
from services.http_shim.dialects.responses.write import interrupted_response
from services.http_shim.documentation.openapi import openapi
from services.http_shim.documentation.pages import PAGES, page_routes
from services.http_shim.documents.document_reader import DocumentReader
from services.http_shim.endpoints.adapters import Adapters
from services.http_shim.endpoints.background_responses import BackgroundResponses
from services.http_shim.endpoints.batches import Batches
from services.http_shim.endpoints.documents import Documents
from services.http_shim.endpoints.files import Files
from services.http_shim.endpoints.generation import GenerationEndpoint
from services.http_shim.endpoints.generator import Generator
from services.http_shim.endpoints.models import Models
from services.http_shim.endpoints.multi_completion import MultiCompletion
from services.http_shim.endpoints.probes import Probes
from services.http_shim.endpoints.prompt_reader import PromptReader, always
from services.http_shim.endpoints.response_keeper import ResponseKeeper
from services.http_shim.endpoints.responses import ResponsesEndpoint
from services.http_shim.endpoints.stored_responses import StoredResponses
from services.http_shim.endpoints.token_counting import TokenCounting
from services.http_shim.endpoints.tokenization import Tokenization
from services.http_shim.errors import ErrorForm
from services.http_shim.http.access import AccessMiddleware
from services.http_shim.http.body import BodyReader
from services.http_shim.http.cors import cors, origins_of
from services.http_shim.http.exchange import ExchangeMiddleware
from services.http_shim.http.failures import FailureMiddleware, exception_handlers
from services.http_shim.http.gate import Gate
from services.http_shim.http.host_header import HostMiddleware
from services.http_shim.http.scheduling import SchedulingMiddleware
from services.http_shim.images.image_fetcher import ImageFetcher
from services.http_shim.settings import HttpShimSettings
from services.http_shim.stored.database_guard import StoreUnavailableError
from services.http_shim.stored.file_store import FileStore
from services.http_shim.stored.response_store import ResponseStore
from services.http_shim.vectors.endpoint import (
    CLASSIFY,
    EMBEDDINGS,
    POOLING,
    RERANK,
    SCORE,
    VectorApi,
    VectorEndpoint,
)

__all__ = ["create_app"]

_PUBLIC_PATHS = {"/health", "/ready", "/metrics", "/version", "/openapi.json", *PAGES}
"""Paths that need no key"""
_VECTOR_PATHS: Mapping[str, VectorApi[Any, Any, Any]] = {
    "/v1/embeddings": EMBEDDINGS,
    "/embeddings": EMBEDDINGS,
    "/v1/rerank": RERANK,
    "/rerank": RERANK,
    "/v1/score": SCORE,
    "/score": SCORE,
    "/v1/classify": CLASSIFY,
    "/classify": CLASSIFY,
    "/v1/pooling": POOLING,
    "/pooling": POOLING,
}
_ERROR_FORMS: Mapping[str, ErrorForm] = {"/v1/messages": MESSAGE_ERRORS}
_DAY = 24 * 60 * 60


def create_app(
    models: ModelSource,
    gate: Gate,
    settings: HttpShimSettings,
    keyring: Keyring | None,
    files: FileStore,
    runner: BatchRunner,
) -> Starlette:
    """Return the application that serves `models`; without a keyring, no request needs a key.

    runner: runs the batches of `files` by its endpoints.
    """
    bodies = BodyReader(settings.max_body_bytes, settings.max_held_bytes)
    fetcher = ImageFetcher(settings.image_sources) if settings.fetch_images else None
    documents = Documents(DocumentReader(), files)
    prompts = PromptReader(bodies, documents, fetcher)
    stall = settings.stall_seconds
    shared = (prompts, Generator(models, gate, prompts), stall)
    completions = GenerationEndpoint(always(read_completion), *shared)
    chat = GenerationEndpoint(always(read_chat), *shared)
    messages = GenerationEndpoint(always(read_message), *shared)
    store = _response_store(settings)
    keeper = ResponseKeeper(store)
    background = BackgroundResponses(settings.max_background, settings.max_event_bytes, stall)
    responses = ResponsesEndpoint(keeper, background, *shared)
    stored_responses = StoredResponses(store, background)
    message_tokens = TokenCounting(always(read_counted_message), TokenCount, models, prompts)
    response_tokens = TokenCounting(responses.prepare_count, InputTokenCount, models, prompts)
    multi_completion = MultiCompletion(models, gate, bodies)
    model_cards = Models(models)
    tokenization = Tokenization(models, prompts)
    adapters = Adapters(models, bodies, is_allowed=settings.adapter_routes)
    probes = Probes(models, gate, [files.guard.check, store.guard.check])
    vector_routes = [
        Route(path, VectorEndpoint(api, models, gate, bodies), methods=["POST"])
        for path, api in _VECTOR_PATHS.items()
    ]
    batched = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/responses", responses, methods=["POST"]),
        *vector_routes,
    ]
    runner.app = _batch_app(batched)
    kept_files, batches = Files(files, settings.max_file_bytes), Batches(files, runner, bodies)
    routes = [
        *batched,
        Route("/completions", completions, methods=["POST"]),
        Route("/chat/completions", chat, methods=["POST"]),
        Route("/v1/files", kept_files.create, methods=["POST"]),
        Route("/v1/files", kept_files.all),
        Route("/v1/files/{file_id}", kept_files.one),
        Route("/v1/files/{file_id}", kept_files.delete, methods=["DELETE"]),
        Route("/v1/files/{file_id}/content", kept_files.content),
        Route("/v1/batches", batches.create, methods=["POST"]),
        Route("/v1/batches", batches.all),
        Route("/v1/batches/{batch_id}", batches.one),
        Route("/v1/batches/{batch_id}/cancel", batches.cancel, methods=["POST"]),
        Route("/v1/messages/count_tokens", message_tokens.count, methods=["POST"]),
        Route("/v1/responses/input_tokens", response_tokens.count, methods=["POST"]),
        Route("/v1/responses/{response_id}", stored_responses.get),
        Route("/v1/responses/{response_id}", stored_responses.delete, methods=["DELETE"]),
        Route("/v1/responses/{response_id}/cancel", stored_responses.cancel, methods=["POST"]),
        Route("/v1/responses/{response_id}/input_items", stored_responses.input_items),
        Route("/v1/completion", multi_completion, methods=["POST"]),
        Route("/v1/models", model_cards.all),
        Route("/v1/models/{model:path}", model_cards.one),
        Route("/v1/load_lora_adapter", adapters.load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", adapters.unload, methods=["POST"]),
        Route("/tokenize", tokenization.tokenize, methods=["POST"]),
        Route("/detokenize", tokenization.detokenize, methods=["POST"]),
        Route("/apply-template", tokenization.apply_template, methods=["POST"]),
        Route("/tokenizer_info", tokenization.info),
        Route("/openapi.json", openapi),
        Route("/health", probes.health),
        Route("/ready", probes.ready),
        *([] if settings.metrics_port else [Route("/metrics", probes.metrics)]),
        Route("/status.json", probes.status),
        Route("/version", probes.version),
        *page_routes(),
    ]
    names = [name.strip() for name in settings.allowed_hosts.split(",") if name.strip()]
    middleware = [
        Middleware(ExchangeMiddleware, routes=routes, error_forms=_ERROR_FORMS),
        Middleware(HostMiddleware, allowed=AllowedHosts(settings.host, names)),
    ]
    if origins := origins_of(settings.cors_origins):
        middleware.append(cors(origins))
    middleware.append(Middleware(FailureMiddleware))
    if keyring is not None:
        middleware.append(Middleware(AccessMiddleware, keyring=keyring, public=_PUBLIC_PATHS))
    middleware.append(Middleware(SchedulingMiddleware, trusts_headers=settings.trusts_headers))
    return Starlette(routes=routes, middleware=middleware, exception_handlers=exception_handlers())


def _batch_app(routes: list[Route]) -> Starlette:
    """Return the application that requests of batches call."""
    middleware = [
        Middleware(ExchangeMiddleware, routes=routes, error_forms=_ERROR_FORMS),
        Middleware(FailureMiddleware),
        Middleware(CreatorMiddleware),
    ]
    return Starlette(routes=routes, middleware=middleware, exception_handlers=exception_handlers())


def _response_store(settings: HttpShimSettings) -> ResponseStore:
    """Open the store; responses that an earlier process did not end are failed.

    Raises StartupError.
    """
    path = settings.response_store
    try:
        store = ResponseStore(path, settings.max_response_bytes, settings.response_days * _DAY)
        for each in store.interrupted():
            failed = interrupted_response(each.response)
            store.put(dataclasses.replace(each, response=failed, is_running=False))
        return store
    except (sqlite3.Error, StoreUnavailableError) as error:
        raise StartupError(f"--response-store {path} can't be opened: {error}.") from None
