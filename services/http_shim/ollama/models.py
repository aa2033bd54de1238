"""Endpoints /api/tags, /api/show, /api/ps and /api/version, and those that are not supported."""

import hashlib
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from typing import Annotated, Any

import grpc
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from services.http_shim.backends.model_source import ListedModel, ModelSource
from services.http_shim.dialects.bodies import body_of
from services.http_shim.dialects.fields import about
from services.http_shim.dialects.ollama.types import OllamaName
from services.http_shim.endpoints.model_cards import load_status, model_card
from services.http_shim.http.access import authorized_model
from services.http_shim.http.body import BodyReader, json_response
from services.http_shim.http.exchange import exchange_of
from services.http_shim.ollama.model_names import existing_name, naming, tagged
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import models_pb2

__all__ = [
    "OLLAMA_VERSION",
    "OllamaDetails",
    "OllamaModels",
    "OllamaProcesses",
    "OllamaShown",
    "OllamaTags",
    "OllamaVersion",
    "ShowBody",
]

OLLAMA_VERSION = "0.13.0"
"""Version of Ollama whose API this is; some clients refuse an older one"""
_FOR_EVER = "2318-01-01T00:00:00Z"
"""Ollama's `expires_at` of a model that stays, about as late as its clock can be"""
_BILLION = 1e9


