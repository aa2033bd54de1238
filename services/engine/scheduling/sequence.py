"""Sequences and their requests. Only the step loop's thread uses them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from services.engine.checked_request import Pooled, Resume
from services.engine.messages import AddRequest, Mask
from services.engine.sampling.bad_words import BadWords
from services.engine.sampling.mirostat import Mirostat
from services.engine.sampling.penalties import Penalties
from services.engine.scheduling.beam_search import BeamSearch
from services.engine.scheduling.sequence_cache import BlockTable, SequenceStates
from services.engine.scheduling.speculation import Speculation
from services.engine.scheduling.tenants import Tenant
from services.engine.scheduling.token_ids import Prompt, TokenIds

__all__ = ["LogitsHold", "Request", "SequenceState", "TokenSequence"]


class SequenceState(Enum):
    """Lifecycle of a sequence."""

    WAITING = "waiting"
    """The sequence holds no blocks: it is new or preempted"""
    RUNNING = "running"
    """The sequence holds blocks: it prefills or decodes"""
    FINISHED = "finished"


class LogitsHold:
    """Claim of a sequence on the logits of its next position, which the step loop holds.

    The step loop drops logits once their sequence has another claim or no claim.
    """


@dataclass(slots=True, eq=False)
class QueueEntry:
    """A sequence's place in the waiting queue."""

    due: float
    """Sort key within a tenant and priority, in time.monotonic(): the arrival, plus the seconds
    that the prompt takes, plus a delay for each earlier choice of the request"""
    tokens: int = 0
    """Number of tokens that the prefix cache lacked when the sequence was queued"""
    awaited_hash: bytes | None = None
    """Hash that another sequence is about to add to the cache, so that this one continues there"""


