"""ASGI application: routes and middleware.

The server passes HTTP requests only: it serves no WebSockets and runs no lifespan.
"""

from collections.abc import Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.types import ASGIApp

from services.common.accounts.keyring import Keyring
from services.common.accounts.ledger import UsageLedger
from services.common.network.hosts import AllowedHosts
from services.http_shim.backends.model_source import ModelSource
from services.http_shim.backends.status_history import StatusHistory
from services.http_shim.dialects.chat.read import read_chat
from services.http_shim.dialects.completions.read import read_completion
from services.http_shim.dialects.messages.read import read_counted_message, read_message
from services.http_shim.dialects.messages.types import TokenCount
from services.http_shim.dialects.messages.write import MESSAGE_ERRORS
from services.http_shim.dialects.ollama.write import OLLAMA_ERRORS
from services.http_shim.dialects.reading import Read
from services.http_shim.dialects.responses.types import InputTokenCount
from services.http_shim.documentation.openapi import document, openapi
from services.http_shim.documentation.page_policy import mcp_origins_of
from services.http_shim.documentation.pages import PAGES, page_routes
from services.http_shim.endpoints.adapters import Adapters
from services.http_shim.endpoints.background_responses import BackgroundResponses
from services.http_shim.endpoints.batches import Batches
from services.http_shim.endpoints.documents import Documents
from services.http_shim.endpoints.files import Files
from services.http_shim.endpoints.generation import GenerationEndpoint
from services.http_shim.endpoints.generator import Generator
from services.http_shim.endpoints.keys import Keys
from services.http_shim.endpoints.model_loading import ModelLoading
from services.http_shim.endpoints.models import Models
from services.http_shim.endpoints.multi_completion import MultiCompletion
from services.http_shim.endpoints.probes import Probes
from services.http_shim.endpoints.prompt_reader import PromptReader, always
from services.http_shim.endpoints.responses import ResponsesEndpoint
from services.http_shim.endpoints.stored_responses import StoredResponses
from services.http_shim.endpoints.token_counting import TokenCounting
from services.http_shim.endpoints.tokenization import Tokenization
from services.http_shim.endpoints.usage import UsageEndpoint
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
from services.http_shim.jobs.jobs import InnerJobs
from services.http_shim.jobs.jobs_client import JobsClient
from services.http_shim.ollama.routes import ollama_routes
from services.http_shim.settings import HttpShimSettings
from services.http_shim.vectors.endpoint import (
    CLASSIFY,
    EMBEDDINGS,
    POOLING,
    RERANK,
    SCORE,
    VectorApi,
    VectorEndpoint,
)

__all__ = ["create_app", "create_inner_app"]

_PUBLIC_PATHS = {
    "/health",
    "/ready",
    "/metrics",
    "/version",
    "/api/version",
    "/openapi.json",
    *PAGES,
}
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
_ERROR_FORMS: Mapping[str, ErrorForm] = {"/v1/messages": MESSAGE_ERRORS, "/api": OLLAMA_ERRORS}


