"""Parts that the JSON of completions and of chats share."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType

from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = [
    "AnswerHead",
    "ChoiceFormatter",
    "Envelope",
    "PromptLogprobs",
    "Usage",
    "finish_reason_of",
    "finite",
    "matched_stop_of",
    "prompt_logprobs_of",
    "running_usage",
    "stop_reason_of",
    "usage_of",
]

_FINISH_REASONS: dict[int, str] = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
    types_pb2.FINISH_REASON_CANCELLED: "cancelled",
}
_IMPOSSIBLE = -9999.0  # OpenAI's value for -inf, which JSON does not have
_encode = msgspec.json.Encoder().encode


class PromptTokensDetails(Struct):
    """Prompt tokens by source, as in OpenAI's API."""

    cached_tokens: int


class CompletionTokensDetails(Struct):
    """Generated tokens by kind, as in OpenAI's API."""

    reasoning_tokens: int


class Usage(Struct):
    """Tokens of an answer. The cached ones, and those of reasoning, are known only at the end."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_input_tokens: int | UnsetType = UNSET
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """Only with reasoning"""


class PromptToken(Struct):
    """Score of a token at one position of a prompt. rank: 1 = most likely."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[str, PromptToken] | None]
"""For each prompt token, the scores of it and of its candidates by id; the first token has none"""


class AnswerHead(Struct):
    """Fields that all objects of one answer share."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


@dataclass(frozen=True, slots=True)
class ChoiceFormatter(ABC):
    """Converts output to JSON choices, with the fields that the client wants."""

    choices_per_prompt: int
    logprobs: bool
    token_ids: bool
    tokens_as_ids: bool
    prompt_logprobs: bool

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    prompt_on_top: ClassVar[bool] = False
    """True if the ids of the only prompt stand beside the choices"""

    @abstractmethod
    def tokens_in(self, deltas: Sequence[completion_pb2.ChoiceDelta]) -> int:
        """Return the number of generated tokens."""

    @abstractmethod
    def choice(
        self,
        index: int,
        deltas: Sequence[completion_pb2.ChoiceDelta],
        finished: completion_pb2.ChoiceFinished,
        prompt: types_pb2.TokenIds,
    ) -> Struct:
        """Return a whole choice."""

    @abstractmethod
    def add_prompt_logprobs(
        self, choices: Sequence[Struct], prompts: Sequence[PromptLogprobs]
    ) -> Struct | None:
        """Add the scores of the prompts to the choices, or return the fields beside the choices."""

    @abstractmethod
    def chunks(
        self,
        index: int,
        deltas: Sequence[completion_pb2.ChoiceDelta],
        finished: completion_pb2.ChoiceFinished | None,
        prompt: types_pb2.TokenIds | None,
    ) -> Sequence[Struct]:
        """Return the choices of chunks; `prompt` is set for the first part of a choice."""


class Envelope:
    """Encoder of an answer's objects; their shared fields are encoded once."""

    __slots__ = ("_chunk", "_prompt", "_whole")

    def __init__(
        self,
        identity: str,
        created: int,
        accepted: completion_pb2.Accepted,
        formatter: ChoiceFormatter,
    ) -> None:
        def head(name: str) -> bytes:
            model, fingerprint = accepted.model, accepted.system_fingerprint
            return _encode(AnswerHead(identity, name, created, model, fingerprint))[:-1]

        self._whole = head(formatter.whole_object) + b',"choices":'
        self._chunk = b"data: " + head(formatter.chunk_object) + b',"choices":['
        self._prompt = b""
        if formatter.prompt_on_top and formatter.token_ids:
            self._prompt = b',"prompt_token_ids":' + _encode(list(accepted.prompts[0].ids))

    def whole(self, choices: Sequence[Struct], usage: Usage, more: Struct | None = None) -> bytes:
        """Encode a whole answer; `more` has the fields beside the choices."""
        rest = b"" if more is None else b"," + _encode(more)[1:-1]
        usages = _usage_field(usage)
        return b"%b%b,%b%b%b}" % (self._whole, _encode(choices), usages, self._prompt, rest)

    def chunk(self, choice: Struct | None, usage: Usage | UnsetType | None) -> bytes:
        """Encode a server-sent event; UNSET leaves `usage` out. The first has the prompt ids."""
        body = b"" if choice is None else _encode(choice)
        once, self._prompt = self._prompt, b""
        if usage is UNSET:
            return b"%b%b]%b}\n\n" % (self._chunk, body, once)
        return b"%b%b],%b%b}\n\n" % (self._chunk, body, _usage_field(usage), once)


def _usage_field(usage: Usage | UnsetType | None) -> bytes:
    return b'"usage":' + _encode(usage)


def usage_of(usage: types_pb2.Usage) -> Usage:
    """Return the final usage."""
    thought = usage.reasoning_tokens
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        cached_input_tokens=usage.cached_tokens,
        prompt_tokens_details=PromptTokensDetails(usage.cached_tokens),
        completion_tokens_details=CompletionTokensDetails(thought) if thought else UNSET,
    )


def running_usage(prompt_tokens: int, completion_tokens: int) -> Usage:
    """Return the usage so far."""
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens)


def finish_reason_of(finished: completion_pb2.ChoiceFinished) -> str:
    """Return the finish_reason of a choice."""
    return _FINISH_REASONS.get(finished.reason, "stop")


def stop_reason_of(finished: completion_pb2.ChoiceFinished) -> str | int | None:
    """Return the stop string or the stop token id that ended a choice, if any."""
    match = finished.match
    kind = match.WhichOneof("match")
    if kind == "stop_string":
        return match.stop_string
    return match.stop_token_id if kind == "stop_token_id" else None


def matched_stop_of(finished: completion_pb2.ChoiceFinished) -> str | int | None:
    """Return SGLang's matched_stop: the stop reason, or the end-of-sequence id."""
    if finished.match.WhichOneof("match") == "eos_token_id":
        return finished.match.eos_token_id
    return stop_reason_of(finished)


def finite(logprob: float) -> float:
    """Return a number that JSON can express."""
    return _IMPOSSIBLE if logprob == -math.inf else logprob


def prompt_logprobs_of(runs: Iterable[completion_pb2.PromptLogprobs]) -> PromptLogprobs:
    """Return the scores of a prompt in vLLM's form, from its runs in order."""
    return [None, *(row for run in runs for row in _rows(run))]


def _rows(run: completion_pb2.PromptLogprobs) -> Sequence[dict[str, PromptToken]]:
    columns, width = run.tokens, run.tokens.top_width
    tops = list(zip(columns.top_ids, columns.top_logprobs, run.top_texts, strict=True))
    rows: list[dict[str, PromptToken]] = []
    tokens = zip(columns.ids, columns.logprobs, columns.ranks, run.token_texts, strict=True)
    for place, (token, logprob, rank, text) in enumerate(tokens):
        row = {str(token): PromptToken(finite(logprob), rank, text)}
        candidates = enumerate(tops[place * width : (place + 1) * width], start=1)
        for candidate_rank, (candidate, score, candidate_text) in candidates:
            row[str(candidate)] = PromptToken(finite(score), candidate_rank, candidate_text)
        rows.append(row)
    return rows