class TokenSequence:
    """One choice of one prompt: its tokens, blocks, states, credit and sampling state."""

    def __init__(
        self,
        request: "Request",
        index: int,
        prompt: Prompt,
        resume: Resume | None,
        max_tokens: int,
    ) -> None:
        command, checked = request.command, request.command.checked
        sampling = checked.sampling
        self.request = request
        self.index = index
        """Index among the request's sequences, n per prompt"""
        self.prompt_length = len(prompt.ids)
        self.max_tokens = max_tokens
        self.images = prompt.images
        """Images of the prompt; None = the prompt has none"""
        self._ids = TokenIds(prompt, resume.generated if resume is not None else ())
        self.length = len(self._ids.array)
        """Number of prompt and generated tokens"""
        self.position = self.length - self.prompt_length
        """Number of generated tokens, from the end of the original prompt"""
        self.newest = int(self._ids.array[-1])

        self.state = SequenceState.WAITING
        self.tenant = Tenant(command.cache_salt)
        """Tenant of the sequence, which the scheduler sets when it queues the sequence"""
        self.queued = QueueEntry(command.arrival)
        self.tables: Sequence[BlockTable] = ()
        """Block tables by group of attention layers; empty while the sequence waits"""
        self.states: SequenceStates | None = None
        """Slots of recurrent states; None while the sequence waits, or if the model has none"""
        self.capacity = 0
        """Number of tokens for which all tables have blocks"""
        self.num_computed = 0
        """Number of tokens whose KV is written, by the current step at the latest"""
        self.in_flight = 0
        """Number of tokens that a running step has drawn and that are not on the host yet"""
        self.cached_tokens: int | None = None
        """Number of prompt tokens in the prefix cache at the first start; None = never started"""
        self.pooled = checked.pooled
        """Tokens that make the prompt's vector; None = the sequence generates"""
        self.is_raw = checked.is_raw
        """True if the last stage of the prompt's vector is left out"""
        self.keeps_tokens = checked.keeps_tokens
        """True if each token of the prompt gets a vector or a weight"""
        self.weighs_tokens = checked.weighs_tokens
        """True if each token of the prompt gets a weight instead of a vector"""
        self.second_text = checked.second_texts.get(self.prompt_index)
        """Index of the first token of a pair's second text; None = the prompt is not a pair"""
        self.instruction_length = checked.instructions.get(self.prompt_index, 0)
        """Number of tokens at the beginning of the prompt that pooling may leave out"""
        self.unattended_length = checked.unattended.get(self.prompt_index, 0)
        """Number of tokens at the end of the prompt to which no token attends"""
        is_scored = checked.prompt_logprobs is not None and index % checked.n == 0
        needs_all = is_scored or checked.pooled is Pooled.ALL
        self.scored = 1 if needs_all else self.prompt_length
        """Index of the first prompt token to score; only the first choice of a prompt scores it.
        A prompt of which all tokens are pooled counts as not scored"""

        self.credit = command.credit if not request.searches else None
        """Tokens that may be drawn; None = unlimited. A search delivers its results by credit"""
        self.starved_since: float | None = None
        """time.monotonic() when the credit ran out"""
        self.mask: Mask | None = None
        """Newest mask of a constrained sequence; None while it is awaited"""
        self.logits_hold: LogitsHold | None = None
        """Claim on logits that are held until a draw is allowed; None = no logits are held"""

        self.speculation = Speculation(checked.prediction, self.prompt_length)
        self.penalties = Penalties(sampling, self.prompt_length) if sampling.penalises else None
        self.mirostat: Mirostat | None = None
        if sampling.mirostat is not None:
            mu = resume.mirostat_mu if resume is not None else None
            self.mirostat = Mirostat(sampling.mirostat, mu)

    @property
    def adapter(self) -> int:
        """Number of the request's adapter; 0 = the model alone."""
        return self.request.command.adapter

    @property
    def prompt_index(self) -> int:
        return self.index // self.request.command.checked.n

    @property
    def search(self) -> BeamSearch | None:
        """Search of which the sequence is a beam; None = its tokens are drawn."""
        searches = self.request.searches
        return searches[self.prompt_index] if searches else None

    @property
    def search_key(self) -> tuple[int, int]:
        """Key of the sequence's beam search, unique in the scheduler."""
        return self.request.command.handle, self.prompt_index

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """Prompt and generated ids: int32 [length], a view."""
        return self._ids.array

    @property
    def forced(self) -> Sequence[int]:
        """Next tokens, as far as the mask allows only one id."""
        if self.mask is None:
            return ()
        return self.mask.forced[self.position - self.mask.position :]

    @property
    def is_at_end(self) -> bool:
        """True if the grammar is complete."""
        return self.mask is not None and self.mask.terminated and self.position == self.mask.end

    @property
    def has_credit(self) -> bool:
        """True if credit is left for a token beyond those in flight."""
        return self.credit is None or self.credit > self.in_flight

    @property
    def is_paused(self) -> bool:
        """True if the client has granted no credit for the next token."""
        return self.starved_since is not None

    @property
    def may_draw(self) -> bool:
        """True if the sequence has credit and a mask for the next token."""
        return self.may_draw_at(self.position)

    def may_draw_at(self, position: int) -> bool:
        """Return whether the sequence has credit and a mask for the token at `position`.

        A beam never draws: its search chooses the tokens of all beams together.
        """
        if self.request.searches:
            return False
        if not self.has_credit or not self.request.command.checked.constrained:
            return self.has_credit
        return self.mask is not None and position <= self.mask.last

    @property
    def awaits_mask(self) -> bool:
        """True if only the mask for the next token is missing."""
        is_constrained = self.request.command.checked.constrained
        return is_constrained and self.has_credit and not self.may_draw

    @property
    def awaits_beams(self) -> bool:
        """True if the beam has its logits, and waits until the other beams have theirs."""
        return bool(self.request.searches) and self.logits_hold is not None

    @property
    def order(self) -> tuple[int, float, int, int]:
        """Sort key: the first sequences are scheduled first and preempted last."""
        return (*self.request.order, self.index)

    @property
    def uncomputed(self) -> int:
        """Number of tokens without KV; 0 while the sequence waits for a mask or for credit.

        A token in flight counts, unless it is the last one of the sequence.
        """
        left = self.length - self.num_computed
        if self.in_flight and self.position + self.in_flight < self.max_tokens:
            left += self.in_flight
        return left

    @property
    def may_draft_behind_flight(self) -> bool:
        """True if the sequence may have draft tokens once its token in flight is on the host."""
        if not self.in_flight or not self.request.draws_independently:
            return False
        return self.uncomputed == 1 and self.room > self.in_flight

    @property
    def room(self) -> int:
        """Number of tokens that may follow the next one, by `max_tokens` and credit."""
        room = self.max_tokens - self.position - 1
        if self.credit is not None:
            room = min(room, self.credit - 1)
        return max(room, 0)

    def append(self, token: int) -> None:
        """Append a generated token, which ends the use of the logits and mask of its position."""
        self.logits_hold = None
        if self.mask is not None and not self.mask.holds_after(self.position, token):
            self.mask = None
        self._ids.append(token)
        self.length += 1
        self.position += 1
        self.newest = token

    def continue_from(self, other: "TokenSequence") -> None:
        """Replace the tokens by those of another beam. Blocks and states do not change."""
        self._ids = other._ids.fork()
        self.length, self.position, self.newest = other.length, other.position, other.newest

    def drop_draft_masks(self) -> None:
        """Drop the mask once a draft token was accepted: the grammar service sends a new one."""
        if self.mask is not None and self.position > self.mask.end:
            self.mask = None

    def block_hash(self, index: int) -> bytes:
        return self._ids.block_hash(index)

    def reusable_hashes(self) -> list[bytes]:
        """Return the hashes of the full blocks that the prefix cache may serve.

        At least the last token is always computed, for its logits. Every token whose successor is
        still to be scored is computed, too.
        """
        last = self.length - 1
        if self.scored < self.prompt_length:
            last = self.scored - 1
        return self._ids.block_hashes(last)


