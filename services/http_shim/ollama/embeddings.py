"""Endpoints POST /api/embed and /api/embeddings."""

import math
import time
from array import array
from collections.abc import Sequence
from typing import Annotated, TypeVar

from msgspec import Struct
from starlette.responses import Response

from services.http_shim.backends.backend import Backend
from services.http_shim.dialects.fields import JsonObject, Uint32, about, read_keep_alive
from services.http_shim.dialects.ollama.types import OllamaName
from services.http_shim.endpoints.stream_sender import AsgiCall
from services.http_shim.http.body import json_response
from services.http_shim.http.exchange import Exchange, exchange_of
from services.http_shim.ollama.loading import load_model
from services.http_shim.ollama.model_names import existing_name, naming
from services.http_shim.vectors.embeddings import MANY_TEXTS, VectorBody, rows_of
from services.http_shim.vectors.endpoint import VectorApi, VectorEndpoint
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = [
    "EMBED",
    "EMBEDDINGS",
    "OllamaEmbedBody",
    "OllamaEmbeddingBody",
    "OllamaEmbeddings",
    "OneVector",
    "Vectors",
]

_UNIT = 1e-3  # difference of a vector's length from 1 that rounding explains


class OllamaVectorBody(VectorBody):
    """Fields that both bodies share."""

    model: OllamaName = None
    options: Annotated[JsonObject | None, about("No effect: texts have no sampling.")] = None

    @property
    def texts(self) -> list[str]:
        """The texts; none = the model is only loaded."""
        return []


class OllamaEmbedBody(OllamaVectorBody):
    """The body of POST /api/embed."""

    input: Annotated[
        str | Annotated[list[str], MANY_TEXTS] | None,
        about("A text, or several; absent or empty = load the model."),
    ] = None
    truncate: Annotated[
        bool | None, about("Cut texts that exceed the context, else refuse them.", default=True)
    ] = None
    dimensions: Annotated[
        Uint32 | None, about("Numbers of a vector to keep, from the first on; 0 = all.")
    ] = None

    @property
    def texts(self) -> list[str]:
        """The texts; an empty one alone counts as none."""
        if isinstance(self.input, str):
            return [self.input] if self.input else []
        return self.input or []


class OllamaEmbeddingBody(OllamaVectorBody):
    """The body of POST /api/embeddings, which Ollama has replaced by /api/embed."""

    prompt: Annotated[str | None, about("A text; absent or empty = load the model.")] = None

    @property
    def texts(self) -> list[str]:
        """The text, or none."""
        return [self.prompt] if self.prompt else []


class Vectors(Struct):
    """The answer of /api/embed. Durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OneVector(Struct):
    """The answer of /api/embeddings."""

    embedding: list[float]


_Body = TypeVar("_Body", bound=OllamaVectorBody)


class OllamaEmbeddings(
    VectorEndpoint[_Body, completion_pb2.EmbedRequest, completion_pb2.EmbedResponse]
):
    """An endpoint that makes vectors. A request without texts loads the model."""

    async def _answer(
        self, body: _Body, request: completion_pb2.EmbedRequest, call: AsgiCall
    ) -> None:
        named = body.model or ""
        with naming(named):
            body.model = await existing_name(self._models, named)
            if body.texts:
                await super()._answer(body, request, call)
                return
            exchange = exchange_of(call.scope)
            keep_alive = read_keep_alive(body.keep_alive)
            await load_model(exchange, self._models, body.model, keep_alive)
        response: Response = json_response(
            self._api.to_answer(body, completion_pb2.EmbedResponse(width=1), exchange)
        )
        await response(call.scope, call.receive, call.send)


def _embed_request(body: OllamaEmbedBody) -> completion_pb2.EmbedRequest:
    kept = None if body.truncate is False else -1
    return completion_pb2.EmbedRequest(
        inputs=[completion_pb2.Prompt(text=text) for text in body.texts],
        dimensions=body.dimensions or None,
        truncate_prompt_tokens=body.truncate_prompt_tokens or kept,
        user=body.user or "",
        tokens=False,
    )


def _embedding_request(body: OllamaEmbeddingBody) -> completion_pb2.EmbedRequest:
    return completion_pb2.EmbedRequest(
        inputs=[completion_pb2.Prompt(text=text) for text in body.texts],
        truncate_prompt_tokens=body.truncate_prompt_tokens or -1,
        user=body.user or "",
        tokens=False,
        raw=True,
    )


def _vectors(answer: completion_pb2.EmbedResponse) -> list[list[float]]:
    return [array("f", row).tolist() for row in rows_of(answer.vectors, answer.width)]


def _with_length_1(vector: Sequence[float]) -> list[float]:
    length = math.sqrt(sum(number * number for number in vector))
    if not length or abs(length - 1) < _UNIT:
        return list(vector)
    return [number / length for number in vector]


def _answer_of(
    body: OllamaEmbedBody, answer: completion_pb2.EmbedResponse, exchange: Exchange
) -> Vectors:
    return Vectors(
        body.model or exchange.model,
        [_with_length_1(vector) for vector in _vectors(answer)],
        round((time.monotonic() - exchange.began) * 1e9),
        0,
        answer.usage.prompt_tokens,
    )


def _one_of(
    body: OllamaEmbeddingBody, answer: completion_pb2.EmbedResponse, exchange: Exchange
) -> OneVector:
    return OneVector(next(iter(_vectors(answer)), []))


def _param_of(field: str) -> str:
    return "input" if field.startswith("inputs") else field


EMBED = VectorApi(
    "embeddings", OllamaEmbedBody, _embed_request, _param_of, Backend.embed, _answer_of
)
EMBEDDINGS = VectorApi(
    "embeddings",
    OllamaEmbeddingBody,
    _embedding_request,
    lambda field: "prompt" if field.startswith("inputs") else field,
    Backend.embed,
    _one_of,
)
