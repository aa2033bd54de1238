"""The routes."""

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.http_shim.backend import Backend
from services.http_shim.completions import Completions
from services.http_shim.errors import handlers
from services.http_shim.exchange import ExchangeMiddleware
from services.http_shim.gate import Gate
from services.http_shim.models import Models
from services.http_shim.probes import Probes
from services.http_shim.tokens import Tokens
from tokenwire.errors import unimplemented

__all__ = ["create_app"]


def create_app(backend: Backend, gate: Gate, max_body_bytes: int) -> Starlette:
    """The shim in front of a tokenizer service."""
    completions = Completions(backend, gate, max_body_bytes)
    models = Models(backend)
    tokens = Tokens(backend, max_body_bytes)
    probes = Probes(backend, gate)
    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/completion", multi_model_completion, methods=["POST"]),
        Route("/v1/models", models.all),
        Route("/v1/models/{model:path}", models.one),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/tokenizer_info", tokens.info),
        Route("/health", probes.health),
        Route("/ready", probes.ready),
        Route("/metrics", probes.metrics),
    ]
    labels = {route.endpoint: route.path for route in reversed(routes)}  # the first path names it
    return Starlette(
        routes=routes,
        middleware=[Middleware(ExchangeMiddleware, labels=labels)],
        exception_handlers=handlers(),
    )


async def chat_completions(request: Request) -> Response:
    """POST /v1/chat/completions: not here yet."""
    unimplemented("POST /v1/chat/completions")


async def multi_model_completion(request: Request) -> Response:
    """POST /v1/completion: not here yet."""
    unimplemented("POST /v1/completion")