@dataclass(slots=True, eq=False)
class Request:
    """A request and its progress."""

    command: AddRequest
    last_ids: frozenset[int] = frozenset()
    """Ids that end a sequence of the request"""
    sequences: list[TokenSequence] = field(default_factory=list)
    searches: list[BeamSearch] = field(default_factory=list)
    """Beam search of each prompt; empty = tokens are drawn"""
    delivered: int = 0
    """Number of tokens of beam search results that were sent to the client"""
    unfinished: int = 0
    """Number of sequences that have not finished"""
    running: int = 0
    """Number of running sequences"""
    started: float | None = None
    """time.monotonic() of the first step that computed a token of the request"""
    first_token: float | None = None
    """time.monotonic() of the first generated token"""
    bad_words: BadWords | None = field(init=False)
    draws_independently: bool = field(init=False)
    """True if a draw depends on its row of logits alone, and not on the token before. Penalties,
    mirostat, bad words of several tokens and beams depend on that token. Masks do, too, but the
    grammar service sends the masks behind reported draft tokens"""
    is_plainly_greedy: bool = field(init=False)
    """True if each token is the most likely one, without adjustments"""
    needs_no_logits: bool = field(init=False)
    """True if the most likely token is all that a step must return, unless it is suppressed"""
    runs_ahead: bool = field(init=False)
    """True if a draw does not depend on the token before, so that the device may draw a token
    before the host has the previous one. With a prediction, the host has to choose draft tokens"""

    def __post_init__(self) -> None:
        checked, sampling = self.command.checked, self.command.checked.sampling
        self.bad_words = BadWords(sampling.bad_words) if sampling.bad_words else None
        self.draws_independently = (
            checked.beams is None
            and not sampling.penalises
            and sampling.mirostat is None
            and not (self.bad_words is not None and self.bad_words.looks_back)
        )
        is_greedy = (
            checked.beams is None
            and sampling.temperature == 0
            and sampling.logit_bias is None
            and not sampling.penalises
            and not sampling.limits_ids
            and checked.stopping.min_tokens == 0
            and not checked.constrained
        )
        self.is_plainly_greedy = is_greedy and not sampling.suppresses_ids
        self.needs_no_logits = is_greedy and checked.logprobs is None
        self.runs_ahead = (
            self.draws_independently and not checked.constrained and not checked.prediction
        )

    @property
    def order(self) -> tuple[int, float, int]:
        """Sort key: higher priority first, then earlier arrival."""
        return (-self.command.priority, self.command.arrival, self.command.handle)
