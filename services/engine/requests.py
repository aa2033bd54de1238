"""What is asked of the loop, what becomes of it, and what is told about it.

Owns every request and its sequences; which of them run, and on which blocks, is the scheduler's.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

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
from services.engine.scheduler import Scheduler
from services.engine.sequence import Request, Sequence, SequenceState

__all__ = ["LoopLimits", "Requests"]


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
        self._outputs: list[Output] = []

    def __len__(self) -> int:
        return len(self._requests)

    def carry_out(self, command: Command) -> None:
        """Do what the gRPC side asks."""
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
                sequence.starved_since = now

    def append(self, sequence: Sequence, token: int, score: Score | None) -> None:
        """Append a token, report it, and end the sequence if it ends it."""
        request, position = sequence.request, sequence.position
        if request.first_token is None:
            request.first_token = self._clock()
        sequence.append(token)
        if sequence.credit is not None:
            sequence.credit -= 1
            if sequence.credit == 0:
                sequence.starved_since = self._clock()
        mu = sequence.mirostat.mu if sequence.mirostat is not None else None
        self.report(Token(request.command.handle, sequence.index, position, token, score, mu))
        self._end_if_done(sequence, token)

    def finish(self, sequence: Sequence, cause: FinishCause, token: int | None = None) -> None:
        """End a sequence, and its request with its last one."""
        self._scheduler.remove(sequence)
        request, handle = sequence.request, sequence.request.command.handle
        self.report(Finished(handle, sequence.index, cause, token, sequence.position))
        request.unfinished -= 1
        if request.unfinished == 0:
            del self._requests[handle]
            self.report(self._done(request))

    def cut_starved(self) -> None:
        """Cut requests that have had no credit for too long; their blocks are needed."""
        limit = self._clock() - self._limits.starvation_seconds
        starved = {
            s.request.command.handle: s.request
            for s in self._scheduler.running
            if s.starved_since is not None and s.starved_since < limit
        }
        message = f"No credit for {self._limits.starvation_seconds:g} s: the client is stalled."
        for request in starved.values():
            self._cut(request, "RESOURCE_EXHAUSTED", "STALLED", message)

    def fail(self, request: Request) -> None:
        """Cut a request for which the model computes NaN: it would go on so to its last token."""
        message = "The model computed no number; its weights may be broken."
        self._cut(request, "INTERNAL", "NOT_FINITE", message)

    def _cut(self, request: Request, code: str, reason: str, message: str) -> None:
        for sequence in request.sequences:
            if sequence.state is not SequenceState.FINISHED:
                self._scheduler.remove(sequence)
        handle = request.command.handle
        del self._requests[handle]
        self.report(Refused(handle, code, reason, message))

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
        cached = [0] * len(command.prompts)
        for index in range(len(command.prompts) * command.n):
            prompt = index // command.n
            sequence = Sequence(
                request,
                index,
                command.prompts[prompt],
                resumed.get(index),
                max_tokens[prompt],
                self._scheduler.limits.block_size,
            )
            request.sequences.append(sequence)
            cached[prompt] = max(cached[prompt], self._scheduler.add(sequence))
        request.unfinished = len(request.sequences)
        self._requests[command.handle] = request
        self.report(Admitted(command.handle, max_tokens, cached, len(ahead)))
        for sequence in request.sequences:
            if sequence.position:
                self._end_if_done(sequence, sequence.newest)

    def _refusal(self, command: AddRequest, max_tokens: Items[int]) -> Refused | None:
        waiting, count = len(self._scheduler.waiting), len(command.prompts) * command.n
        places = 0 if waiting else self._scheduler.free_places  # those that wait come first
        if waiting + count - places > self._limits.max_waiting:
            message = f"{waiting} sequences wait already; try again."
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

        Where scores are asked for it is drawn like the rest: they are made of logits.
        """
        scores = sequence.request.command.logprobs is not None
        if scores or sequence.scored < sequence.prompt_length or sequence.max_tokens == 0:
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
