"""Checks of requests for vectors, scores and classes against the model's abilities."""

from typing import TypeAlias

import grpc

from services.common.contract import MAX_EMBEDDED_TEXTS
from services.tokenizer.model_limits import ModelLimits
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["Request", "check_classify", "check_embed", "check_score", "truncation"]

Request: TypeAlias = (
    completion_pb2.EmbedRequest | completion_pb2.ClassifyRequest | completion_pb2.ScoreRequest
)


def check_embed(request: completion_pb2.EmbedRequest, limits: ModelLimits) -> None:
    """Raise ServiceError unless the model can embed, and the fields are in range."""
    _check_count("inputs", len(request.inputs))
    _check_kept(request, limits)
    needs_texts = request.HasField("tokens") and not request.tokens
    makes_tokens = limits.only_tokens_have_vectors
    if limits.vectors_are_scores or not limits.token_width or (needs_texts and makes_tokens):
        scores = limits.vectors_are_scores
        why = "it scores texts" if scores else "its checkpoint names no pooling"
        if makes_tokens:
            why = "it makes a vector of each token; ask for tokens (/v1/pooling)"
        raise ServiceError(
            grpc.StatusCode.FAILED_PRECONDITION,
            "NO_EMBEDDINGS",
            f"The model {limits.model} makes no embeddings: {why}.",
            field="model",
        )
    weighs = request.token_weights
    if weighs and not limits.weighs_tokens:
        raise invalid("token_weights", f"The model {limits.model} gives tokens no weights.")
    if weighs and needs_texts:
        raise invalid("token_weights", "token_weights excludes tokens = false.")
    if request.HasField("dimensions") and (request.tokens or weighs or makes_tokens):
        raise invalid("dimensions", "States of tokens can't be shortened.")
    if request.HasField("dimensions") and not 1 <= request.dimensions <= limits.vector_width:
        message = f"dimensions must be between 1 and {limits.vector_width}."
        raise invalid("dimensions", message)


def check_score(request: completion_pb2.ScoreRequest, limits: ModelLimits) -> None:
    """Raise ServiceError unless the model can score pairs, and the fields are in range."""
    _check_count("second", len(request.second))
    if len(request.first) not in (1, len(request.second)):
        message = "There must be one first text, or as many as there are second ones."
        raise invalid("first", message)
    _check_kept(request, limits)
    is_classifier = limits.vectors_are_scores and limits.vector_width > 1
    if is_classifier or not limits.token_width:
        kind = "sorts texts into classes" if is_classifier else "only generates"
        raise ServiceError(
            grpc.StatusCode.FAILED_PRECONDITION,
            "NO_SCORES",
            f"The model {limits.model} scores no pairs of texts: it {kind}.",
            field="model",
        )


def check_classify(request: completion_pb2.ClassifyRequest, limits: ModelLimits) -> None:
    """Raise ServiceError unless the model has classes, and the fields are in range."""
    _check_count("inputs", len(request.inputs))
    _check_kept(request, limits)
    if not limits.vectors_are_scores:
        kind = "makes embeddings" if limits.token_width else "only generates"
        raise ServiceError(
            grpc.StatusCode.FAILED_PRECONDITION,
            "NO_CLASSES",
            f"The model {limits.model} sorts no texts into classes: it {kind}.",
            field="model",
        )


def _check_count(field: str, count: int) -> None:
    if not 1 <= count <= MAX_EMBEDDED_TEXTS:
        message = f"A request must have between 1 and {MAX_EMBEDDED_TEXTS:,} texts."
        raise invalid(field, message)


def _check_kept(request: Request, limits: ModelLimits) -> None:
    keep, field = truncation(request), "truncate_prompt_tokens"
    if keep is not None and keep != -1 and not 1 <= keep <= limits.context_length:
        message = f"{field} must be -1, or between 1 and {limits.context_length:,}."
        raise invalid(field, message)


def truncation(request: Request) -> int | None:
    """Return the number of tokens to keep of each text; None = longer texts are refused."""
    return request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None
