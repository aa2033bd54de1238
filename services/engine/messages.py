"""Messages between the gRPC process and the loop process.

Plain data without torch or protobuf, pickled over one socket: commands in, one `StepOutput` per
step out. The processes share nothing else.
"""

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

__all__ = [
    "AdapterLoaded",
    "AddRequest",
    "Admitted",
    "BeamSettings",
    "CacheChange",
    "CacheFlushed",
    "CacheGroup",
    "CancelRequest",
    "CheckedRequest",
    "Command",
    "DraftTokens",
    "DrySettings",
    "EarlyStopping",
    "Embedded",
    "FinishCause",
    "Finished",
    "FlushCache",
    "FollowCache",
    "GenerationDefaults",
    "GrantCredit",
    "LoadAdapter",
    "LoadSnapshot",
    "LogitBias",
    "LoopFailed",
    "LoopReady",
    "Mask",
    "MirostatSettings",
    "ModelDescription",
    "Output",
    "PlacedImage",
    "Pooled",
    "Refused",
    "RequestDone",
    "RequestOutput",
    "Resume",
    "SamplingSettings",
    "Score",
    "ScoredPrompt",
    "SetEncoding",
    "SetMasks",
    "StepOutput",
    "StoppingSettings",
    "Token",
    "UnloadAdapter",
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
        """The target in bits."""
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
    """Bitmask, least significant bit first: bit i allows id i, a missing bit forbids it. None =
    every id is allowed"""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Non-empty runs of ids that must never be generated"""

    @property
    def limits_ids(self) -> bool:
        """True if the request itself forbids some ids."""
        return self.allowed is not None or bool(self.bad_words)

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
    """End of a beam search, once as many sequences have ended as there are beams."""

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
    """Indices of its ids in the prompt, rising"""
    embeddings: bytearray
    """[layers, len(places), hidden size] in the model's dtype. The first layer replaces the
    embeddings of the ids; the others are added to what the first decoder layers return"""
    grid: tuple[int, int] | None = None
    """Rows and columns in which the ids lie, for multimodal RoPE; None = they lie in a line"""


class Pooled(Enum):
    """Tokens whose hidden states make the vector of a prompt."""

    LAST = "the last token"
    ALL = "all tokens: none may come from the prefix cache"


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A valid GenerateRequest with every default applied: prompts x n sequences.

    Or a valid EmbedRequest, whose prompts are `pooled` and generate nothing.
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
    """Sequence i draws through the masks of matcher (handle, i)"""
    images: Mapping[int, Sequence[PlacedImage]] = field(default_factory=dict)
    """By prompt index, its images in order"""
    instructions: Mapping[int, int] = field(default_factory=dict)
    """By prompt index, number of tokens at its beginning that are an instruction"""
    pooled: Pooled | None = None
    """None = the request generates"""
    is_raw: bool = False
    """The last stage of the vectors is left out"""
    keeps_tokens: bool = False
    """Each token has a vector, or a weight, instead of each prompt"""
    weighs_tokens: bool = False
    """Tokens have weights instead of vectors"""
    second_texts: Mapping[int, int] = field(default_factory=dict)
    """By prompt index, where the second text of a pair begins"""
    unattended: Mapping[int, int] = field(default_factory=dict)
    """By prompt index, number of tokens at its end to which no token attends"""
    beams: BeamSettings | None = None
    """The n sequences of a prompt are the beams of a search; None = tokens are drawn"""

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


@dataclass(frozen=True, slots=True)
class AddRequest:
    """Admit all sequences of a request, or refuse them all."""

    handle: int
    checked: CheckedRequest
    credit: int | None
    """Tokens each sequence may generate before the next grant; None = unlimited"""
    cache_salt: bytes
    """Tenant of the request: only requests with the same salt share cached prefixes"""
    priority: int
    arrival: float
    """time.monotonic() when the request arrived"""
    adapter: int = 0
    """Number of its adapter; 0 = the model alone"""
    adapter_fingerprint: str = ""
    """Names the adapter's weights: requests with others share no cached prefixes"""


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """End some sequences of a request."""

    handle: int
    sequences: Sequence[int] = ()
    """Indices within the request; empty = all"""


@dataclass(frozen=True, slots=True)
class GrantCredit:
    """Let each sequence of a request generate `tokens` more tokens."""

    handle: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Mask:
    """Tokens that a grammar forces and allows in one sequence, from `position` on."""

    handle: int
    sequence: int
    position: int
    """Position of the first forced token, counted from the end of the original prompt"""
    forced: Sequence[int]
    """Tokens from `position` on, each the only one that the grammar allows at its position"""
    bits: bytes | None
    """Bitmask for the token after `forced`, least significant bit first; None = every id"""
    terminated: bool
    """True if the sequence must end after `forced`"""
    draft_masks: Sequence[tuple[int, bytes | None]] = ()
    """Draft tokens after `forced`, each with the bitmask for the token after it, which holds only
    if this draft token and all before it are drawn"""

    @property
    def end(self) -> int:
        """Position after the forced tokens, which `bits` and `terminated` describe."""
        return self.position + len(self.forced)

    @property
    def last(self) -> int:
        """Last position that has a bitmask."""
        return self.end + len(self.draft_masks)

    def allows_at(self, position: int) -> bytes | None:
        """Return the bitmask of a position up to `last`; it may be short, None = every id."""
        if position > self.end:
            return self.draft_masks[position - self.end - 1][1]
        if position == self.end:
            return self.bits
        token = self.forced[position - self.position]
        return (1 << token).to_bytes(token // 8 + 1, "little")

    def holds_after(self, position: int, token: int) -> bool:
        """Return whether the mask still holds after `token` is appended at `position`."""
        step = position - self.end
        return step < 0 or (step < len(self.draft_masks) and self.draft_masks[step][0] == token)


@dataclass(frozen=True, slots=True)
class SetMasks:
    """Hand over masks that the grammar service has computed."""

    masks: Sequence[Mask]


@dataclass(frozen=True, slots=True)
class FlushCache:
    """Evict all cached blocks that no sequence holds."""


@dataclass(frozen=True, slots=True)
class FollowCache:
    """Report changes of the prefix cache from now on, after all that it holds."""


@dataclass(frozen=True, slots=True)
class SetEncoding:
    """The image encoder begins to work, or has nothing more to do."""

    encodes: bool


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Read an adapter's directory, and keep its weights."""

    number: int
    """From 1; not in use"""
    path: str


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Drop an adapter that no request has."""

    number: int


Command = (
    AddRequest
    | CancelRequest
    | GrantCredit
    | SetMasks
    | FlushCache
    | FollowCache
    | SetEncoding
    | LoadAdapter
    | UnloadAdapter
)


# Outputs, from the loop process to the gRPC process.


class FinishCause(Enum):
    """Reason for which a sequence ended."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    GRAMMAR = "grammar"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Score:
    """Log probability of a token and its best competitors, before sampling changes the logits."""

    logprob: float
    """Natural logarithm"""
    rank: int
    """1 = most likely"""
    top_ids: Sequence[int]
    """Most likely ids, best first"""
    top_logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class Admitted:
    """The loop has admitted a request."""

    handle: int
    max_tokens: Sequence[int]
    """One per prompt, lowered to the rest of the context"""
    cached_tokens: Sequence[int]
    """Prefix hit of each prompt, in tokens"""
    queue_position: int
    """Number of waiting requests that are scheduled before this one"""


@dataclass(frozen=True, slots=True)
class Refused:
    """The loop has refused or aborted a request. Terminal."""

    handle: int
    code: str
    """Name of a gRPC status code"""
    reason: str
    message: str
    retry_seconds: float | None = None
    field: str = ""
    """Invalid field of the request"""


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """Scores of consecutive prompt tokens, the first at `position`."""

    handle: int
    prompt: int
    position: int
    ids: Sequence[int]
    scores: Sequence[Score]


@dataclass(frozen=True, slots=True)
class Embedded:
    """The vector of a prompt, an embedding or scores, or those of its tokens."""

    handle: int
    prompt: int
    vectors: bytes
    """float32, in the machine's byte order"""


class Token(NamedTuple):
    """One generated token. A tuple costs half as much to make and send as a dataclass."""

    handle: int
    sequence: int
    position: int
    id: int
    score: Score | None
    mirostat_mu: float | None = None
    """Mirostat's state after the token; None without Mirostat"""


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence has ended."""

    handle: int
    sequence: int
    cause: FinishCause
    token_id: int | None
    """Id that ended the sequence, for EOS and STOP_TOKEN"""
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class RequestDone:
    """All sequences of a request have ended. Terminal."""

    handle: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float


@dataclass(frozen=True, slots=True)
class CacheFlushed:
    """Answer to FlushCache."""

    freed_blocks: int


@dataclass(frozen=True, slots=True)
class AdapterLoaded:
    """Answer to LoadAdapter."""

    number: int
    num_bytes: int
    """Of the weights in memory"""
    failure: str = ""
    """Why the adapter was not loaded, one sentence"""


class DraftTokens(NamedTuple):
    """Draft tokens of a constrained sequence, which the loop verifies once it has their masks."""

    handle: int
    sequence: int
    ids: list[int]


RequestOutput = (
    Admitted | Refused | ScoredPrompt | Embedded | Token | DraftTokens | Finished | RequestDone
)
Output = RequestOutput | CacheFlushed | AdapterLoaded


class LoadSnapshot(NamedTuple):
    """Load of the loop after a step."""

    running: int = 0
    """Sequences that hold KV blocks"""
    waiting: int = 0
    """Sequences in the queue"""
    queued_tokens: int = 0
    """Tokens of waiting sequences that were not in the prefix cache"""
    free_blocks: int = 0
    """Free blocks of the scarcest group, scaled to `total_blocks`"""
    total_blocks: int = 0
    preemptions: int = 0
    """Since the start"""
    steps: int = 0
    """Since the start"""


class CacheChange(NamedTuple):
    """Hashes that one group of the prefix cache gained and lost; none is in both."""

    stored: Sequence[bytes]
    removed: Sequence[bytes]


class StepOutput(NamedTuple):
    """Outputs of one step, in order."""

    outputs: Sequence[Output]
    load: LoadSnapshot
    cache: Sequence[CacheChange | None] = ()
    """By group, the last one that of states, if there are any; empty without a change, or if nobody
    follows the cache"""

    def __reduce__(self) -> tuple[Any, ...]:
        # plain tuples: pickle spends more time on a token's type than on its fields
        bare = [tuple(item) if type(item) is Token else item for item in self.outputs]
        return _step_output, (bare, self.load, self.cache)


def _step_output(
    bare: Sequence[Any], load: LoadSnapshot, cache: Sequence[CacheChange | None]
) -> StepOutput:
    outputs = [Token._make(item) if type(item) is tuple else item for item in bare]
    return StepOutput(outputs, load, cache)


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling settings that the checkpoint recommends; None = no recommendation."""

    temperature: float | None = None
    """0 where generation_config.json sets do_sample to false"""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class CacheGroup(NamedTuple):
    """Layers that keep the same for each token or sequence."""

    blocks: int
    """Blocks, or slots of states"""
    window: int = 0
    """Last tokens whose keys and values a token reads, itself included; 0 = all"""
    snapshot_interval: int = 0
    """Above 0: the group holds states, and keeps one after each so many tokens of a prompt"""


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The model that the loop process has loaded."""

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
    """KV blocks of the first cache group"""
    cache_groups: Sequence[CacheGroup]
    kv_bytes: int
    weight_bytes: int
    kernels: str
    """Instruction set of the CPU kernels; "cuda" on a GPU, "none" if torch computes on a CPU"""
    model_code: str = "native"
    """Code that computes the model: "native" or "transformers" """
    takes_adapters: bool = True
    """False if the model is an encoder without adapters of its own, or in a GGUF file"""
    tasks: Sequence[str] = ()
    """Tasks whose adapters are loaded with the model, under the numbers from 1 on"""
    generates: bool = True
    """False if it only makes vectors"""
    pooled: Pooled | None = None
    """Tokens whose hidden states make vectors; None = it makes none"""
    vector_width: int = 0
    """Numbers of a prompt's vector; 0 = it makes none"""
    token_width: int = 0
    """Numbers of a token's vector; 0 = it makes none"""
    weighs_tokens: bool = False
    """It gives each token a weight"""
    hides_ends: bool = False
    """It can hide tokens at the end of a prompt from all tokens"""
    has_scores: bool = False
    """Its vectors are scores of texts, or of pairs of texts, rather than embeddings"""
    vectors_are_normalized: bool = False
    takes_pairs: bool = False
    """It tells the two texts of a pair apart"""
    images_are_consecutive: bool = False
    """True if the tokens of an image must have no others between them"""


@dataclass(frozen=True, slots=True)
class LoopReady:
    """The model is loaded, and the loop takes commands."""

    model: ModelDescription


@dataclass(frozen=True, slots=True)
class LoopFailed:
    """The loop could not start. `message` is one sentence for the operator."""

    message: str
