"""JSON of /v1/embeddings and /v1/pooling."""

import base64
import time
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from services.common.contract import MAX_EMBEDDED_TEXTS
from services.http_shim.dialects.chat.types import Message, TemplateBody
from services.http_shim.dialects.completions.read import prompts_of
from services.http_shim.dialects.fields import (
    Continuation,
    GenerationPrompt,
    KeepAlive,
    KeptTokens,
    ModelName,
    Priority,
    TemplateArguments,
    TemplateName,
    Timeout,
    Uint32,
    UserLabel,
    about,
    prompt_keywords,
)
from tokenwire.errors import invalid
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = [
    "MANY_TEXTS",
    "ActivatedBody",
    "CodedBody",
    "EmbeddingBody",
    "EmbeddingList",
    "InputBody",
    "PoolingBody",
    "PoolingList",
    "VectorBody",
    "VectorUsage",
    "embedding_list",
    "input_param_of",
    "pooling_list",
    "rows_of",
    "template_body",
    "to_embed_request",
    "to_pooling_request",
    "unused_fields",
    "usage_of",
]

MANY_TEXTS = Meta(max_length=2**20)  # the services have lower limits
_FIELDS_OF_TEXTS = ("prompt_name",)
_FIELDS_OF_MESSAGES = (
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
)

_PARAMS = {"tokens": "task", "token_weights": "task"}
"""Clients' names of fields"""

Inputs: TypeAlias = (
    str | Annotated[list[str | Uint32 | Annotated[list[Uint32], MANY_TEXTS]], MANY_TEXTS]
)


class VectorBody(Struct):
    """Fields that the bodies share."""

    model: ModelName = None
    user: UserLabel = None
    truncate_prompt_tokens: Annotated[
        KeptTokens | None,
        about(
            "Number of last tokens of the prompt to keep; -1 = all that leave room for max_tokens.",
            "truncate_prompt_tokens",
            completion_pb2.EmbedRequest,
            **{"not": {"const": 0}},
        ),
    ] = None
    priority: Priority = None
    timeout: Timeout = None
    keep_alive: KeepAlive = None


class ActivatedBody(VectorBody):
    """Fields that leave out the last stage of vectors or scores: one, and vLLM's older names."""

    use_activation: Annotated[
        bool | None,
        about(
            "Apply the last stage of the model; false returns logits instead of scores and "
            "probabilities, and vectors of the length that the layers give them.",
            default=True,
        ),
    ] = None
    activation: Annotated[
        bool | None, about("As `use_activation`, under an older name of vLLM.")
    ] = None
    softmax: Annotated[bool | None, about("As `use_activation`, under an older name of vLLM.")] = (
        None
    )
    normalize: Annotated[
        bool | None, about("As `use_activation`, under an older name of vLLM.")
    ] = None

    @property
    def is_raw(self) -> bool:
        """True if the last stage is left out. vLLM's order decides if the names differ."""
        names = (self.normalize, self.softmax, self.activation, self.use_activation)
        return next((value for value in names if value is not None), True) is False


class InputBody(ActivatedBody):
    """Inputs: texts, ids, or a conversation, whose prompt is one text."""

    input: Annotated[
        Inputs | None,
        about(
            "A text, several texts, token ids, or several lists of token ids.",
            **prompt_keywords(MAX_EMBEDDED_TEXTS),
            minLength=1,
        ),
    ] = None
    messages: Annotated[
        Annotated[list[Message], MANY_TEXTS] | None,
        about("The conversation.", "conversation.messages"),
    ] = None
    chat_template: TemplateName = None
    chat_template_kwargs: TemplateArguments = None
    add_generation_prompt: GenerationPrompt = None
    continue_final_message: Continuation = None

    @property
    def prompts(self) -> list[completion_pb2.Prompt]:
        """The texts or ids; none = there are messages. Raises INVALID_ARGUMENT."""
        if self.messages is None:
            return prompts_of(self.input, "input", MAX_EMBEDDED_TEXTS)
        if self.input is not None:
            raise invalid("input", "input and messages exclude each other; give one of them.")
        return []


class CodedBody(InputBody):
    """Fields of bodies whose answers hold vectors."""

    encoding_format: Annotated[
        Literal["float", "base64"] | None,
        about("`float` = numbers; `base64` = their float32 bytes, little endian.", default="float"),
    ] = None
    dimensions: Annotated[
        Uint32 | None,
        about(
            "Numbers of an embedding to keep, from the first on; at most the model's.",
            "dimensions",
            completion_pb2.EmbedRequest,
        ),
    ] = None
    prompt_name: Annotated[
        str | None,
        about(
            "Name of a prompt in the checkpoint's config_sentence_transformers.json, whose "
            "text goes before each text; absent = the checkpoint's default prompt, or none."
        ),
    ] = None


