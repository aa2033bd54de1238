"""Results of the client as frozen dataclasses, which are read from protobuf."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from itertools import chain

from tokenwire.messages import Message, ToolCall, ToolCallDelta, join_calls
from tokenwire.pb.completion.v1 import completion_pb2, models_pb2
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.tokenizer.v1 import tokenizer_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = [
    "Answer",
    "Choice",
    "Delta",
    "Encoding",
    "EngineModel",
    "FinishReason",
    "Generation",
    "Load",
    "Model",
    "Output",
    "Scores",
    "TokenDelta",
    "Usage",
]


class FinishReason(StrEnum):
    """Reason for the end of a choice."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"

    @classmethod
    def read(cls, reason: "types_pb2.FinishReason.ValueType") -> "FinishReason":
        name = types_pb2.FinishReason.Name(reason)
        return cls[name.removeprefix("FINISH_REASON_")]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens and seconds that a request used."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float

    @classmethod
    def read(cls, usage: types_pb2.Usage) -> "Usage":
        return cls(
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.cached_tokens,
            usage.queue_seconds,
            usage.prefill_seconds,
            usage.decode_seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Natural-log probabilities of tokens: entry i of every tuple belongs to token i.

    A token without a score (the first of a prompt) has NaN and rank 0.
    """

    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    ranks: tuple[int, ...] = ()
    top_ids: tuple[tuple[int, ...], ...] = ()
    """Most likely ids, best first; empty tuples unless requested"""
    top_logprobs: tuple[tuple[float, ...], ...] = ()
    texts: tuple[str, ...] = ()
    """Text that each token adds, or the token's own text where the output omits it: a special
    token, the stop id that ends a choice (prompts at text level only)"""
    offsets: tuple[int, ...] = ()
    """Start of each token in the choice's whole text, in code points; an omitted token has the
    offset at which it would start (prompts at text level only)"""
    top_texts: tuple[tuple[str, ...], ...] = ()
    """Texts of top_ids (prompts at text level only)"""
    data: tuple[bytes, ...] = ()
    """Bytes that each token adds to the content, which may end inside a character (conversations
    only)"""
    top_data: tuple[tuple[bytes, ...], ...] = ()
    """Bytes of top_ids (conversations only)"""

    @classmethod
    def read(cls, columns: types_pb2.TokenColumns) -> "Scores | None":
        """Return the scores of token columns; None if the columns hold no scores."""
        if not columns.logprobs:
            return None
        rows = _rows(columns)
        return cls(
            ids=tuple(columns.ids),
            logprobs=tuple(columns.logprobs),
            ranks=tuple(columns.ranks),
            top_ids=tuple(tuple(columns.top_ids[row]) for row in rows),
            top_logprobs=tuple(tuple(columns.top_logprobs[row]) for row in rows),
        )

    @classmethod
    def read_texts(
        cls, scored: completion_pb2.ChoiceDelta | completion_pb2.PromptLogprobs
    ) -> "Scores | None":
        """Return the scores of an event, with the texts, or the bytes, of its tokens."""
        scores = cls.read(scored.tokens)
        if scores is None:
            return None
        rows = _rows(scored.tokens)
        top_texts = tuple(tuple(scored.top_texts[row]) for row in rows) if scored.top_texts else ()
        scores = replace(scores, texts=tuple(scored.token_texts), top_texts=top_texts)
        if isinstance(scored, completion_pb2.PromptLogprobs):
            return scores
        return replace(
            scores,
            offsets=tuple(scored.text_offsets),
            data=tuple(scored.token_bytes),
            top_data=tuple(tuple(scored.top_bytes[row]) for row in rows)
            if scored.top_bytes
            else (),
        )

    @classmethod
    def join(cls, parts: "Sequence[Scores]") -> "Scores | None":
        """Return the joined scores of consecutive runs of tokens; None if there is no run."""
        if not parts:
            return None
        names = [field.name for field in fields(cls)]
        return cls(
            **{name: tuple(chain.from_iterable(getattr(p, name) for p in parts)) for name in names}
        )


def _rows(columns: types_pb2.TokenColumns) -> list[slice]:
    """Return for each token the slice of its candidates."""
    width = columns.top_width
    return [slice(i * width, (i + 1) * width) for i in range(len(columns.ids))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Part of a choice. The last delta of a choice has its finish_reason."""

    index: int
    """Index of the choice: prompt index * n + number of the choice among those of its prompt"""
    text: str = ""
    """Text to append; in a conversation the answer's content"""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    token_ids: tuple[int, ...] = ()
    """All ids since the last delta; the text of reasoning and calls among them may come later"""
    position: int = 0
    """Position of the first id, counted from the end of the prompt; of an echoed token, from the
    prompt's start"""
    is_prompt: bool = False
    """True for tokens of the echoed prompt"""
    scores: Scores | None = None
    """Scores of the text's tokens; only with logprobs"""
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    """Stop string or token id that ended the choice"""

    @classmethod
    def read(cls, delta: completion_pb2.ChoiceDelta) -> "Delta":
        return cls(
            index=delta.index,
            text=delta.text,
            reasoning=delta.reasoning,
            tool_calls=tuple(map(ToolCallDelta.read, delta.tool_calls)),
            token_ids=tuple(delta.token_ids),
            position=delta.position,
            is_prompt=delta.is_prompt,
            scores=Scores.read_texts(delta),
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """One completion of a prompt, or one answer to a conversation."""

    index: int
    text: str
    """Text of the choice; in a conversation the answer's content"""
    token_ids: tuple[int, ...]
    """Generated ids; with echo, the ids of the prompt come before them"""
    finish_reason: FinishReason
    stop: str | int | None
    scores: Scores | None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @classmethod
    def join(cls, deltas: Sequence[Delta]) -> "Choice":
        """Return the choice that consists of the deltas."""
        last = deltas[-1]
        assert last.finish_reason is not None
        return cls(
            last.index,
            "".join(delta.text for delta in deltas),
            tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
            last.finish_reason,
            last.stop,
            Scores.join([delta.scores for delta in deltas if delta.scores is not None]),
            "".join(delta.reasoning for delta in deltas),
            join_calls(chain.from_iterable(delta.tool_calls for delta in deltas)),
        )

    @property
    def message(self) -> Message:
        """The answer as a message, which the conversation's next request takes unchanged."""
        return Message("assistant", self.text or None, self.tool_calls, reasoning=self.reasoning)


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a request at text level."""

    model: str
    system_fingerprint: str
    seed: int
    choices: tuple[Choice, ...]
    usage: Usage
    ignored: tuple[str, ...] = ()
    """Paths of schema parts in the request that have no effect"""
    prompt_scores: tuple[Scores | None, ...] = ()
    """Scores of each prompt's tokens from token 1 on: entry i is token i + 1. None without
    prompt_logprobs"""

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def message(self) -> Message:
        """The message of the first choice."""
        return self.choices[0].message


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """Part of a sequence. The last delta of a sequence has its finish_reason."""

    sequence: int
    """Prompt index * n + choice; the prompt index if `is_prompt`"""
    token_ids: tuple[int, ...] = ()
    position: int = 0
    """Position of the first token, counted from the end of the prompt; from its start where
    `is_prompt`"""
    is_prompt: bool = False
    """True for scores of prompt tokens"""
    scores: Scores | None = None
    finish_reason: FinishReason | None = None
    stop: int | None = None
    """Token id that ended the sequence"""

    @classmethod
    def read(cls, delta: engine_pb2.OutputDelta) -> "TokenDelta":
        return cls(
            sequence=delta.sequence,
            token_ids=tuple(delta.tokens.ids),
            position=delta.position,
            scores=Scores.read(delta.tokens),
        )

    @classmethod
    def read_prompt(cls, scores: engine_pb2.PromptScores) -> "TokenDelta":
        return cls(
            sequence=scores.prompt,
            token_ids=tuple(scores.tokens.ids),
            position=scores.position,
            is_prompt=True,
            scores=Scores.read(scores.tokens),
        )


@dataclass(frozen=True, slots=True)
class Output:
    """One generated sequence."""

    sequence: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop: int | None
    scores: Scores | None

    @classmethod
    def join(cls, deltas: Sequence[TokenDelta]) -> "Output":
        """Return the sequence that consists of the deltas."""
        last = deltas[-1]
        assert last.finish_reason is not None
        return cls(
            last.sequence,
            tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
            last.finish_reason,
            last.stop,
            Scores.join([delta.scores for delta in deltas if delta.scores is not None]),
        )


@dataclass(frozen=True, slots=True)
class Generation:
    """Answer to a request at token level."""

    seed: int
    outputs: tuple[Output, ...]
    prompt_scores: tuple[Scores | None, ...]
    """Scores of each prompt's tokens from token 1 on: entry i is token i + 1. None without
    prompt_logprobs"""
    usage: Usage

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of the first sequence."""
        return self.outputs[0].token_ids


@dataclass(frozen=True, slots=True)
class Encoding:
    """Token ids of a text, with the vocabulary's string and the bytes of each token."""

    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    pieces: tuple[bytes, ...]
    """Bytes that each token adds to a decoded text; they may end inside a character"""

    @classmethod
    def read(cls, encoding: tokenizer_pb2.Encoding) -> "Encoding":
        return cls(tuple(encoding.ids), tuple(encoding.tokens), tuple(encoding.pieces))


@dataclass(frozen=True, slots=True)
class Model:
    """A served model."""

    id: str
    aliases: tuple[str, ...]
    context_length: int
    max_output_length: int
    max_logprobs: int
    infill: bool
    grammar: bool
    chat: bool
    max_chat_logprobs: int
    system_fingerprint: str

    @classmethod
    def read(cls, model: models_pb2.Model) -> "Model":
        return cls(
            model.id,
            tuple(model.aliases),
            model.context_length,
            model.max_output_length,
            model.max_logprobs,
            model.infill,
            model.grammar,
            model.chat,
            model.max_chat_logprobs,
            model.system_fingerprint,
        )


@dataclass(frozen=True, slots=True)
class EngineModel:
    """Model of an engine, its limits and its capabilities."""

    id: str
    architecture: str
    dtype: str
    device: str
    context_length: int
    vocabulary_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    capabilities: frozenset[str]
    """Lower-case names of engine.v1.Capability without the prefix ("prompt_logprobs")"""
    max_logprobs: int
    max_sequences_per_request: int
    max_running_sequences: int
    max_waiting_sequences: int
    max_step_tokens: int
    block_size: int
    total_blocks: int
    version: str

    @classmethod
    def read(cls, model: engine_pb2.GetModelResponse) -> "EngineModel":
        names = (engine_pb2.Capability.Name(value) for value in model.capabilities)
        return cls(
            model.model,
            model.architecture,
            model.dtype,
            model.device,
            model.context_length,
            model.vocabulary_size,
            tuple(model.eos_token_ids),
            model.bos_token_id if model.HasField("bos_token_id") else None,
            frozenset(name.removeprefix("CAPABILITY_").lower() for name in names),
            model.max_logprobs,
            model.max_sequences_per_request,
            model.max_running_sequences,
            model.max_waiting_sequences,
            model.max_step_tokens,
            model.block_size,
            model.total_blocks,
            model.version,
        )


@dataclass(frozen=True, slots=True)
class Load:
    """Load of an engine."""

    running_sequences: int
    waiting_sequences: int
    queued_tokens: int
    free_blocks: int
    total_blocks: int
    tokens_per_second: float
    draining: bool

    @classmethod
    def read(cls, load: engine_pb2.Load) -> "Load":
        return cls(
            load.running_sequences,
            load.waiting_sequences,
            load.queued_tokens,
            load.free_blocks,
            load.total_blocks,
            load.tokens_per_second,
            load.draining,
        )
