"""From the events of a completion to its JSON. Pure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, Struct, UnsetType

from services.http_shim.requests import CompletionBody
from tokenwire.completion.v1 import completion_pb2
from tokenwire.types.v1 import types_pb2

__all__ = [
    "Choice",
    "Envelope",
    "Shape",
    "Usage",
    "choice_of",
    "running_usage",
    "shape_of",
    "usage_of",
]

_FINISH_REASONS: dict[int, str] = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
    types_pb2.FINISH_REASON_CANCELLED: "cancelled",
}
_IMPOSSIBLE = -9999.0  # what OpenAI's clients expect for -inf, which JSON can't say
_encode = msgspec.json.Encoder().encode


class Logprobs(Struct):
    """Four parallel lists, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Choice(Struct):
    """A choice, or a part of it."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class PromptTokensDetails(Struct):
    """OpenAI's place for cached tokens."""

    cached_tokens: int


class Usage(Struct):
    """Tokens. What was cached is known at the end only."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_input_tokens: int | UnsetType = UNSET
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET


class _Head(Struct):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


@dataclass(frozen=True, slots=True)
class Shape:
    """What the client wants to see of each choice."""

    choices_per_prompt: int
    logprobs: bool
    token_ids: bool
    tokens_as_ids: bool


def shape_of(body: CompletionBody) -> Shape:
    """What the client wants to see of each choice."""
    return Shape(
        choices_per_prompt=1 if body.n is None else body.n,
        logprobs=body.logprobs is not None,
        token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
    )


class Envelope:
    """What all objects of one answer share, encoded once."""

    __slots__ = ("_chunk", "_head")

    def __init__(
        self, identity: str, created: int, accepted: completion_pb2.CompleteAccepted
    ) -> None:
        head = _Head(
            identity, "text_completion", created, accepted.model, accepted.system_fingerprint
        )
        self._head = _encode(head)[:-1] + b',"choices":'
        self._chunk = b"data: " + self._head + b"["

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The answer to a request that does not stream."""
        return b"%b%b,%b}" % (self._head, _encode(choices), _usage_field(usage))

    def chunk(self, choice: Choice | None, usage: Usage | UnsetType | None) -> bytes:
        """One server-sent event; UNSET leaves `usage` out."""
        body = b"" if choice is None else _encode(choice)
        if usage is UNSET:
            return b"%b%b]}\n\n" % (self._chunk, body)
        return b"%b%b],%b}\n\n" % (self._chunk, body, _usage_field(usage))


def _usage_field(usage: Usage | UnsetType | None) -> bytes:
    return b'"usage":' + _encode(usage)


def usage_of(usage: types_pb2.Usage) -> Usage:
    """What a completion used in all."""
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        cached_input_tokens=usage.cached_tokens,
        prompt_tokens_details=PromptTokensDetails(usage.cached_tokens),
    )


def running_usage(prompt_tokens: int, completion_tokens: int) -> Usage:
    """What a completion used so far."""
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens)


def choice_of(
    index: int,
    deltas: Sequence[completion_pb2.ChoiceDelta],
    finished: completion_pb2.ChoiceFinished | None,
    shape: Shape,
    prompt: types_pb2.TokenIds | None = None,
) -> Choice:
    """Joins deltas of one choice. `prompt`: its prompt's ids, where they are to be shown."""
    choice = Choice(
        index=index,
        text=deltas[0].text if len(deltas) == 1 else "".join([delta.text for delta in deltas]),
        logprobs=_logprobs(deltas, shape.tokens_as_ids) if shape.logprobs else None,
        finish_reason=None,
        stop_reason=None,
    )
    if finished is not None:
        choice.finish_reason = _FINISH_REASONS.get(finished.reason, "stop")
        choice.stop_reason = _stop_reason(finished.match)
    if shape.token_ids:
        generated = [delta for delta in deltas if not delta.is_prompt]
        choice.token_ids = [token for delta in generated for token in delta.tokens.ids]
        if prompt is not None:
            choice.prompt_token_ids = list(prompt.ids)
    return choice


def _stop_reason(match: types_pb2.StopMatch) -> str | int | None:
    kind = match.WhichOneof("match")
    if kind == "stop_string":
        return match.stop_string
    return match.stop_token_id if kind == "stop_token_id" else None


def _logprobs(deltas: Iterable[completion_pb2.ChoiceDelta], as_ids: bool) -> Logprobs:
    result = Logprobs([], [], [], [])
    for delta in deltas:
        columns = delta.tokens
        texts = _names(columns.ids) if as_ids else list(delta.token_texts)
        top_texts = _names(columns.top_ids) if as_ids else list(delta.top_texts)
        scores = list(columns.logprobs)
        result.tokens += texts
        result.token_logprobs += [_number(score) for score in scores]
        result.top_logprobs += _tops(
            texts, scores, top_texts, list(columns.top_logprobs), columns.top_width
        )
        result.text_offset += delta.text_offsets
    return result


def _tops(
    texts: list[str], scores: list[float], top_texts: list[str], top_scores: list[float], width: int
) -> list[dict[str, float] | None]:
    """Per token, the candidates and the token itself; of equal texts, the likelier."""
    rows: list[dict[str, float] | None] = []
    for i, (text, score) in enumerate(zip(texts, scores, strict=True)):
        if math.isnan(score):
            rows.append(None)
            continue
        row: dict[str, float] = {}
        columns = slice(i * width, (i + 1) * width)
        # best first, so the first of equal texts is the likelier
        for candidate, candidate_score in zip(top_texts[columns], top_scores[columns], strict=True):
            row.setdefault(candidate, _finite(candidate_score))
        row[text] = max(row.get(text, _IMPOSSIBLE), _finite(score))
        rows.append(row)
    return rows


def _names(ids: Iterable[int]) -> list[str]:
    return [f"token_id:{token}" for token in ids]


def _number(score: float) -> float | None:
    return None if math.isnan(score) else _finite(score)


def _finite(score: float) -> float:
    return _IMPOSSIBLE if score == -math.inf else score
