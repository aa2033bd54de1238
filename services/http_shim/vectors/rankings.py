"""JSON of /v1/rerank, /v1/score and /v1/classify."""

import time
from array import array
from collections.abc import Sequence
from typing import Annotated

from msgspec import UNSET, Struct, UnsetType

from services.common.contract import MAX_EMBEDDED_TEXTS
from services.http_shim.dialects.fields import Uint32, about
from services.http_shim.vectors.embeddings import (
    MANY_TEXTS,
    ActivatedBody,
    InputBody,
    VectorUsage,
    rows_of,
    usage_of,
)
from tokenwire.errors import invalid
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = [
    "Classification",
    "ClassifyBody",
    "RerankBody",
    "Reranking",
    "ScoreBody",
    "ScoreList",
    "classification",
    "rerank_param_of",
    "reranking",
    "score_list",
    "score_param_of",
    "to_classify_request",
    "to_rerank_request",
    "to_score_request",
]


class TextDocument(Struct):
    """One of `documents`."""

    text: str


class RerankBody(ActivatedBody):
    """The body of POST /v1/rerank."""

    query: Annotated[str | None, about("The text that the documents should fit.")] = None
    documents: Annotated[
        Annotated[list[str | TextDocument], MANY_TEXTS] | None, about("Texts to order.")
    ] = None
    top_n: Annotated[Uint32 | None, about("Documents to return, best first; absent = all.")] = None
    return_documents: Annotated[
        bool | None, about("Return the documents' texts, too.", default=True)
    ] = None


class ScoreBody(ActivatedBody):
    """The body of POST /v1/score."""

    text_1: Annotated[
        str | Annotated[list[str], MANY_TEXTS] | None,
        about("The first text of each pair, or of all pairs."),
    ] = None
    text_2: Annotated[
        str | Annotated[list[str], MANY_TEXTS] | None, about("The second text of each pair.")
    ] = None


class ClassifyBody(InputBody):
    """The body of POST /v1/classify."""


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
        raw=body.is_raw,
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
    return Reranking(f"rerank-{request_id}", model, results, usage_of(answer.usage.prompt_tokens))


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
        raw=body.is_raw,
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
        usage_of(answer.usage.prompt_tokens),
    )


def to_classify_request(body: ClassifyBody) -> completion_pb2.ClassifyRequest:
    """Convert a body. Raises INVALID_ARGUMENT with the client's name of a field."""
    return completion_pb2.ClassifyRequest(
        inputs=body.prompts,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        user=body.user or "",
        raw=body.is_raw,
    )


def classification(
    answer: completion_pb2.ClassifyResponse, model: str, request_id: str
) -> Classification:
    """Return the classes in the order of the texts."""
    labels = answer.labels
    texts = [array("f", part).tolist() for part in rows_of(answer.probabilities, len(labels))]
    return Classification(
        f"classify-{request_id}",
        "list",
        int(time.time()),
        model,
        [
            TextClass(index, labels[probs.index(max(probs))], probs, len(labels))
            for index, probs in enumerate(texts)
        ],
        usage_of(answer.usage.prompt_tokens),
    )


def _check_count(name: str, texts: Sequence[object]) -> None:
    if len(texts) > MAX_EMBEDDED_TEXTS:
        message = f"{name} has {len(texts):,} elements; the limit is {MAX_EMBEDDED_TEXTS:,}."
        raise invalid(name, message)


def _text(document: str | TextDocument) -> str:
    return document if isinstance(document, str) else document.text
