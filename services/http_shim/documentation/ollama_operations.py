"""Operations of Ollama's API, which a server has with --ollama."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from services.http_shim.dialects.ollama.types import (
    OllamaChatAnswer,
    OllamaChatBody,
    OllamaError,
    OllamaGenerateAnswer,
    OllamaGenerateBody,
)
from services.http_shim.documentation.operation import POST_ERRORS, SCHEDULING, Operation
from services.http_shim.ollama.embeddings import (
    OllamaEmbedBody,
    OllamaEmbeddingBody,
    OneVector,
    Vectors,
)
from services.http_shim.ollama.models import (
    OllamaProcesses,
    OllamaShown,
    OllamaTags,
    OllamaVersion,
    ShowBody,
)
from services.http_shim.ollama.pulls import DeleteBody, PullBody, PullStatus

__all__ = ["OLLAMA_OPERATIONS"]

_ONLY = "; only with --ollama."
_LINES = "application/x-ndjson"
_LAST_LINE = "Each line; done is true in the last one."
_post = partial(Operation, method="post", errors=POST_ERRORS, error=OllamaError)
_generate = partial(
    _post, counts_tokens=True, parameters=SCHEDULING, stream=_LINES, last_event=_LAST_LINE
)
_get = partial(Operation, method="get", errors=(401, 503), error=OllamaError)
_QUESTION: Any = [{"role": "user", "content": "What is a mutex?"}]


def _unsupported(path: str, name: str, what: str) -> Operation:
    summary = f"Not supported: {what}{_ONLY}"
    return Operation(
        method="post", path=path, name=name, summary=summary, errors=(401, 501), error=OllamaError
    )


OLLAMA_OPERATIONS: Sequence[Operation] = (
    _generate(
        path="/api/chat",
        name="ollamaChat",
        summary=f"Continue a conversation, as in Ollama's API{_ONLY}",
        body=OllamaChatBody,
        required=("model",),
        answer=OllamaChatAnswer,
        chunk=OllamaChatAnswer,
        example={"model": "default", "messages": _QUESTION, "options": {"num_predict": 100}},
    ),
    _generate(
        path="/api/generate",
        name="ollamaGenerate",
        summary=f"Answer or continue a prompt, as in Ollama's API{_ONLY}",
        body=OllamaGenerateBody,
        required=("model",),
        answer=OllamaGenerateAnswer,
        chunk=OllamaGenerateAnswer,
        example={"model": "default", "prompt": "What is a mutex?", "stream": False},
    ),
    _post(
        path="/api/embed",
        name="ollamaEmbed",
        summary=f"Embed texts, as in Ollama's API{_ONLY}",
        body=OllamaEmbedBody,
        required=("model",),
        answer=Vectors,
        example={"model": "default", "input": ["What is a mutex?", "A lock."]},
    ),
    _post(
        path="/api/embeddings",
        name="ollamaEmbeddings",
        summary=f"Embed a text, as in Ollama's older API{_ONLY}",
        body=OllamaEmbeddingBody,
        required=("model",),
        answer=OneVector,
        example={"model": "default", "prompt": "What is a mutex?"},
    ),
    _get(
        path="/api/tags",
        name="ollamaTags",
        summary=f"List the models, as in Ollama's API{_ONLY}",
        answer=OllamaTags,
    ),
    _get(
        path="/api/ps",
        name="ollamaPs",
        summary=f"List the models in memory, as in Ollama's API{_ONLY}",
        answer=OllamaProcesses,
    ),
    _post(
        path="/api/show",
        name="ollamaShow",
        summary=f"Describe a model, as in Ollama's API{_ONLY}",
        body=ShowBody,
        answer=OllamaShown,
        example={"model": "default"},
    ),
    Operation(
        method="get",
        path="/api/version",
        name="ollamaVersion",
        summary=f"Return the version of Ollama's API{_ONLY}",
        answer=OllamaVersion,
        needs_key=False,
    ),
    _post(
        path="/api/pull",
        name="ollamaPull",
        summary=f"Download a model from the hub, for operators{_ONLY}",
        body=PullBody,
        answer=PullStatus,
        chunk=PullStatus,
        stream=_LINES,
        last_event="Each line; the status of the last one is success.",
        example={"model": "smollm2"},
    ),
    _post(
        method="delete",
        path="/api/delete",
        name="ollamaDelete",
        summary=f"Remove a model's files from the hub's cache, for operators{_ONLY}",
        body=DeleteBody,
        example={"model": "smollm2"},
    ),
    _unsupported("/api/create", "ollamaCreate", "it makes a model"),
    _unsupported("/api/copy", "ollamaCopy", "it copies a model"),
    _unsupported("/api/push", "ollamaPush", "it publishes a model"),
)
