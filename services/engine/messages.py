"""What the gRPC side and the step loop tell each other.

Plain data without torch or protobuf, pickled over one socket: commands in, one `StepOutput` per
step out. Nothing else is shared.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from services.engine.model.checkpoint.generation import GenerationDefaults

__all__ = [
    "AddRequest",
    "Admitted",
    "CacheFlushed",
    "CancelRequest",
    "Command",
    "DrySettings",
    "FinishCause",
    "Finished",
    "FlushCache",
    "GrantCredit",
    "Guessed",
    "LoadSnapshot",
    "LogitBias",
    "LoopFailed",
    "LoopReady",
    "Mask",
    "MirostatSettings",
    "ModelDescription",
    "Output",
    "Refused",
    "RequestDone",
    "Resume",
    "SamplingSettings",
    "Score",
    "ScoredPrompt",
    "SetMasks",
    "StepOutput",
    "StoppingSettings",
    "Token",
]


@dataclass(frozen=True, slots=True)
class LogitBias:
    """What is added to the logits of some ids, each named once."""

    ids: "array[int]"
    """int64"""
    values: "array[float]"
    """float32"""


@dataclass(frozen=True, slots=True)
class DrySettings:
    """DryParams with every default applied, where they ask for something."""

    multiplier: float
    base: float
    allowed_length: int
    breaker_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class MirostatSettings:
    """MirostatParams with every default applied."""

    target_perplexity: float
    learning_rate: float

    @property
    def target_surprise(self) -> float:
        """In bits."""
        return math.log2(self.target_perplexity)


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """SamplingParams with every default applied."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: LogitBias | None = None
    dry: DrySettings | None = None
    mirostat: MirostatSettings | None = None
    allowed: bytes | None = None
    """Bit i, least significant first, = id i may be drawn; none past its end. None = every id"""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Runs of ids that are never generated, none of them empty"""

    @property
    def limits_ids(self) -> bool:
        """Whether some ids are never drawn, whatever the logits are."""
        return self.allowed is not None or bool(self.bad_words)

    @property
    def penalises(self) -> bool:
        """Whether the tokens so far change the logits of the next."""
        return (
            self.frequency_penalty != 0
            or self.presence_penalty != 0
            or self.repetition_penalty != 1
            or self.dry is not None
        )


@dataclass(frozen=True, slots=True)
class StoppingSettings:
    """StoppingParams with every default applied."""

    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    context_length: int
    """Tokens of prompt and output together, at most"""
    stop_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Resume:
    """What a sequence generated elsewhere."""

    sequence: int
    generated: Sequence[int]
    mirostat_mu: float | None = None
    """Mirostat's state after them"""


# Commands: from the gRPC side to the loop.


