"""JSON of /v1/embeddings, /v1/rerank, /v1/score, /v1/classify and /v1/pooling."""

import base64
import time
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType

from services.common.contract import MAX_EMBEDDED_TEXTS
from services.http_shim.formats.completion_requests import prompts_of
from services.http_shim.formats.request_bodies import KeptTokens, Priority, Seconds, Uint32
from tokenwire.errors import invalid
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = [
    "Classification",
    "ClassifyBody",
    "EmbeddingBody",
    "EmbeddingList",
    "PoolingBody",
    "PoolingList",
    "RerankBody",
    "Reranking",
    "ScoreBody",
    "ScoreList",
    "classification",
    "embedding_list",
    "input_param_of",
    "pooling_list",
    "rerank_param_of",
    "reranking",
    "score_list",
    "score_param_of",
    "to_classify_request",
    "to_embed_request",
    "to_pooling_request",
    "to_rerank_request",
    "to_score_request",
]

_TEXTS = Meta(max_length=2**20)  # the services have lower limits

Inputs: TypeAlias = str | Annotated[list[str | Uint32 | Annotated[list[Uint32], _TEXTS]], _TEXTS]


class VectorBody(Struct):
    """Fields that the bodies share."""

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: KeptTokens | None = None
    priority: Priority | None = None
    timeout: Seconds | None = None


class EmbeddingBody(VectorBody):
    """The body of POST /v1/embeddings."""

    input: Inputs | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Uint32 | None = None
    prompt_name: str | None = None


class PoolingBody(EmbeddingBody):
    """The body of POST /v1/pooling."""

    task: Literal["embed", "token_embed"] | None = None
    use_activation: bool | None = None


class TextDocument(Struct):
    """One of `documents`."""

    text: str


class RerankBody(VectorBody):
    """The body of POST /v1/rerank."""

    query: str | None = None
    documents: Annotated[list[str | TextDocument], _TEXTS] | None = None
    top_n: Uint32 | None = None
    return_documents: bool | None = None


class ScoreBody(VectorBody):
    """The body of POST /v1/score."""

    text_1: str | Annotated[list[str], _TEXTS] | None = None
    text_2: str | Annotated[list[str], _TEXTS] | None = None


class ClassifyBody(VectorBody):
    """The body of POST /v1/classify."""

    input: Inputs | None = None
    use_activation: bool | None = None


class VectorUsage(Struct):
    """Tokens of a request."""

    prompt_tokens: int
    total_tokens: int


class Embedding(Struct):
    """An embedding: numbers, or the base64 of their float32 values, little endian."""

    object: str
    index: int
    embedding: list[float] | str


class EmbeddingList(Struct):
    """The answer of /v1/embeddings."""

    object: str
    data: list[Embedding]
    model: str
    usage: VectorUsage


class PooledText(Struct):
    """A vector, or those of a text's tokens; or the base64 of their float32 values."""

    object: str
    index: int
    data: list[float | list[float]] | str


class PoolingList(Struct):
    """The answer of /v1/pooling."""

    id: str
    object: str
    created: int
    model: str
    data: list[PooledText]
    usage: VectorUsage


class Ranked(Struct):
    """A document and its score; higher = fits the query better."""

    index: int
    relevance_score: float
    document: TextDocument | UnsetType = UNSET


class Reranking(Struct):
    """The answer of /v1/rerank: documents, best first."""

    id: str
    model: str
    results: list[Ranked]
    usage: VectorUsage


class PairScore(Struct):
    """The score of a pair."""

    index: int
    object: str
    score: float


class ScoreList(Struct):
    """The answer of /v1/score."""

    id: str
    object: str
    created: int
    model: str
    data: list[PairScore]
    usage: VectorUsage


class TextClass(Struct):
    """The label that fits a text best, and the probabilities of all."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classification(Struct):
    """The answer of /v1/classify."""

    id: str
    object: str
    created: int
    model: str
    data: list[TextClass]
    usage: VectorUsage


def to_embed_request(body: EmbeddingBody) -> completion_pb2.EmbedRequest:
    """Convert a body. Raises INVALID_ARGUMENT with the client's name of a field."""
    return completion_pb2.EmbedRequest(
        inputs=prompts_of(body.input, "input", MAX_EMBEDDED_TEXTS),
        dimensions=body.dimensions,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        user=body.user or "",
        prompt_name=body.prompt_name,
    )


def input_param_of(path: str) -> str:
    """Return the client's name of a field of EmbedRequest or ClassifyRequest."""
    return "input" if path.startswith("inputs") else path


def embedding_list(
    body: EmbeddingBody, answer: completion_pb2.EmbedResponse, model: str
) -> EmbeddingList:
    """Return the answer under the model's name."""
    parts = _rows(answer.vectors, answer.width)
    is_base64 = body.encoding_format == "base64"
    return EmbeddingList(
        "list",
        [
            Embedding("embedding", index, _base64(part) if is_base64 else array("f", part).tolist())
            for index, part in enumerate(parts)
        ],
        model,
        _usage(answer.usage.prompt_tokens),
    )


def to_pooling_request(body: PoolingBody) -> completion_pb2.EmbedRequest:
    """Convert a body. Raises INVALID_ARGUMENT with the client's name of a field."""
    request = to_embed_request(body)
    request.raw = not body.use_activation
    request.tokens = body.task == "token_embed"
    return request