class EmbeddingBody(CodedBody):
    """The body of POST /v1/embeddings."""

    task: Annotated[
        str | None,
        about(
            "Task whose adapter computes the vectors, and whose instruction goes before "
            "each text, of a checkpoint with such adapters (Jina v3 and v5); absent = the "
            "adapter that model names, or the model alone."
        ),
    ] = None


class PoolingBody(CodedBody):
    """The body of POST /v1/pooling."""

    task: Annotated[
        Literal["embed", "token_embed", "token_classify"] | None,
        about(
            "What has a vector: embed = each text, token_embed = each token, by its last "
            "state or a head of the model; token_classify = each token has a weight "
            "(BGE-M3). Absent = each text, or each token if the model makes vectors of "
            "tokens alone."
        ),
    ] = None


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


def to_embed_request(body: EmbeddingBody) -> completion_pb2.EmbedRequest:
    """Convert a body. Raises INVALID_ARGUMENT with the client's name of a field."""
    request = _vector_request(body)
    request.tokens = False
    request.task = body.task or ""
    return request


def _vector_request(body: CodedBody) -> completion_pb2.EmbedRequest:
    return completion_pb2.EmbedRequest(
        inputs=body.prompts,
        dimensions=body.dimensions,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        user=body.user or "",
        prompt_name=body.prompt_name,
        raw=body.is_raw,
    )


def template_body(body: InputBody) -> TemplateBody | None:
    """Return what renders a body's messages, as vLLM does here; None = it has none."""
    if body.messages is None:
        return None
    return TemplateBody(
        messages=body.messages,
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=bool(body.add_generation_prompt),
        continue_final_message=body.continue_final_message,
    )


def unused_fields(body: InputBody) -> list[str]:
    """Return the fields of a body that have no effect, because it has messages or has none."""
    names = _FIELDS_OF_TEXTS if body.messages is not None else _FIELDS_OF_MESSAGES
    return [name for name in names if getattr(body, name, None) is not None]


def input_param_of(path: str) -> str:
    """Return the client's name of a field of EmbedRequest or ClassifyRequest."""
    return "input" if path.startswith("inputs") else _PARAMS.get(path, path)


def embedding_list(
    body: CodedBody, answer: completion_pb2.EmbedResponse, model: str
) -> EmbeddingList:
    """Return the answer under the model's name."""
    parts = rows_of(answer.vectors, answer.width)
    is_base64 = body.encoding_format == "base64"
    return EmbeddingList(
        "list",
        [
            Embedding("embedding", index, _base64(part) if is_base64 else array("f", part).tolist())
            for index, part in enumerate(parts)
        ],
        model,
        usage_of(answer.usage.prompt_tokens),
    )


def to_pooling_request(body: PoolingBody) -> completion_pb2.EmbedRequest:
    """Convert a body. Raises INVALID_ARGUMENT with the client's name of a field."""
    request = _vector_request(body)
    if body.task == "token_classify":
        request.token_weights = True
    elif body.task is not None:
        request.tokens = body.task == "token_embed"
    return request


def pooling_list(
    body: PoolingBody, answer: completion_pb2.EmbedResponse, model: str, request_id: str
) -> PoolingList:
    """Return the vectors in the order of the texts."""
    rows = rows_of(answer.vectors, answer.width)
    counts = answer.counts or [1] * len(rows)
    ends = list(accumulate(counts))
    texts = [rows[end - count : end] for count, end in zip(counts, ends, strict=True)]
    return PoolingList(
        f"pool-{request_id}",
        "list",
        int(time.time()),
        model,
        [
            PooledText("pooling", index, _numbers(body, text, of_tokens=bool(answer.counts)))
            for index, text in enumerate(texts)
        ],
        usage_of(answer.usage.prompt_tokens),
    )


def _numbers(
    body: PoolingBody, vectors: Sequence[bytes], *, of_tokens: bool
) -> list[float | list[float]] | str:
    """Return the vectors of one text in the form that the body asks for."""
    if body.encoding_format == "base64":
        return _base64(b"".join(vectors))
    if of_tokens:
        return [array("f", vector).tolist() for vector in vectors]
    return [*array("f", vectors[0])]


def rows_of(vectors: bytes, width: int) -> list[bytes]:
    """Divide vectors of `width` float32 numbers."""
    size = 4 * width
    return [vectors[at : at + size] for at in range(0, len(vectors), size)]


def _base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode()


def usage_of(tokens: int) -> VectorUsage:
    """Return the usage of a request of so many tokens."""
    return VectorUsage(tokens, tokens)
