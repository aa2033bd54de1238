"""The routes."""

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route

from services.http_shim.access import AccessMiddleware
from services.http_shim.chat import Chat
from services.http_shim.completions import Completions
from services.http_shim.exchange import ExchangeMiddleware
from services.http_shim.gate import Gate
from services.http_shim.handlers import handlers
from services.http_shim.keys import Keyring
from services.http_shim.models import Models
from services.http_shim.multi_completion import MultiCompletion
from services.http_shim.openapi import openapi
from services.http_shim.pages import PAGES, page_routes
from services.http_shim.probes import Probes
from services.http_shim.served import ModelSource
from services.http_shim.tokens import Tokens

__all__ = ["create_app"]

_FREE = {"/health", "/ready", "/metrics", "/openapi.json", *PAGES}
"""What needs no key"""


def create_app(
    models: ModelSource,
    gate: Gate,
    max_body_bytes: int,
    keyring: Keyring | None,
    stall_seconds: float,
) -> Starlette:
    """The shim in front of its models; without a keyring it asks nobody for a key."""
    completions = Completions(models, gate, max_body_bytes, stall_seconds)
    chat = Chat(models, gate, max_body_bytes, stall_seconds)
    multi_completion = MultiCompletion(models, gate, max_body_bytes)
    lists = Models(models)
    tokens = Tokens(models, max_body_bytes)
    probes = Probes(models, gate)
    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/chat/completions", chat, methods=["POST"]),
        Route("/v1/completion", multi_completion, methods=["POST"]),
        Route("/v1/models", lists.all),
        Route("/v1/models/{model:path}", lists.one),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/tokenizer_info", tokens.info),
        Route("/openapi.json", openapi),
        Route("/health", probes.health),
        Route("/ready", probes.ready),
        Route("/metrics", probes.metrics),
        *page_routes(),
    ]
    middleware = [Middleware(ExchangeMiddleware, routes=routes)]
    if keyring is not None:
        middleware.append(Middleware(AccessMiddleware, keyring=keyring, free=_FREE))
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers())
