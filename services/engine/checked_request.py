"""A valid request, with every default applied. Plain data without torch or protobuf."""

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

__all__ = [
    "BeamSettings",
    "CheckedRequest",
    "DrySettings",
    "EarlyStopping",
    "LogitBias",
    "MirostatSettings",
    "PlacedImage",
    "Pooled",
    "Resume",
    "SamplingSettings",
    "StoppingSettings",
    "bitmask",
]


def bitmask(ids: Iterable[int], vocabulary_size: int) -> bytes:
    """Return a mask that allows these ids: ceil(vocabulary_size / 8) bytes, lowest bit first."""
    mask = bytearray(-(-vocabulary_size // 8))
    for token in ids:
        mask[token >> 3] |= 1 << (token & 7)
    return bytes(mask)


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Numbers to add to the logits of some ids."""

    ids: "array[int]"
    """int64, distinct"""
    values: "array[float]"
    """float32, one for each id"""


@dataclass(frozen=True, slots=True)
class DrySettings:
    """DryParams with every default applied and a multiplier above 0."""

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
        """Target surprise in bits."""
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
    """Bitmask, least significant bit first: bit i allows id i, and a missing bit forbids its id;
    None = every id is allowed"""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Non-empty runs of ids that must never be generated"""
    suppressed: tuple[int, ...] = ()
    """Ids of the checkpoint that are generated only if no other id is left"""
    suppressed_first: tuple[int, ...] = ()
    """The same for the first token"""
    penalty_window: int | None = None
    """Last tokens of prompt and output that the three penalties count; None = repetition_penalty
    counts all tokens, the others all generated ones"""

    @property
    def limits_ids(self) -> bool:
        """True if the request itself forbids some ids."""
        return self.allowed is not None or bool(self.bad_words)

    @property
    def suppresses_ids(self) -> bool:
        """True if the checkpoint excludes some ids."""
        return bool(self.suppressed or self.suppressed_first)

    @property
    def penalises(self) -> bool:
        """True if earlier tokens change the logits of the next one."""
        return (
            self.frequency_penalty != 0
            or self.presence_penalty != 0
            or self.repetition_penalty != 1
            or self.dry is not None
        )


class EarlyStopping(Enum):
    """Condition that ends a beam search after as many sequences have ended as there are beams."""

    ESTIMATE = "the best beam, as if it ended now, ranks below them"
    FIRST = "at once"
    NEVER = "no beam can rank above one of them"


@dataclass(frozen=True, slots=True)
class BeamSettings:
    """BeamSearch with every default applied."""

    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.ESTIMATE


@dataclass(frozen=True, slots=True)
class StoppingSettings:
    """StoppingParams with every default applied."""

    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    context_length: int
    """Upper bound of prompt and output tokens together"""
    stop_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Resume:
    """Tokens that a sequence has generated on another engine."""

    sequence: int
    generated: Sequence[int]
    mirostat_mu: float | None = None
    """Mirostat's state after `generated`"""


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An encoded image, and the ids of its prompt that it stands for."""

    digest: bytes
    """Hash of the encoded file: equal images share cached prefixes"""
    places: Sequence[int]
    """Indices of the image's ids in the prompt, ascending"""
    embeddings: bytearray
    """[layers, len(places), hidden size] in the model's dtype. The first layer replaces the
    embeddings of the ids; the others are added to what the first decoder layers return"""
    grid: tuple[int, int] | None = None
    """Rows and columns of the ids for multimodal RoPE; None = the ids lie in a line"""


class Pooled(Enum):
    """Tokens whose hidden states make the vector of a prompt."""

    LAST = "the last token"
    ALL = "all tokens: none may come from the prefix cache"


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A valid GenerateRequest or EmbedRequest with every default applied.

    A GenerateRequest has prompts x n sequences. The prompts of an EmbedRequest are `pooled` and
    generate nothing.
    """

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
    """True if sequence i draws through the masks of matcher (handle, i)"""
    prediction: Sequence[int] = ()
    """Tokens that the client expects as the answer; empty = it states none"""
    images: Mapping[int, Sequence[PlacedImage]] = field(default_factory=dict)
    """Images in order, by prompt index"""
    instructions: Mapping[int, int] = field(default_factory=dict)
    """Number of tokens at the beginning that are an instruction, by prompt index"""
    pooled: Pooled | None = None
    """Tokens whose states make the vectors; None = the request generates"""
    is_raw: bool = False
    """True if the last stage of the vectors is left out"""
    keeps_tokens: bool = False
    """True if each token has a vector or a weight, rather than each prompt"""
    weighs_tokens: bool = False
    """True if tokens have weights instead of vectors"""
    second_texts: Mapping[int, int] = field(default_factory=dict)
    """First token of the second text of a pair, by prompt index"""
    unattended: Mapping[int, int] = field(default_factory=dict)
    """Number of tokens at the end to which no token attends, by prompt index"""
    beams: BeamSettings | None = None
    """Settings of a beam search, whose beams are a prompt's n sequences; None = tokens are drawn"""

    @staticmethod
    def of_texts(
        prompts: Sequence[Sequence[int]],
        pooled: Pooled,
        context_length: int,
        second_texts: Mapping[int, int] | None = None,
        instructions: Mapping[int, int] | None = None,
        unattended: Mapping[int, int] | None = None,
        *,
        is_raw: bool = False,
        keeps_tokens: bool = False,
        weighs_tokens: bool = False,
    ) -> "CheckedRequest":
        """Return a request for vectors of prompts, or for vectors or weights of their tokens."""
        keeps_tokens |= weighs_tokens
        return CheckedRequest(
            prompts=prompts,
            n=1,
            sampling=SamplingSettings(temperature=0, top_p=1, top_k=0, min_p=0, seed=0),
            stopping=StoppingSettings(0, 0, True, context_length, frozenset()),
            logprobs=None,
            prompt_logprobs=None,
            resume=(),
            constrained=False,
            pooled=Pooled.ALL if keeps_tokens else pooled,
            is_raw=is_raw,
            keeps_tokens=keeps_tokens,
            weighs_tokens=weighs_tokens,
            second_texts=second_texts or {},
            instructions=instructions or {},
            unattended=unattended or {},
        )

    @property
    def image_bytes(self) -> int:
        """Bytes of the images' embeddings."""
        return sum(len(image.embeddings) for each in self.images.values() for image in each)

    @property
    def num_sequences(self) -> int:
        """Number of sequences: prompts x n."""
        return len(self.prompts) * self.n


# Commands, from the gRPC process to the loop process.
