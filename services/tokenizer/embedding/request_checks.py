"""Checks of requests for vectors, scores and classes against the model's abilities."""

from typing import TypeAlias

import grpc

from services.common.bounds import check_bounds
from services.tokenizer.model_limits import ModelLimits
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["Request", "check_classify", "check_embed", "check_score", "truncation"]

Request: TypeAlias = (
    completion_pb2.EmbedRequest | completion_pb2.ClassifyRequest | completion_pb2.ScoreRequest
)


def check_embed(request: completion_pb2.EmbedRequest, limits: ModelLimits) -> None:
    """Raise ServiceError unless the model can embed, and the fields are in range."""
    check_bounds(request)
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
    if request.dimensions > limits.vector_width:
        message = f"dimensions must be at most {limits.vector_width}, got {request.dimensions}."
        raise invalid("dimensions", message)


def check_score(request: completion_pb2.ScoreRequest, limits: ModelLimits) -> None:
    """Raise ServiceError unless the model can score pairs, and the fields are in range."""
    check_bounds(request)
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
    check_bounds(request)
    _check_kept(request, limits)
    if not limits.vectors_are_scores:
        kind = "makes embeddings" if limits.token_width else "only generates"
        raise ServiceError(
            grpc.StatusCode.FAILED_PRECONDITION,
            "NO_CLASSES",
            f"The model {limits.model} sorts no texts into classes: it {kind}.",
            field="model",
        )


def _check_kept(request: Request, limits: ModelLimits) -> None:
    keep, most = request.truncate_prompt_tokens, limits.context_length
    if keep > most:
        message = f"truncate_prompt_tokens must be at most {most:,}, got {keep:,}."
        raise invalid("truncate_prompt_tokens", message)


def truncation(request: Request) -> int | None:
    """Return the number of tokens to keep of each text; None = longer texts are refused."""
    return request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None
