"""Answers with choices, as completions and chats have them: fields, usage, chunks of streams."""

import time
import uuid
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self, TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType

from services.http_shim.backends.output_collector import OutputCollector
from services.http_shim.dialects.content_logprobs import finite
from services.http_shim.dialects.generation import GenerationBody, StreamOptions
from services.http_shim.dialects.writer import EventWriter, Writer
from services.http_shim.errors import error_body
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = [
    "AnswerHead",
    "AnswerOptions",
    "ChoicesWriter",
    "PromptLogprobs",
    "Usage",
    "finish_reason_of",
    "matched_stop_of",
    "stop_reason_of",
]

_FINISH_REASONS: dict[int, str] = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
    types_pb2.FINISH_REASON_CANCELLED: "cancelled",
}
_encode = msgspec.json.Encoder().encode


class PromptTokensDetails(Struct):
    """Prompt tokens by source, as in OpenAI's API."""

    cached_tokens: int


class CompletionTokensDetails(Struct):
    """Generated tokens by kind, as in OpenAI's API."""

    reasoning_tokens: int | UnsetType = UNSET
    """Only with reasoning"""
    accepted_prediction_tokens: int | UnsetType = UNSET
    """Tokens of the prediction that became tokens of the answer; only with a prediction"""
    rejected_prediction_tokens: int | UnsetType = UNSET
    """Tokens of the prediction that were computed in vain; only with a prediction"""


