"""What the client hands out: frozen dataclasses, and how they are read from messages."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.tokenizer.v1 import tokenizer_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = [
    "Choice",
    "Completion",
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
    """Why a choice ended."""

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
    """What a request used, in tokens and seconds."""

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


@dataclass(frozen=True, slots=True)
class Scores:
    """Natural-log probabilities of tokens: entry i of every tuple speaks of token i.

    A token without a score (the first of a prompt) has NaN and rank 0.
    """

    logprobs: tuple[float, ...] = ()
    ranks: tuple[int, ...] = ()
    top_ids: tuple[tuple[int, ...], ...] = ()
    """The most likely ids, best first; empty tuples where none were asked for"""
    top_logprobs: tuple[tuple[float, ...], ...] = ()
    texts: tuple[str, ...] = ()
    """What each token adds to the text, or its own text where the text leaves it out: a special
    token, the stop id that ends a choice (text level only)"""
    offsets: tuple[int, ...] = ()
    """Where that starts, or would stand, in the choice's whole text, in code points (text level
    only)"""
    top_texts: tuple[tuple[str, ...], ...] = ()
    """Texts of top_ids (text level only)"""

    @classmethod
    def read(
        cls,
        columns: types_pb2.TokenColumns,
        texts: Sequence[str] = (),
        offsets: Sequence[int] = (),
        top_texts: Sequence[str] = (),
    ) -> "Scores | None":
        """None where the tokens carry no scores."""
        if not columns.logprobs:
            return None
        width, count = columns.top_width, len(columns.ids)
        rows = [slice(i * width, (i + 1) * width) for i in range(count)]
        return cls(
            tuple(columns.logprobs),
            tuple(columns.ranks),
            tuple(tuple(columns.top_ids[row]) for row in rows),
            tuple(tuple(columns.top_logprobs[row]) for row in rows),
            tuple(texts),
            tuple(offsets),
            tuple(tuple(top_texts[row]) for row in rows) if top_texts else (),
        )

    @classmethod
    def join(cls, parts: "Sequence[Scores]") -> "Scores | None":
        """The scores of consecutive runs of tokens as one; None for no run."""
        if not parts:
            return None
        return cls(
            tuple(chain.from_iterable(part.logprobs for part in parts)),
            tuple(chain.from_iterable(part.ranks for part in parts)),
            tuple(chain.from_iterable(part.top_ids for part in parts)),
            tuple(chain.from_iterable(part.top_logprobs for part in parts)),
            tuple(chain.from_iterable(part.texts for part in parts)),
            tuple(chain.from_iterable(part.offsets for part in parts)),
            tuple(chain.from_iterable(part.top_texts for part in parts)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What a choice gained. The last delta of a choice has its finish_reason."""

    index: int
    """Prompt index * n + i"""
    text: str = ""
    token_ids: tuple[int, ...] = ()
    position: int = 0
    """Of the first token, from the end of the prompt (of an echoed one, from its start)"""
    is_prompt: bool = False
    """Echoed prompt, not output"""
    scores: Scores | None = None
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    """The stop string or the id that ended the choice"""

    @classmethod
    def read(cls, delta: completion_pb2.ChoiceDelta) -> "Delta":
        scores = Scores.read(delta.tokens, delta.token_texts, delta.text_offsets, delta.top_texts)
        return cls(
            index=delta.index,
            text=delta.text,
            token_ids=tuple(delta.tokens.ids),
            position=delta.position,
            is_prompt=delta.is_prompt,
            scores=scores,
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """One completion of one prompt."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    """With echo, the prompt's too"""
    finish_reason: FinishReason
    stop: str | int | None
    scores: Scores | None

    @classmethod
    def join(cls, deltas: Sequence[Delta]) -> "Choice":
        """The whole of a choice's deltas."""
        last = deltas[-1]
        assert last.finish_reason is not None
        return cls(
            last.index,
            "".join(delta.text for delta in deltas),
            tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
            last.finish_reason,
            last.stop,
            Scores.join([delta.scores for delta in deltas if delta.scores is not None]),
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to a completion."""

    model: str
    system_fingerprint: str
    seed: int
    choices: tuple[Choice, ...]
    usage: Usage
    ignored: tuple[str, ...] = ()
    """Paths of what schemas of the request say without effect"""
    prompt_scores: tuple[Scores | None, ...] = ()
    """By prompt; entry i speaks of prompt token i + 1. None unless prompt_logprobs was given"""

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """What a sequence gained. The last delta of a sequence has its finish_reason."""

    sequence: int
    """Prompt index * n + choice; in prompt scores, the prompt index"""
    token_ids: tuple[int, ...] = ()
    position: int = 0
    """Of the first token, from the end of the prompt (of prompt scores, from its start)"""
    is_prompt: bool = False
    """Scores of prompt tokens, not output"""
    scores: Scores | None = None
    finish_reason: FinishReason | None = None
    stop: int | None = None
    """The id that ended the sequence"""

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
        """The whole of a sequence's deltas."""
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
    """The answer to a request at token level."""

    seed: int
    outputs: tuple[Output, ...]
    prompt_scores: tuple[Scores | None, ...]
    """By prompt; entry i speaks of prompt token i + 1. None unless prompt_logprobs was given"""
    usage: Usage

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of the first sequence."""
        return self.outputs[0].token_ids


@dataclass(frozen=True, slots=True)
class Encoding:
    """Token ids of a text, and the vocabulary's string of each."""

    ids: tuple[int, ...]
    tokens: tuple[str, ...]

    @classmethod
    def read(cls, encoding: tokenizer_pb2.Encoding) -> "Encoding":
        return cls(tuple(encoding.ids), tuple(encoding.tokens))


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is served."""

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
    def read(cls, model: completion_pb2.Model) -> "Model":
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
    """The model of an engine, its limits, and what requests may ask for."""

    id: str
    architecture: str
    dtype: str
    device: str
    context_length: int
    vocabulary_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    capabilities: frozenset[str]
    """Names of engine.v1.Capability in lower case, without the prefix: "prompt_logprobs" say"""
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
    """How busy an engine is."""

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
