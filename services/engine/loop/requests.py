"""What is asked of the loop, what becomes of it, and what is told about it.

Owns every request and its sequences; which of them run, and on which blocks, is the scheduler's.
"""

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from services.engine.messages import (
    AddRequest,
    Admitted,
    CacheFlushed,
    CancelRequest,
    Command,
    FinishCause,
    Finished,
    FlushCache,
    GrantCredit,
    Mask,
    Output,
    Refused,
    RequestDone,
    Score,
    SetMasks,
    Token,
)
from services.engine.scheduling.scheduler import Scheduler
from services.engine.scheduling.sequence import Request, Sequence, SequenceState
from services.engine.scheduling.token_ids import Prompt

__all__ = ["LoopLimits", "Requests"]

_LOG = logging.getLogger("loop")
_NO_MEMORY = "can't allocate memory"
"""In what torch raises where a CPU has none"""


@dataclass(frozen=True, slots=True)
class LoopLimits:
    """What requests may ask of this model."""

    eos_token_ids: frozenset[int]
    max_waiting: int
    """Sequences that may wait"""
    starvation_seconds: float = 30.0
    """How long a sequence may hold its blocks without credit"""


class Requests:
    """Every request that is here, and the outputs that have not been taken yet."""

    def __init__(
        self, scheduler: Scheduler, limits: LoopLimits, clock: Callable[[], float]
    ) -> None:
        self._scheduler = scheduler
        self._limits = limits
        self._clock = clock
        self._requests: dict[int, Request] = {}
        self._starved: dict[Sequence, None] = {}
        """Sequences without credit, the longest so first"""
        self._outputs: list[Output] = []

    def __len__(self) -> int:
        return len(self._requests)

    def carry_out(self, command: Command) -> None:
        """Do what the gRPC side asks. A command that raises fails its request, and no other."""
        try:
            self._carry_out(command)
        except Exception as error:
            handle = getattr(command, "handle", None)
            if handle is None:
                raise
            _LOG.exception("request %d failed", handle)
            if handle in self._requests:
                self.break_off(self._requests[handle], error)
            else:
                self.report(_failure(handle, error))

    def _carry_out(self, command: Command) -> None:
        match command:
            case AddRequest():
                self._add(command)
            case CancelRequest():
                self._cancel(command)
            case GrantCredit():
                self._grant(command)
            case SetMasks():
                for mask in command.masks:
                    self._set_mask(mask)
            case FlushCache():
                self.report(CacheFlushed(self._scheduler.pool.flush()))

    def report(self, output: Output) -> None:
        """Tell it with what else this step brings."""
        self._outputs.append(output)

    def take_outputs(self) -> list[Output]:
        """What has happened since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def note_started(self, sequences: Iterable[Sequence]) -> None:
        """Some of their tokens are about to be computed."""
        now = self._clock()
        for sequence in sequences:
            if sequence.request.started is None:
                sequence.request.started = now
            if sequence.credit == 0 and sequence.max_tokens and sequence.starved_since is None:
                self._starve(sequence, now)

    def append(self, sequence: Sequence, token: int, score: Score | None) -> None:
        """Append a token, report it, and end the sequence if it ends it."""
        request, position = sequence.request, sequence.position
        if request.first_token is None:
            request.first_token = self._clock()
        sequence.append(token)
        if sequence.credit is not None:
            sequence.credit -= 1
            if sequence.credit == 0:
                self._starve(sequence, self._clock())
        mu: float | None = None
        if sequence.mirostat is not None:
            sequence.mirostat.commit()
            mu = sequence.mirostat.mu
        self.report(Token(request.command.handle, sequence.index, position, token, score, mu))
        self._end_if_done(sequence, token)

    def finish(self, sequence: Sequence, cause: FinishCause, token: int | None = None) -> None:
        """End a sequence, and its request with its last one."""
        self._scheduler.remove(sequence)
        self._starved.pop(sequence, None)
        request, handle = sequence.request, sequence.request.command.handle
        self.report(Finished(handle, sequence.index, cause, token, sequence.position))
        request.unfinished -= 1
        if request.unfinished == 0:
            del self._requests[handle]
            self.report(self._done(request))

    def cut_starved(self) -> None:
        """Cut requests that have had no credit for too long: nobody takes their tokens."""
        limit = self._clock() - self._limits.starvation_seconds
        message = f"No credit for {self._limits.starvation_seconds:g} s: the client is stalled."
        while self._starved:
            longest = next(iter(self._starved))
            if longest.starved_since is None or longest.starved_since >= limit:
                return
            self._cut(longest.request, "RESOURCE_EXHAUSTED", "STALLED", message)

    def _starve(self, sequence: Sequence, now: float) -> None:
        sequence.starved_since = now
        self._starved[sequence] = None

    def fail(self, request: Request) -> None:
        """Cut a request for which the model computes NaN: it would go on so to its last token."""
        message = "The model computed no number; its weights may be broken."
        self._cut(request, "INTERNAL", "NOT_FINITE", message)

    def contradict(self, request: Request) -> None:
        """Cut a request whose own limits leave no id to draw."""
        is_allowed = request.command.sampling.allowed is not None
        field = "sampling.allowed_token_ids" if is_allowed else "sampling.bad_token_ids"
        message = (
            "The grammar, allowed_token_ids and bad_words together leave no token to generate: "
            "allow more of what the grammar needs."
        )
        self._cut(request, "INVALID_ARGUMENT", "NOTHING_ALLOWED", message, field)

    def break_off(self, request: Request, error: Exception) -> None:
        """Cut a request over whose own part of a step an exception was raised."""
        if request.command.handle in self._requests:  # else it has ended by itself
            self._end_all(request)
            self.report(_failure(request.command.handle, error))

    def _cut(self, request: Request, code: str, reason: str, message: str, field: str = "") -> None:
        self._end_all(request)
        self.report(Refused(request.command.handle, code, reason, message, field=field))

    def _end_all(self, request: Request) -> None:
        for sequence in request.sequences:
            self._starved.pop(sequence, None)
            if sequence.state is not SequenceState.FINISHED:
                self._scheduler.remove(sequence)
        del self._requests[request.command.handle]

    def _add(self, command: AddRequest) -> None:
        room = [command.stopping.context_length - len(prompt) for prompt in command.prompts]
        max_tokens = [min(command.stopping.max_tokens, r) for r in room]
        refused = self._refusal(command, max_tokens)
        if refused is not None:
            self.report(refused)
            return
        request = Request(command)
        resumed = {resume.sequence: resume for resume in command.resume}
        ahead = {id(s.request) for s in self._scheduler.waiting if s.request.order <= request.order}
        size = self._scheduler.limits.block_size
        prompts = [Prompt(ids, command.cache_salt, size) for ids in command.prompts]
        cached = [0] * len(command.prompts)
        for index in range(len(command.prompts) * command.n):
            prompt = index // command.n
            sequence = Sequence(
                request,
                index,
                prompts[prompt],
                resumed.get(index),
                max_tokens[prompt],
            )
            request.sequences.append(sequence)
        self._requests[command.handle] = request
        for sequence in request.sequences:
            found = self._scheduler.add(sequence)
            cached[sequence.prompt_index] = max(cached[sequence.prompt_index], found)
        request.unfinished = len(request.sequences)
        self.report(Admitted(command.handle, max_tokens, cached, len(ahead)))
        for sequence in request.sequences:
            if sequence.position:
                self._end_if_done(sequence, sequence.newest)

    def _refusal(self, command: AddRequest, max_tokens: Items[int]) -> Refused | None:
        if self._is_full_for(command):
            message = f"{len(self._scheduler.waiting)} sequences wait already; try again."
            return Refused(command.handle, "RESOURCE_EXHAUSTED", "QUEUE_FULL", message, 1.0)
        for prompt, most in zip(command.prompts, max_tokens, strict=True):
            if not self._scheduler.fits(len(prompt) + most):
                size = self._scheduler.limits.block_size * self._scheduler.pool.num_blocks
                message = (
                    f"{len(prompt)} prompt tokens and {most} to generate can never fit: the KV "
                    f"cache holds {size} tokens."
                )
                return Refused(command.handle, "OUT_OF_RANGE", "KV_CACHE_TOO_SMALL", message)
        return None

    def _is_full_for(self, command: AddRequest) -> bool:
        """Whether the queue has no room for a request. Beyond its size there is some, up to twice,
        for tenants that have less than their share of it: whoever fills it is refused."""
        scheduler, most = self._scheduler, self._limits.max_waiting
        waiting, count = len(scheduler.waiting), len(command.prompts) * command.n
        places = 0 if waiting else scheduler.free_places  # those that wait come first
        if waiting + count - places <= most:
            return False
        mine = scheduler.tenants.waiting_of(command.cache_salt)
        tenants = len(scheduler.tenants) + (0 if mine else 1)
        return mine + count > most // tenants or waiting + count > 2 * most

    def _cancel(self, command: CancelRequest) -> None:
        request = self._requests.get(command.handle)
        if request is None:
            return
        for index in command.sequences or range(len(request.sequences)):
            if request.sequences[index].state is not SequenceState.FINISHED:
                self.finish(request.sequences[index], FinishCause.CANCELLED)

    def _grant(self, command: GrantCredit) -> None:
        request = self._requests.get(command.handle)
        for sequence in request.sequences if request else ():
            if sequence.credit is not None:
                sequence.credit += command.tokens
                sequence.starved_since = None
                self._starved.pop(sequence, None)
                self._append_forced(sequence)

    def _set_mask(self, mask: Mask) -> None:
        request = self._requests.get(mask.handle)
        if request is None:
            return
        sequence = request.sequences[mask.sequence]
        # it may have drawn some of what the mask forces by an older one, of a service since lost
        current = mask.position <= sequence.position <= mask.end
        if sequence.state is SequenceState.FINISHED or not current:
            return
        sequence.mask = mask
        if sequence.is_at_end:
            self.finish(sequence, FinishCause.GRAMMAR)
        else:
            self._append_forced(sequence)

    def _append_forced(self, sequence: Sequence) -> None:
        """Append what the mask leaves no choice about, which takes no logits.

        Where scores are asked for it is drawn like the rest: they are made of logits. So it is
        where the request itself may not allow it.
        """
        command = sequence.request.command
        is_drawn = command.logprobs is not None or command.sampling.limits_ids
        if is_drawn or sequence.scored < sequence.prompt_length or sequence.max_tokens == 0:
            return
        for token in sequence.forced:
            if sequence.state is SequenceState.FINISHED or sequence.credit == 0:
                return
            if sequence.mirostat is not None:
                sequence.mirostat.observe(0.0)  # what is certain surprises nobody
            self.append(sequence, token, None)

    def _end_if_done(self, sequence: Sequence, token: int) -> None:
        stopping = sequence.request.command.stopping
        if token in stopping.stop_token_ids:
            self.finish(sequence, FinishCause.STOP_TOKEN, token)
        elif token in self._limits.eos_token_ids and not stopping.ignore_eos:
            self.finish(sequence, FinishCause.EOS, token)
        elif sequence.position >= sequence.max_tokens:
            self.finish(sequence, FinishCause.LENGTH)
        elif sequence.is_at_end:
            self.finish(sequence, FinishCause.GRAMMAR)

    def _done(self, request: Request) -> RequestDone:
        command, now = request.command, self._clock()
        started = request.started if request.started is not None else now
        # forced tokens may come before anything is computed
        first = max(request.first_token, started) if request.first_token is not None else now
        # the first choice of each prompt tells what was reused; the others share what it computed
        firsts = request.sequences[:: command.n]
        return RequestDone(
            handle=command.handle,
            prompt_tokens=sum(len(prompt) for prompt in command.prompts),
            completion_tokens=sum(s.position for s in request.sequences),
            cached_tokens=sum(s.cached_tokens or 0 for s in firsts),
            queue_seconds=started - command.arrival,
            prefill_seconds=first - started,
            decode_seconds=now - first,
        )


def _failure(handle: int, error: Exception) -> Refused:
    """What the client of a failed request is told; the log has the rest."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or _NO_MEMORY in str(error):
        message = (
            "The engine ran out of memory over this request; try again, or send a shorter one."
        )
        return Refused(handle, "RESOURCE_EXHAUSTED", "OUT_OF_MEMORY", message, 1.0)
    return Refused(
        handle, "INTERNAL", "STEP_FAILED", "A step failed over this request; see the log."
    )