class OllamaDetails(Struct):
    """`details` of a model; empty = not known."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    """Such as 135M or 1.7B"""
    quantization_level: str
    context_length: int | UnsetType = UNSET
    embedding_length: int | UnsetType = UNSET


class OllamaTag(Struct):
    """A model of /api/tags."""

    name: str
    model: str
    modified_at: str
    size: int
    """Bytes of its weights"""
    digest: str
    details: OllamaDetails
    capabilities: list[str]


class OllamaTags(Struct):
    """The answer of /api/tags."""

    models: list[OllamaTag]


class OllamaProcess(Struct):
    """A loaded model of /api/ps."""

    name: str
    model: str
    size: int
    """Bytes in memory"""
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaProcesses(Struct):
    """The answer of /api/ps."""

    models: list[OllamaProcess]


class OllamaShown(Struct):
    """The answer of /api/show."""

    modelfile: str
    parameters: str
    template: str
    """The chat template, in Jinja"""
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    """Some of completion, tools, thinking, vision, insert and embedding"""
    modified_at: str


class OllamaVersion(Struct):
    """The answer of /api/version."""

    version: Annotated[str, about("Version of Ollama's API.")]
    tokenwire: Annotated[str, about("Version of this server.")]


class ShowBody(Struct):
    """The body of POST /api/show."""

    model: OllamaName = None
    name: Annotated[str | None, about("Another name of model.")] = None
    verbose: Annotated[bool | None, about("No effect.", default=False)] = None
    system: Annotated[Any, about("No effect.")] = None
    template: Annotated[Any, about("No effect.")] = None
    options: Annotated[Any, about("No effect.")] = None


class OllamaModels:
    """The endpoints that describe models."""

    def __init__(self, models: ModelSource, bodies: BodyReader) -> None:
        self._models = models
        self._bodies = bodies

    async def version(self, request: Request) -> Response:
        """Return the version of the API."""
        return json_response(OllamaVersion(OLLAMA_VERSION, version("tokenwire")))

    async def tags(self, request: Request) -> Response:
        """List the models."""
        listed = [each for each in await self._models.listed() if not each.row.is_placeholder]
        return json_response(OllamaTags([_tag(each) for each in listed]))

    async def ps(self, request: Request) -> Response:
        """List the models in memory."""
        loaded = [each for each in await self._models.listed() if _is_loaded(each)]
        return json_response(OllamaProcesses([_process(each) for each in loaded]))

    async def show(self, request: Request) -> Response:
        """Describe a model."""
        parse = partial(body_of, ShowBody)
        exchange = exchange_of(request.scope)
        read = self._bodies.read(request.scope, request.receive, parse)
        body, exchange.ignored = await read
        named = body.model or body.name or ""
        with naming(named):
            name = await existing_name(self._models, named)
            listed = await self._models.listed_as(name)
            served = await authorized_model(exchange, self._models, name)
            template = ""
            if _is_loaded(listed):  # a model is not loaded to be described
                with served.connection.lease() as backend:
                    template = (await backend.tokenizer(served.backend_name)).chat_template
        return json_response(_shown(listed, template))

    async def unsupported(self, request: Request) -> Response:
        """Refuse what this server does not do."""
        raise ServiceError(
            grpc.StatusCode.UNIMPLEMENTED,
            "UNSUPPORTED",
            f"{request.url.path} is not supported: this server makes, copies and publishes no "
            "models. Pull one, or start the server with its files.",
        )


def _is_loaded(listed: ListedModel) -> bool:
    if listed.row.on_demand:
        return load_status(listed.state, on_demand=True).value == "loaded"
    return listed.model is not None


def _tag(listed: ListedModel) -> OllamaTag:
    name = tagged(listed.row.full_name)
    facts = _facts(listed)
    return OllamaTag(
        name=name,
        model=name,
        modified_at=_modified(listed),
        size=facts.num_bytes,
        digest=_digest(listed),
        details=_details(listed),
        capabilities=_capabilities(listed.model),
    )


def _process(listed: ListedModel) -> OllamaProcess:
    name, state = tagged(listed.row.full_name), listed.state
    size = _facts(listed).num_bytes
    if state is not None and state.HasField("memory_bytes"):
        size = state.memory_bytes
    has_end = state is not None and state.HasField("idle_until")
    return OllamaProcess(
        name=name,
        model=name,
        size=size,
        digest=_digest(listed),
        details=_details(listed),
        expires_at=_time(state.idle_until) if state is not None and has_end else _FOR_EVER,
        size_vram=0,
        context_length=_context_length(listed),
    )


def _shown(listed: ListedModel, template: str) -> OllamaShown:
    facts, name = _facts(listed), tagged(listed.row.full_name)
    family = facts.family or "unknown"
    info: dict[str, Any] = {
        "general.architecture": family,
        "general.basename": listed.row.full_name,
        "general.parameter_count": facts.parameters,
        f"{family}.context_length": _context_length(listed),
        f"{family}.embedding_length": facts.width,
        f"{family}.block_count": facts.layers,
    }
    return OllamaShown(
        modelfile=f'# Modelfile generated by "ollama show"\nFROM {name}\n',
        parameters="",
        template=template,
        details=_details(listed),
        model_info=info,
        capabilities=_capabilities(listed.model),
        modified_at=_modified(listed),
    )


def _facts(listed: ListedModel) -> models_pb2.CheckpointFacts:
    return models_pb2.CheckpointFacts() if listed.model is None else listed.model.checkpoint


def _details(listed: ListedModel) -> OllamaDetails:
    facts, model = _facts(listed), listed.model
    return OllamaDetails(
        parent_model=listed.row.adapter_of or ("" if model is None else model.parent),
        format=facts.format,
        family=facts.family,
        families=[facts.family] if facts.family else [],
        parameter_size=_size(facts.parameters),
        quantization_level=facts.quantization,
        context_length=_context_length(listed) or UNSET,
        embedding_length=facts.width or UNSET,
    )


def _context_length(listed: ListedModel) -> int:
    return model_card(listed).max_model_len or 0


def _size(parameters: int) -> str:
    """Return a number of parameters as people write it."""
    if not parameters:
        return ""
    if parameters < _BILLION:
        return f"{parameters / 1e6:.4g}M"
    return f"{parameters / _BILLION:.1f}B"


def _capabilities(model: models_pb2.Model | None) -> list[str]:
    if model is None:
        return ["completion"]  # the model was never loaded
    has = {
        "embedding": model.embedding_width > 0,
        "completion": not model.only_embeds,
        "tools": model.chat and model.tools,
        "insert": model.infill,
        "vision": model.images,
        "thinking": model.chat and model.reasoning,
    }
    return [name for name, is_there in has.items() if is_there]


def _modified(listed: ListedModel) -> str:
    created = listed.row.created or (0 if listed.model is None else listed.model.created)
    return _time(created)


def _time(seconds: float) -> str:
    """Return a Unix time in RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _digest(listed: ListedModel) -> str:
    """Return a digest of the model's name, weights and software: that of its files is not known."""
    fingerprint = "" if listed.model is None else listed.model.system_fingerprint
    return hashlib.sha256(f"{listed.row.full_name}\n{fingerprint}".encode()).hexdigest()
