"""Sequences and the requests they belong to. Owned by the step loop alone."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt
import torch

from services.engine.messages import AddRequest, Mask, Resume
from services.engine.sampling import BadWords, Mirostat, Penalties
from services.engine.scheduling.block_pool import hash_block
from services.engine.scheduling.speculation import DraftWidth, Precedents
from services.engine.scheduling.tenants import Tenant

__all__ = ["Prompt", "Request", "Sequence", "SequenceState"]


class SequenceState(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    """Holds no blocks: new or preempted"""
    RUNNING = "running"
    """Holds blocks: prefills or decodes"""
    FINISHED = "finished"


class Prompt:
    """A prompt: its ids and the names of its blocks, which all its choices share."""

    def __init__(self, ids: Items[int], cache_salt: bytes, block_size: int) -> None:
        self.ids = np.array(ids, dtype=np.int32)
        """int32 [length]; not writeable"""
        self.ids.flags.writeable = False
        self.num_blocks = len(ids) // block_size
        """Blocks that it fills"""
        self._salt = cache_salt
        self._block_size = block_size
        self._names: list[bytes] = []

    def block_names(self, count: int) -> list[bytes]:
        """Return the names of its first `count` blocks, `num_blocks` at most."""
        size = self._block_size
        for start in range(len(self._names) * size, count * size, size):
            parent = self._names[-1] if self._names else self._salt
            self._names.append(hash_block(parent, self.ids[start : start + size]))
        return self._names[:count]

    def block_name(self, index: int) -> bytes:
        """Return the name of one of its blocks."""
        if index >= len(self._names):
            self.block_names(index + 1)
        return self._names[index]


class Sequence:
    """One choice of one prompt: its tokens so far, and how far their KV is computed."""

    def __init__(
        self,
        request: "Request",
        index: int,
        prompt: Prompt,
        resume: Resume | None,
        max_tokens: int,
        block_size: int,
    ) -> None:
        self.request = request
        self.index = index
        self.prompt_index = index // request.command.checked.n
        self.choice = index % request.command.checked.n
        self.prompt_length = len(prompt.ids)
        self.max_tokens = max_tokens
        self.state = SequenceState.WAITING
        self.blocks: list[int] = []
        """KV blocks. The list only grows: a sequence that starts anew gets another one"""
        self.num_computed = 0
        """Tokens whose KV is written (or will be by the step at hand)"""
        self.in_flight = 0
        """Tokens that a running step has drawn and whose ids are not here yet"""
        self.cached_tokens: int | None = None
        """Prompt tokens found in the prefix cache at first; None = never scheduled"""
        # one choice speaks for its prompt
        scores = request.command.checked.prompt_logprobs is not None and self.choice == 0
        self.scored = 1 if scores else self.prompt_length
        """Prompt tokens before this one need no score (any more)"""
        self.credit = request.command.credit
        self.starved_since: float | None = None
        """When it ran out of credit, in time.monotonic()"""
        self.mask: Mask | None = None
        """What it must and may draw next, if it is constrained and the mask has come"""
        self.guesses: tuple[int, Items[int]] = (-1, ())
        """Of a constrained sequence: a position, and what may come from there on"""
        self.held_logits: torch.Tensor | None = None
        """float32 [1 + guesses, vocabulary], kept while it may not draw"""
        self.queued_tokens = 0
        """Tokens that were not in the prefix cache when it began to wait"""
        self.tenant = Tenant(request.command.cache_salt)
        """The scheduler's, once it has been queued there"""
        self.due = request.command.arrival
        """Sorts the waiting sequences of a tenant, in time.monotonic(): the arrival, and later the
        longer the prompt is and the more choices of the request come before this one"""
        self.awaited_block: bytes | None = None
        """The block that another sequence is about to compute for it"""
        self.draft_width = DraftWidth()
        self.precedents = Precedents()
        command, sampling = request.command, request.command.checked.sampling
        self.penalties = Penalties(sampling, self.prompt_length) if sampling.penalises else None
        self.mirostat: Mirostat | None = None
        if sampling.mirostat is not None:
            mu = resume.mirostat_mu if resume is not None else None
            self.mirostat = Mirostat(sampling.mirostat, mu)
        self.is_plainly_greedy = (
            sampling.temperature == 0
            and sampling.logit_bias is None
            and not sampling.penalises
            and not sampling.limits_ids
            and command.checked.stopping.min_tokens == 0
            and not command.checked.constrained
        )
        """Whether it takes the most likely token, whichever that is"""
        self.needs_no_logits = self.is_plainly_greedy and command.checked.logprobs is None
        """Whether nothing but that token is of interest"""
        self.runs_ahead = (
            self.is_guessable
            and not command.checked.constrained
            and command.checked.logprobs is None
            and max_tokens > 0
        )
        """Whether a token can be drawn while the one before is not here yet: nothing that the host
        makes of tokens decides about the next, and the host scores none"""
        generated = resume.generated if resume is not None else ()
        self._block_size = block_size
        self._prompt = prompt
        self._tokens = prompt.ids
        """Shared until the first token of its own"""
        if generated:
            self._tokens = np.concatenate((prompt.ids, np.array(generated, dtype=np.int32)))
        self.length = len(self._tokens)
        self._names: list[bytes] = []
        """Of the blocks behind those that the prompt fills"""

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """Prompt and generated ids: int32 [length], a view."""
        return self._tokens[: self.length]

    @property
    def newest(self) -> int:
        """The last token."""
        return int(self._tokens[self.length - 1])

    @property
    def position(self) -> int:
        """Tokens generated, counted from the end of the original prompt."""
        return self.length - self.prompt_length

    @property
    def forced(self) -> Items[int]:
        """The next tokens, where its mask leaves no choice."""
        if self.mask is None:
            return ()
        return self.mask.forced[self.position - self.mask.position :]

    @property
    def is_at_end(self) -> bool:
        """Whether its grammar is complete."""
        return self.mask is not None and self.mask.terminated and self.position == self.mask.end

    @property
    def has_credit(self) -> bool:
        """Whether it may draw a token more than those that it has drawn."""
        return self.credit is None or self.credit > self.in_flight

    @property
    def is_paused(self) -> bool:
        """Whether its client has granted no credit for the next token."""
        return self.starved_since is not None

    @property
    def may_draw(self) -> bool:
        """Whether it knows what it may draw next, and has credit for it."""
        return self.may_draw_at(self.position)

    def may_draw_at(self, position: int) -> bool:
        """The same for a position that it may have come to by then."""
        if not self.has_credit or not self.request.command.checked.constrained:
            return self.has_credit
        return self.mask is not None and position <= self.mask.last

    @property
    def is_guessable(self) -> bool:
        """Whether a token can be drawn without the one before: none but the row's own logits count.

        What penalties, mirostat and bad words of several tokens do depends on the token drawn
        before. So does a mask, but the grammar service tells those behind guesses that it was told.
        """
        words = self.request.bad_words
        looks_back = words is not None and words.looks_back
        return self.penalties is None and self.mirostat is None and not looks_back

    @property
    def order(self) -> tuple[int, float, int, int]:
        """Sorts sequences: the first are scheduled first and preempted last."""
        return (*self.request.order, self.index)

    @property
    def uncomputed(self) -> int:
        """Tokens whose KV is still to be written; 0 while it waits for a mask, or for credit.

        One that is in flight counts, unless nothing comes after it.
        """
        left = self.length - self.num_computed
        if self.in_flight and self.position + self.in_flight < self.max_tokens:
            left += self.in_flight
        return left

    def append(self, token: int) -> None:
        """Add a generated token: logits and mask that were held for its place are spent."""
        self.held_logits = None
        if self.mask is not None and not self.mask.holds_after(self.position, token):
            self.mask = None
        if self.length == len(self._tokens):
            grown = np.empty(self.length + max(64, self.length // 4), dtype=np.int32)
            grown[: self.length] = self._tokens
            self._tokens = grown
        self._tokens[self.length] = token
        self.length += 1

    def leave_guesses(self) -> None:
        """Use masks behind guesses no more: the grammar hears what came true, and answers anew."""
        if self.mask is not None and self.position > self.mask.end:
            self.mask = None

    def block_name(self, index: int) -> bytes:
        """The name of full block `index` of this sequence."""
        own = index - self._prompt.num_blocks
        if own < 0:
            return self._prompt.block_name(index)
        while len(self._names) <= own:
            last = self._prompt.num_blocks + len(self._names)
            parent = self.block_name(last - 1) if last else self.request.command.cache_salt
            tokens = self._tokens[last * self._block_size : (last + 1) * self._block_size]
            self._names.append(hash_block(parent, tokens))
        return self._names[own]

    def readable_names(self) -> list[bytes]:
        """Names of the full blocks that the prefix cache may serve.

        At least one token is always computed, for its logits; so is every token whose successor
        still has to be scored.
        """
        last = self.length - 1
        if self.scored < self.prompt_length:
            last = self.scored - 1
        count, shared = last // self._block_size, self._prompt.num_blocks
        names = self._prompt.block_names(min(count, shared))
        return names + [self.block_name(i) for i in range(shared, count)]


@dataclass(slots=True, eq=False)
class Request:
    """What was asked for, and what has become of it."""

    command: AddRequest
    sequences: list[Sequence] = field(default_factory=list)
    unfinished: int = 0
    running: int = 0
    """Sequences that hold a place"""
    started: float | None = None
    """time.monotonic() of the first step that held a token of it"""
    first_token: float | None = None
    """time.monotonic() of the first generated token"""
    bad_words: BadWords | None = field(init=False)

    def __post_init__(self) -> None:
        words = self.command.checked.sampling.bad_words
        self.bad_words = BadWords(words) if words else None

    @property
    def order(self) -> tuple[int, float, int]:
        """Sorts requests: higher priority first, then earlier arrival."""
        return (-self.command.priority, self.command.arrival, self.command.handle)
