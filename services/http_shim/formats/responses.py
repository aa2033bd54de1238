"""What the JSON of completions and chats has in common. Pure."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = [
    "ChoiceFormatter",
    "Delta",
    "Envelope",
    "PromptLogprobs",
    "PromptToken",
    "Usage",
    "finish_reason_of",
    "finite",
    "matched_stop_of",
    "running_usage",
    "stop_reason_of",
    "usage_of",
]

Delta = TypeVar("Delta", completion_pb2.ChoiceDelta, completion_pb2.ChatDelta)
_FINISH_REASONS: dict[int, str] = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
    types_pb2.FINISH_REASON_CANCELLED: "cancelled",
}
_IMPOSSIBLE = -9999.0  # what OpenAI's clients expect for -inf, which JSON can't say
_encode = msgspec.json.Encoder().encode


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


class PromptToken(Struct):
    """What the model thinks of a token in one place of a prompt. rank: 1 = most likely."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[str, PromptToken] | None]
"""By token of the prompt: the token itself and the candidates for its place, by id. The first token
has no scores."""


class _Head(Struct):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


@dataclass(frozen=True, slots=True)
class ChoiceFormatter(ABC, Generic[Delta]):
    """What the client of an endpoint wants to see of each choice."""

    choices_per_prompt: int
    logprobs: bool
    token_ids: bool
    tokens_as_ids: bool
    prompt_logprobs: bool

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    prompt_on_top: ClassVar[bool] = False
    """Whether the ids of the prompt, which is one, also stand beside the choices."""

    @abstractmethod
    def tokens_in(self, deltas: Sequence[Delta]) -> int:
        """How many tokens were generated for them."""

    @abstractmethod
    def choice(
        self,
        index: int,
        deltas: Sequence[Delta],
        finished: completion_pb2.ChoiceFinished,
        prompt: types_pb2.TokenIds,
    ) -> Struct:
        """A whole choice."""

    @abstractmethod
    def add_prompt_logprobs(
        self, choices: Sequence[Struct], prompts: Sequence[PromptLogprobs]
    ) -> Struct | None:
        """Put the scores of each prompt where they belong: into the choices, or beside them."""

    @abstractmethod
    def chunks(
        self,
        index: int,
        deltas: Sequence[Delta],
        finished: completion_pb2.ChoiceFinished | None,
        prompt: types_pb2.TokenIds | None,
    ) -> Sequence[Struct]:
        """A part of a choice, as the chunks of a stream have it; its first with the prompt."""


class Envelope:
    """What all objects of one answer share, encoded once."""

    __slots__ = ("_chunk", "_prompt", "_whole")

    def __init__(
        self,
        identity: str,
        created: int,
        accepted: completion_pb2.CompleteAccepted,
        formatter: ChoiceFormatter[Delta],
    ) -> None:
        def head(name: str) -> bytes:
            model, fingerprint = accepted.model, accepted.system_fingerprint
            return _encode(_Head(identity, name, created, model, fingerprint))[:-1]

        self._whole = head(formatter.whole_object) + b',"choices":'
        self._chunk = b"data: " + head(formatter.chunk_object) + b',"choices":['
        self._prompt = b""
        if formatter.prompt_on_top and formatter.token_ids:
            self._prompt = b',"prompt_token_ids":' + _encode(list(accepted.prompts[0].ids))

    def whole(self, choices: Sequence[Struct], usage: Usage, more: Struct | None = None) -> bytes:
        """The answer to a request that does not stream; `more` has its further fields."""
        rest = b"" if more is None else b"," + _encode(more)[1:-1]
        usages = _usage_field(usage)
        return b"%b%b,%b%b%b}" % (self._whole, _encode(choices), usages, self._prompt, rest)

    def chunk(self, choice: Struct | None, usage: Usage | UnsetType | None) -> bytes:
        """One server-sent event; UNSET leaves `usage` out. The first one has what is said once."""
        body = b"" if choice is None else _encode(choice)
        once, self._prompt = self._prompt, b""
        if usage is UNSET:
            return b"%b%b]%b}\n\n" % (self._chunk, body, once)
        return b"%b%b],%b%b}\n\n" % (self._chunk, body, _usage_field(usage), once)


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


def finish_reason_of(finished: completion_pb2.ChoiceFinished) -> str:
    """Why a choice ended."""
    return _FINISH_REASONS.get(finished.reason, "stop")


def stop_reason_of(finished: completion_pb2.ChoiceFinished) -> str | int | None:
    """The stop string or the id that ended it, if one did."""
    match = finished.match
    kind = match.WhichOneof("match")
    if kind == "stop_string":
        return match.stop_string
    return match.stop_token_id if kind == "stop_token_id" else None


def matched_stop_of(finished: completion_pb2.ChoiceFinished) -> str | int | None:
    """What SGLang calls so: the stop reason, or the id of the end of sequence."""
    if finished.match.WhichOneof("match") == "eos_token_id":
        return finished.match.eos_token_id
    return stop_reason_of(finished)


def finite(logprob: float) -> float:
    """As JSON can say it."""
    return _IMPOSSIBLE if logprob == -math.inf else logprob