def pooling_list(
    body: PoolingBody, answer: completion_pb2.EmbedResponse, model: str, request_id: str
) -> PoolingList:
    """Return the vectors in the order of the texts."""
    rows = _rows(answer.vectors, answer.width)
    counts = answer.counts or [1] * len(rows)
    ends = list(accumulate(counts))
    texts = [rows[end - count : end] for count, end in zip(counts, ends, strict=True)]
    return PoolingList(
        f"pool-{request_id}",
        "list",
        int(time.time()),
        model,
        [PooledText("pooling", index, _numbers(body, text)) for index, text in enumerate(texts)],
        _usage(answer.usage.prompt_tokens),
    )


def _numbers(body: PoolingBody, vectors: Sequence[bytes]) -> list[float | list[float]] | str:
    """Return the vectors of one text in the form that the body asks for."""
    if body.encoding_format == "base64":
        return _base64(b"".join(vectors))
    if body.task == "token_embed":
        return [array("f", vector).tolist() for vector in vectors]
    return [*array("f", vectors[0])]


def to_rerank_request(body: RerankBody) -> completion_pb2.ScoreRequest:
    """Convert a body. Raises INVALID_ARGUMENT with the client's name of a field."""
    if body.query is None:
        raise invalid("query", "query is required: a string.")
    if not body.documents:
        raise invalid("documents", "documents is required: a list of strings.")
    if body.top_n == 0:
        raise invalid("top_n", "top_n must be at least 1.")
    _check_count("documents", body.documents)
    return completion_pb2.ScoreRequest(
        first=[body.query],
        second=map(_text, body.documents),
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        user=body.user or "",
    )


def rerank_param_of(path: str) -> str:
    """Return the client's name of a field of ScoreRequest."""
    return path.replace("first", "query").replace("second", "documents")


def reranking(
    body: RerankBody, answer: completion_pb2.ScoreResponse, model: str, request_id: str
) -> Reranking:
    """Return the documents, best first."""
    documents = body.documents or []
    order = sorted(range(len(documents)), key=lambda index: -answer.scores[index])
    shows = body.return_documents is not False
    results = [
        Ranked(
            index,
            answer.scores[index],
            TextDocument(_text(documents[index])) if shows else UNSET,
        )
        for index in order[: body.top_n]
    ]
    return Reranking(f"rerank-{request_id}", model, results, _usage(answer.usage.prompt_tokens))


def to_score_request(body: ScoreBody) -> completion_pb2.ScoreRequest:
    """Convert a body. Raises INVALID_ARGUMENT with the client's name of a field."""
    first, second = (
        [text] if isinstance(text, str) else text for text in (body.text_1, body.text_2)
    )
    for name, texts in (("text_1", first), ("text_2", second)):
        if not texts:
            raise invalid(name, f"{name} is required: a string, or a list of strings.")
        _check_count(name, texts)
    return completion_pb2.ScoreRequest(
        first=first,
        second=second,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        user=body.user or "",
    )


def score_param_of(path: str) -> str:
    """Return the client's name of a field of ScoreRequest."""
    return path.replace("first", "text_1").replace("second", "text_2")


def score_list(answer: completion_pb2.ScoreResponse, model: str, request_id: str) -> ScoreList:
    """Return the scores in the order of the pairs."""
    return ScoreList(
        f"score-{request_id}",
        "list",
        int(time.time()),
        model,
        [PairScore(index, "score", score) for index, score in enumerate(answer.scores)],
        _usage(answer.usage.prompt_tokens),
    )


def to_classify_request(body: ClassifyBody) -> completion_pb2.ClassifyRequest:
    """Convert a body. Raises INVALID_ARGUMENT with the client's name of a field."""
    return completion_pb2.ClassifyRequest(
        inputs=prompts_of(body.input, "input", MAX_EMBEDDED_TEXTS),
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        user=body.user or "",
        raw=body.use_activation is False,
    )


def classification(
    answer: completion_pb2.ClassifyResponse, model: str, request_id: str
) -> Classification:
    """Return the classes in the order of the texts."""
    labels = answer.labels
    texts = [array("f", part).tolist() for part in _rows(answer.probabilities, len(labels))]
    return Classification(
        f"classify-{request_id}",
        "list",
        int(time.time()),
        model,
        [
            TextClass(index, labels[probs.index(max(probs))], probs, len(labels))
            for index, probs in enumerate(texts)
        ],
        _usage(answer.usage.prompt_tokens),
    )


def _rows(vectors: bytes, width: int) -> list[bytes]:
    """Divide vectors of `width` float32 numbers."""
    size = 4 * width
    return [vectors[at : at + size] for at in range(0, len(vectors), size)]


def _check_count(name: str, texts: Sequence[object]) -> None:
    if len(texts) > MAX_EMBEDDED_TEXTS:
        message = f"{name} has {len(texts):,} elements; the limit is {MAX_EMBEDDED_TEXTS:,}."
        raise invalid(name, message)


def _text(document: str | TextDocument) -> str:
    return document if isinstance(document, str) else document.text


def _base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode()


def _usage(tokens: int) -> VectorUsage:
    return VectorUsage(tokens, tokens)