class Usage(Struct):
    """Tokens of an answer. The cached ones, and those of reasoning, are known only at the end."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_input_tokens: int | UnsetType = UNSET
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """Only with reasoning or a prediction"""


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
class AnswerOptions:
    """The parts of an answer that a client wants besides its text."""

    choices_per_prompt: int = 1
    logprobs: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False
    prompt_logprobs: bool = False
    stream_options: StreamOptions | None = None

    @classmethod
    def of(cls, body: GenerationBody, *, logprobs: bool) -> Self:
        """Return the options of a body."""
        return cls(
            choices_per_prompt=1 if body.n is None else body.n,
            logprobs=logprobs,
            token_ids=bool(body.return_token_ids),
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            prompt_logprobs=body.prompt_logprobs is not None,
            stream_options=body.stream_options,
        )


class ChoicesWriter(Writer):
    """Writer of an answer with choices."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    prompt_on_top: ClassVar[bool] = False
    """True if the ids of the only prompt stand beside the choices"""

    def __init__(self, options: AnswerOptions) -> None:
        self.options = options

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

    def events(self, accepted: completion_pb2.Accepted, request_id: str) -> "_ChoiceEvents":
        return _ChoiceEvents(self, accepted)

    def whole(self, output: OutputCollector) -> bytes:
        accepted, usage, options = output.accepted, output.usage, self.options
        assert accepted is not None
        assert usage is not None
        choices = [
            self.choice(
                index,
                output.pending.get(index, []),
                output.finished[index],
                accepted.prompts[index // options.choices_per_prompt],
            )
            for index in sorted(output.finished)
        ]
        more = None
        if options.prompt_logprobs:
            runs = output.prompt_logprobs
            prompts = [_prompt_logprobs(runs.get(i, ())) for i in range(len(accepted.prompts))]
            more = self.add_prompt_logprobs(choices, prompts)
        return _Envelope(self, accepted).whole(choices, _usage_of(usage), more)


class _ChoiceEvents(EventWriter):
    """Writer of chunks, in each of which one choice has a part."""

    def __init__(self, writer: ChoicesWriter, accepted: completion_pb2.Accepted) -> None:
        self._writer = writer
        self._per_prompt = writer.options.choices_per_prompt
        self._prompts = accepted.prompts
        self._envelope = _Envelope(writer, accepted)
        self._prompt_tokens = sum(len(prompt.ids) for prompt in accepted.prompts)
        self._tokens = 0
        """Generated tokens of the events so far"""
        self._unfinished = len(accepted.prompts) * self._per_prompt
        self._held: completion_pb2.ChoiceFinished | None = None
        """End of the last choice, whose chunk waits for the usage"""
        self._started: set[int] = set()
        """Choices with at least one chunk"""
        options = writer.options.stream_options
        self._usage_on_finish = options is None
        self._usage_at_end = options is not None and bool(options.include_usage)
        self._usage_always = options is not None and bool(options.continuous_usage_stats)

    def output(
        self,
        index: int,
        deltas: Sequence[completion_pb2.ChoiceDelta],
        finished: completion_pb2.ChoiceFinished | None,
        tokens: int,
        usage: types_pb2.Usage | None,
    ) -> Iterable[bytes]:
        opening, self._tokens = self._running_usage(), tokens
        last = self._running_usage()
        if finished is not None:
            self._unfinished -= 1
            if self._usage_on_finish and not self._unfinished:
                if usage is None:
                    self._held, finished = finished, None
                else:
                    last = _usage_of(usage)
        if not deltas and finished is None:  # the end that came alone is held
            return ()
        return self._chunks(index, deltas, finished, opening, last)

    def complete(self, usage: types_pb2.Usage) -> Iterator[bytes]:
        final = _usage_of(usage)
        if self._held is not None:
            running = self._running_usage()
            yield from self._chunks(self._held.index, (), self._held, running, final)
        if self._usage_at_end:
            yield self._envelope.chunk(None, final)
        yield b"data: [DONE]\n\n"

    def fail(self, error: ServiceError) -> Iterable[bytes]:
        return [b"data: %b\n\n" % error_body(error)]

    def _chunks(
        self,
        index: int,
        deltas: Sequence[completion_pb2.ChoiceDelta],
        finished: completion_pb2.ChoiceFinished | None,
        opening: Usage | UnsetType | None,
        last: Usage | UnsetType | None,
    ) -> Iterable[bytes]:
        """Return the chunks of a choice.

        The last chunk carries the usage `last`; before it, a choice's first chunk carries
        `opening`.
        """
        is_first = index not in self._started
        prompt = self._prompts[index // self._per_prompt] if is_first else None
        chunks = self._writer.chunks(index, deltas, finished, prompt)
        if not chunks:
            return ()
        self._started.add(index)
        usages = [self._running_usage()] * (len(chunks) - 1) + [last]
        if is_first and len(chunks) > 1:
            usages[0] = opening
        return map(self._envelope.chunk, chunks, usages)

    def _running_usage(self) -> Usage | UnsetType | None:
        """Return the usage in a chunk before the last one; UNSET = no field."""
        if self._usage_always:
            prompt, generated = self._prompt_tokens, self._tokens
            return Usage(prompt, generated, prompt + generated)
        return None if self._usage_at_end else UNSET


class _Envelope:
    """Encoder of an answer's objects; their shared fields are encoded once."""

    __slots__ = ("_chunk", "_prompt", "_whole")

    def __init__(self, writer: ChoicesWriter, accepted: completion_pb2.Accepted) -> None:
        identity, created = f"{writer.id_prefix}-{uuid.uuid4().hex}", int(time.time())

        def head(name: str) -> bytes:
            model, fingerprint = accepted.model, accepted.system_fingerprint
            return _encode(AnswerHead(identity, name, created, model, fingerprint))[:-1]

        self._whole = head(writer.whole_object) + b',"choices":'
        self._chunk = b"data: " + head(writer.chunk_object) + b',"choices":['
        self._prompt = b""
        if writer.prompt_on_top and writer.options.token_ids:
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


def _usage_of(usage: types_pb2.Usage) -> Usage:
    """Return the final usage."""
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        cached_input_tokens=usage.cached_tokens,
        prompt_tokens_details=PromptTokensDetails(usage.cached_tokens),
        completion_tokens_details=_details_of(usage),
    )


def _details_of(usage: types_pb2.Usage) -> CompletionTokensDetails | UnsetType:
    thought = usage.reasoning_tokens or UNSET
    for drafts in usage.drafts:
        if drafts.source == types_pb2.DRAFT_SOURCE_PREDICTION:
            accepted = drafts.accepted_tokens
            return CompletionTokensDetails(thought, accepted, drafts.drafted_tokens - accepted)
    return UNSET if thought is UNSET else CompletionTokensDetails(thought)


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


def _prompt_logprobs(runs: Iterable[completion_pb2.PromptLogprobs]) -> PromptLogprobs:
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
