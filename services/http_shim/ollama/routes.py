"""Routes of Ollama's API."""

from collections.abc import Callable

from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from services.http_shim.backends.model_source import ModelSource
from services.http_shim.dialects.ollama.read import read_ollama_chat, read_ollama_generation
from services.http_shim.endpoints.generator import Generator
from services.http_shim.endpoints.prompt_reader import PromptReader
from services.http_shim.http.gate import Gate
from services.http_shim.ollama.embeddings import EMBED, EMBEDDINGS, OllamaEmbeddings
from services.http_shim.ollama.generation import OllamaGeneration
from services.http_shim.ollama.models import OllamaModels
from services.http_shim.ollama.pulls import OllamaPulls

__all__ = ["ollama_routes"]

_JSON = b"application/json"
_UNSUPPORTED = ("/api/create", "/api/copy", "/api/push")


def ollama_routes(
    models: ModelSource,
    gate: Gate,
    prompts: PromptReader,
    generator: Generator,
    stall_seconds: float,
) -> list[Route]:
    """Return the routes."""
    bodies = prompts.bodies
    described, pulls = OllamaModels(models, bodies), OllamaPulls(models, bodies)
    posts: dict[str, ASGIApp] = {
        "/api/chat": OllamaGeneration(read_ollama_chat, models, prompts, generator, stall_seconds),
        "/api/generate": OllamaGeneration(
            read_ollama_generation, models, prompts, generator, stall_seconds
        ),
        "/api/embed": OllamaEmbeddings(EMBED, models, gate, bodies),
        "/api/embeddings": OllamaEmbeddings(EMBEDDINGS, models, gate, bodies),
    }
    return [
        *(_post(path, endpoint) for path, endpoint in posts.items()),
        _post("/api/show", described.show),
        *(_post(path, described.unsupported) for path in _UNSUPPORTED),
        _post("/api/pull", pulls.pull),
        _with_body("/api/delete", pulls.delete, "DELETE"),
        Route("/api/tags", described.tags),
        Route("/api/ps", described.ps),
        Route("/api/version", described.version),
    ]


def _post(path: str, endpoint: Callable[..., object]) -> Route:
    return _with_body(path, endpoint, "POST")


def _with_body(path: str, endpoint: Callable[..., object], method: str) -> Route:
    return Route(path, endpoint, methods=[method], middleware=[Middleware(_AnyContentType)])


class _AnyContentType:
    """An endpoint whose bodies are JSON, whatever `curl -d` says.

    A request from a web page keeps its content type: browsers send some types across origins
    without a preflight, and they name the origin.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        names = {name for name, _ in headers}
        if not names & {b"origin", b"sec-fetch-site"}:
            kept = [each for each in headers if each[0] != b"content-type"]
            scope["headers"] = [*kept, (b"content-type", _JSON)]
        await self._app(scope, receive, send)