@dataclass(frozen=True, slots=True)
class AddRequest:
    """Admit prompts x n sequences, or refuse them all."""

    handle: int
    prompts: Sequence[Sequence[int]]
    n: int
    sampling: SamplingSettings
    stopping: StoppingSettings
    logprobs: int | None
    """Candidates per generated token; None = no scores"""
    prompt_logprobs: int | None
    """Candidates per prompt token; None = no scores"""
    resume: Sequence[Resume]
    constrained: bool
    """Sequence i draws through the masks of matcher (handle, i)"""
    credit: int | None
    """Tokens each sequence may generate before more is granted; None = unlimited"""
    cache_salt: bytes
    priority: int
    arrival: float
    """time.monotonic() of its arrival"""


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """End sequences; empty = all of the request."""

    handle: int
    sequences: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class GrantCredit:
    """Let every sequence of a request generate further tokens."""

    handle: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Mask:
    """What one sequence must and may draw from some position on."""

    handle: int
    sequence: int
    position: int
    """Tokens generated before it, counted from the end of the original prompt"""
    forced: Sequence[int]
    """The tokens from there on: each the only one that its place allows"""
    bits: bytes | None
    """What may follow them: bit i, least significant first, = id i may be drawn; None = every id"""
    terminated: bool
    """Nothing may follow them: the sequence ends there"""
    ahead: Sequence[tuple[int, bytes | None]] = ()
    """Guesses, in order, and what may be drawn behind each if it and those before come true"""

    @property
    def end(self) -> int:
        """The position that `bits` and `terminated` speak of."""
        return self.position + len(self.forced)

    @property
    def last(self) -> int:
        """The last position that this may speak of."""
        return self.end + len(self.ahead)

    def allows_at(self, position: int) -> bytes | None:
        """What may be drawn from `position` to `last`: a mask, perhaps short; None = every id."""
        if position > self.end:
            return self.ahead[position - self.end - 1][1]
        if position == self.end:
            return self.bits
        token = self.forced[position - self.position]
        return (1 << token).to_bytes(token // 8 + 1, "little")

    def outlives(self, position: int, token: int) -> bool:
        """Whether this still holds once that token stands at that position."""
        step = position - self.end
        return step < 0 or (step < len(self.ahead) and self.ahead[step][0] == token)


@dataclass(frozen=True, slots=True)
class SetMasks:
    """Masks that the grammar service answered."""

    masks: Sequence[Mask]


@dataclass(frozen=True, slots=True)
class FlushCache:
    """Forget cached prefixes that nothing holds."""


Command = AddRequest | CancelRequest | GrantCredit | SetMasks | FlushCache


# Outputs: from the loop to the gRPC side.


class FinishCause(Enum):
    """Why a sequence ended."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    GRAMMAR = "grammar"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Score:
    """The model's own natural-log probability of a token, and its best candidates."""

    logprob: float
    rank: int
    """1 = most likely"""
    top_ids: Sequence[int]
    top_logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request was admitted."""

    handle: int
    max_tokens: Sequence[int]
    """By prompt, lowered to what the context leaves"""
    cached_tokens: Sequence[int]
    """By prompt, found in the prefix cache"""
    queue_position: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A request was refused, or is cut: terminal."""

    handle: int
    code: str
    """Name of a gRPC status code"""
    reason: str
    message: str
    retry_seconds: float | None = None
    field: str = ""
    """Of the request, to blame"""


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """Scores of prompt tokens from `position` on."""

    handle: int
    prompt: int
    position: int
    ids: Sequence[int]
    scores: Sequence[Score]


class Token(NamedTuple):
    """One generated token. A tuple, because there are many: half the cost to make and to send."""

    handle: int
    sequence: int
    position: int
    id: int
    score: Score | None
    mirostat_mu: float | None = None
    """Mirostat's state after it, where that is in use"""


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence ended."""

    handle: int
    sequence: int
    cause: FinishCause
    token_id: int | None
    """The id that ended it, with EOS and STOP_TOKEN"""
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class RequestDone:
    """Every sequence of a request ended: terminal."""

    handle: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float


@dataclass(frozen=True, slots=True)
class CacheFlushed:
    """Answers FlushCache."""

    freed_blocks: int


class Guessed(NamedTuple):
    """What a constrained sequence may draw next: the masks along it would save steps."""

    handle: int
    sequence: int
    ids: list[int]


Output = Admitted | Refused | ScoredPrompt | Token | Guessed | Finished | RequestDone | CacheFlushed


class LoadSnapshot(NamedTuple):
    """How busy the loop is."""

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    preemptions: int = 0
    """Since the start"""
    steps: int = 0
    """Since the start"""


class StepOutput(NamedTuple):
    """What one step brought, in order."""

    outputs: Sequence[Output]
    load: LoadSnapshot

    def __reduce__(self) -> tuple[Any, ...]:
        # pickle takes longer to name a token's type than for all that is in it
        bare = [tuple(item) if type(item) is Token else item for item in self.outputs]
        return _step_output, (bare, self.load)


def _step_output(bare: Sequence[Any], load: LoadSnapshot) -> StepOutput:
    outputs = [Token._make(item) if type(item) is tuple else item for item in bare]
    return StepOutput(outputs, load)


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The model, as the loop loaded it."""

    architecture: str
    dtype: str
    device: str
    context_length: int
    vocabulary_size: int
    eos_token_ids: Sequence[int]
    bos_token_id: int | None
    recommended: GenerationDefaults
    weights_fingerprint: str
    block_size: int
    total_blocks: int
    kv_bytes: int
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class LoopReady:
    """The model is loaded and commands are taken."""

    model: ModelDescription


@dataclass(frozen=True, slots=True)
class LoopFailed:
    """The loop could not start. `message` is one sentence."""

    message: str