def create_app(
    models: ModelSource,
    gate: Gate,
    settings: HttpShimSettings,
    keyring: Keyring | None,
    jobs: JobsClient,
    ledger: UsageLedger,
    history: StatusHistory,
) -> Starlette:
    """Return the application that serves `models`; without a keyring, no request needs a key."""
    parts = _Parts(models, gate, settings, jobs)
    bodies, prompts, stall = parts.bodies, parts.prompts, settings.stall_seconds
    completions = parts.generation(read_completion)
    chat = parts.generation(read_chat)
    responses = parts.responses(BackgroundResponses(jobs, gate, stall))
    stored_responses = StoredResponses(jobs, gate, stall)
    message_tokens = TokenCounting(always(read_counted_message), TokenCount, models, prompts)
    response_tokens = TokenCounting(responses.prepare_count, InputTokenCount, models, prompts)
    multi_completion = MultiCompletion(models, gate, bodies)
    model_cards = Models(models)
    model_loading = ModelLoading(models, bodies)
    tokenization = Tokenization(models, prompts)
    adapters = Adapters(models, bodies, is_allowed=settings.adapter_routes)
    probes = Probes(models, gate, jobs, history)
    files, batches = Files(jobs), Batches(jobs, bodies)
    keys, usage = Keys(jobs, keyring, ledger), UsageEndpoint(jobs, keyring, ledger)
    described = document()
    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/messages", parts.generation(read_message), methods=["POST"]),
        Route("/v1/responses", responses, methods=["POST"]),
        *parts.vector_routes(),
        Route("/completions", completions, methods=["POST"]),
        Route("/chat/completions", chat, methods=["POST"]),
        Route("/v1/files", files.create, methods=["POST"]),
        Route("/v1/files", files.all),
        Route("/v1/files/{file_id}", files.one),
        Route("/v1/files/{file_id}", files.delete, methods=["DELETE"]),
        Route("/v1/files/{file_id}/content", files.content),
        Route("/v1/batches", batches.create, methods=["POST"]),
        Route("/v1/batches", batches.all),
        Route("/v1/batches/{batch_id}", batches.one),
        Route("/v1/batches/{batch_id}/cancel", batches.cancel, methods=["POST"]),
        Route("/v1/keys", keys.all),
        Route("/v1/usage", usage.find),
        Route("/v1/organization/usage/completions", usage.find),
        Route("/v1/messages/count_tokens", message_tokens.count, methods=["POST"]),
        Route("/v1/responses/input_tokens", response_tokens.count, methods=["POST"]),
        Route("/v1/responses/{response_id}", stored_responses.get),
        Route("/v1/responses/{response_id}", stored_responses.delete, methods=["DELETE"]),
        Route("/v1/responses/{response_id}/cancel", stored_responses.cancel, methods=["POST"]),
        Route("/v1/responses/{response_id}/input_items", stored_responses.input_items),
        Route("/v1/completion", multi_completion, methods=["POST"]),
        Route("/v1/models", model_cards.all),
        Route("/v1/models/load", model_loading.load, methods=["POST"]),
        Route("/v1/models/unload", model_loading.unload, methods=["POST"]),
        Route("/v1/models/{model:path}", model_cards.one),
        Route("/v1/load_lora_adapter", adapters.load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", adapters.unload, methods=["POST"]),
        Route("/tokenize", tokenization.tokenize, methods=["POST"]),
        Route("/detokenize", tokenization.detokenize, methods=["POST"]),
        Route("/apply-template", tokenization.apply_template, methods=["POST"]),
        Route("/tokenizer_info", tokenization.info),
        Route("/openapi.json", openapi(described)),
        Route("/health", probes.health),
        Route("/ready", probes.ready),
        *([] if settings.metrics_port else [Route("/metrics", probes.metrics)]),
        Route("/status.json", probes.status),
        Route("/version", probes.version),
        *page_routes(mcp_origins_of(settings.mcp_origins), described),
        *(parts.ollama_routes(gate) if settings.ollama else ()),
    ]
    names = [name.strip() for name in settings.allowed_hosts.split(",") if name.strip()]
    middleware = [
        Middleware(ExchangeMiddleware, routes=routes, error_forms=_ERROR_FORMS, ledger=ledger),
        Middleware(HostMiddleware, allowed=AllowedHosts(settings.host, names)),
    ]
    if origins := origins_of(settings.cors_origins):
        middleware.append(cors(origins))
    middleware.append(Middleware(FailureMiddleware))
    if keyring is not None:
        middleware.append(Middleware(AccessMiddleware, keyring=keyring, public=_PUBLIC_PATHS))
    middleware.append(Middleware(SchedulingMiddleware, trusts_headers=settings.trusts_headers))
    return Starlette(routes=routes, middleware=middleware, exception_handlers=exception_handlers())


def create_inner_app(
    models: ModelSource,
    gate: Gate,
    settings: HttpShimSettings,
    jobs: InnerJobs,
    admission: Callable[[ASGIApp], ASGIApp],
    ledger: UsageLedger,
) -> Starlette:
    """Return the application that the jobs service calls for batches and background responses.

    admission: innermost middleware, which sets account, tenant and priority of an exchange.
    """
    parts = _Parts(models, gate, settings, jobs)
    routes = [
        Route("/v1/completions", parts.generation(read_completion), methods=["POST"]),
        Route("/v1/chat/completions", parts.generation(read_chat), methods=["POST"]),
        Route("/v1/messages", parts.generation(read_message), methods=["POST"]),
        Route("/v1/responses", parts.responses(None), methods=["POST"]),
        *parts.vector_routes(),
    ]
    middleware = [
        Middleware(ExchangeMiddleware, routes=routes, error_forms=_ERROR_FORMS, ledger=ledger),
        Middleware(FailureMiddleware),
        Middleware(admission),
    ]
    return Starlette(routes=routes, middleware=middleware, exception_handlers=exception_handlers())


class _Parts:
    """The parts that the endpoints of an application share."""

    def __init__(
        self, models: ModelSource, gate: Gate, settings: HttpShimSettings, jobs: InnerJobs
    ) -> None:
        self.bodies = BodyReader(settings.max_body_bytes, settings.max_held_bytes)
        fetcher = ImageFetcher(settings.image_sources) if settings.fetch_images else None
        self.prompts = PromptReader(self.bodies, Documents(jobs), fetcher)
        self._models = models
        self._gate = gate
        self._jobs = jobs
        self._generator = Generator(models, gate, self.prompts)
        self._stall_seconds = settings.stall_seconds

    def generation(self, read: Read) -> GenerationEndpoint:
        """Return the endpoint of a dialect."""
        stall = self._stall_seconds
        return GenerationEndpoint(always(read), self.prompts, self._generator, stall)

    def responses(self, background: BackgroundResponses | None) -> ResponsesEndpoint:
        """Return the endpoint of responses, as it says."""
        stall = self._stall_seconds
        return ResponsesEndpoint(self._jobs, background, self.prompts, self._generator, stall)

    def ollama_routes(self, gate: Gate) -> list[Route]:
        """Return the routes of Ollama's API."""
        stall = self._stall_seconds
        return ollama_routes(self._models, gate, self.prompts, self._generator, stall)

    def vector_routes(self) -> list[Route]:
        """Return the routes that make vectors."""
        return [
            Route(
                path, VectorEndpoint(api, self._models, self._gate, self.bodies), methods=["POST"]
            )
            for path, api in _VECTOR_PATHS.items()
        ]
