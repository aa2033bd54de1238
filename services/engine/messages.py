"""Messages between the gRPC process and the loop process.

The messages are plain data without torch or protobuf, pickled over one socket: commands to the
loop, and one `StepOutput` per step from it. The processes share nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from services.engine.checked_request import CheckedRequest
from services.engine.model_description import ModelDescription

__all__ = [
    "AdapterLoaded",
    "AddRequest",
    "Admitted",
    "CacheChange",
    "CacheFlushed",
    "CancelRequest",
    "Command",
    "DraftCount",
    "DraftTokens",
    "Embedded",
    "FinishCause",
    "Finished",
    "FlushCache",
    "FollowCache",
    "GrantCredit",
    "LoadAdapter",
    "LoadSnapshot",
    "LoopFailed",
    "LoopReady",
    "Mask",
    "Output",
    "PoolUse",
    "Refused",
    "RequestDone",
    "RequestOutput",
    "Score",
    "ScoredPrompt",
    "SetEncoding",
    "SetMasks",
    "StepOutput",
    "Token",
    "UnloadAdapter",
]


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
    """Number of the request's adapter; 0 = the model alone"""
    adapter_fingerprint: str = ""
    """Fingerprint of the adapter's weights; requests with others share no cached prefixes"""


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
    """Tokens that a grammar forces, and allows next, in one sequence from `position` on."""

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
    """Draft tokens after `forced`, each with the bitmask for the token after it. A bitmask holds
    only if its draft token and all before it are drawn"""

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
    """Deliver masks that the grammar service has computed."""

    masks: Sequence[Mask]


@dataclass(frozen=True, slots=True)
class FlushCache:
    """Evict all cached blocks that no sequence holds."""


@dataclass(frozen=True, slots=True)
class FollowCache:
    """Report the whole prefix cache now, and its changes from now on."""


@dataclass(frozen=True, slots=True)
class SetEncoding:
    """The image encoder begins to work, or has ended its work."""

    encodes: bool


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Read an adapter's directory, and keep its weights."""

    number: int
    """Number above 0 that no adapter has"""
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
    """Vector of a prompt, which is an embedding or scores, or vectors of its tokens."""

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


class DraftCount(NamedTuple):
    """Draft tokens of one source."""

    source: str
    """Value of `DraftKind`"""
    drafts: int
    """Number of drafts that steps computed"""
    drafted: int
    """Number of their tokens"""
    accepted: int
    """Number of tokens among them that became tokens of the output"""


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
    drafts: Sequence[DraftCount] = ()
    """Draft tokens of the request"""


@dataclass(frozen=True, slots=True)
class CacheFlushed:
    """Answer to FlushCache."""

    freed_blocks: int


@dataclass(frozen=True, slots=True)
class AdapterLoaded:
    """Answer to LoadAdapter."""

    number: int
    num_bytes: int
    """Bytes of the weights in memory"""
    failure: str = ""
    """Reason why the adapter was not loaded, one sentence; empty = it was loaded"""


class DraftTokens(NamedTuple):
    """Draft tokens of a constrained sequence, which the loop verifies once it has their masks."""

    handle: int
    sequence: int
    ids: list[int]


RequestOutput = (
    Admitted | Refused | ScoredPrompt | Embedded | Token | DraftTokens | Finished | RequestDone
)
Output = RequestOutput | CacheFlushed | AdapterLoaded


class PoolUse(NamedTuple):
    """Use of one group of the cache, in blocks or slots."""

    held: int
    """Blocks that sequences hold"""
    cached: int
    """Further blocks that keep prefixes, until room is needed"""


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
    """Preemptions since the start"""
    steps: int = 0
    """Steps since the start"""
    pools: tuple[PoolUse, ...] = ()
    """Use of each cache group"""
    drafts: tuple[DraftCount, ...] = ()
    """Drafts since the start"""
    oversized_steps: int = 0
    """Steps since the start that were larger than the memory that CUDA graphs reserve"""
    ungraphed_steps: int = 0
    """Steps since the start that ran without a CUDA graph, in an engine with graphs"""


class CacheChange(NamedTuple):
    """Hashes that one group of the prefix cache gained and lost; no hash is in both."""

    stored: Sequence[bytes]
    removed: Sequence[bytes]


class StepOutput(NamedTuple):
    """Outputs of one step, in order."""

    outputs: Sequence[Output]
    load: LoadSnapshot
    cache: Sequence[CacheChange | None] = ()
    """Changes by group, that of states last; empty if there is no change, or if no client follows
    the cache"""

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
class LoopReady:
    """The model is loaded, and the loop takes commands."""

    model: ModelDescription


@dataclass(frozen=True, slots=True)
class LoopFailed:
    """The loop could not start. `message` is one sentence for the operator."""

    message: str
