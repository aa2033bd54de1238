"""Requests of the step loop: their admission, tokens, credit, masks, ends and outputs.

The table owns every request and its sequences; the scheduler decides which of them run.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from services.common.block_hash import prompt_salt
from services.engine.checked_request import StoppingSettings
from services.engine.loop import refusals
from services.engine.loop.delivery import Delivery
from services.engine.loop.draft_counts import draft_counts
from services.engine.messages import (
    AddRequest,
    Admitted,
    CacheFlushed,
    CancelRequest,
    Command,
    FinishCause,
    Finished,
    FlushCache,
    FollowCache,
    GrantCredit,
    Mask,
    Output,
    Refused,
    RequestDone,
    Score,
    SetMasks,
    Token,
)
from services.engine.scheduling.beam_search import BeamSearch
from services.engine.scheduling.prompt_images import PromptImages
from services.engine.scheduling.scheduler import Scheduler
from services.engine.scheduling.sequence import Request, SequenceState, TokenSequence
from services.engine.scheduling.speculation import DraftKind
from services.engine.scheduling.token_ids import Prompt

__all__ = ["LoopLimits", "RequestTable"]

_DELIVERED_TOKENS = 4_096
"""Most tokens of search results in the outputs of one step"""

_LOG = logging.getLogger("loop")


@dataclass(frozen=True, slots=True)
class LoopLimits:
    """Limits of the model and of the queue."""

    eos_token_ids: frozenset[int]
    max_waiting: int
    """Most waiting sequences"""
    starvation_seconds: float = 30.0
    """Seconds for which a sequence may hold blocks without credit"""


class RequestTable:
    """All requests of the loop, and the outputs to send with the next step."""

    def __init__(
        self, scheduler: Scheduler, limits: LoopLimits, clock: Callable[[], float]
    ) -> None:
        self._scheduler = scheduler
        self._limits = limits
        self._clock = clock
        self._requests: dict[int, Request] = {}
        """Requests by handle"""
        self._starved: dict[TokenSequence, None] = {}
        """Sequences without credit, ordered by the time when it ran out"""
        self._deliveries: dict[TokenSequence, Delivery] = {}
        """Results by sequence of a beam search, until the sequence's end is reported"""
        self._delivering: dict[TokenSequence, None] = {}
        """Sequences whose results have tokens that may be sent, in the order of sending"""
        self._outputs: list[Output] = []

    def __len__(self) -> int:
        return len(self._requests)

    # Commands.

    def carry_out(self, command: Command) -> None:
        """Carry out a command. An exception aborts only the command's request."""
        try:
            self._carry_out(command)
        except Exception as error:
            handle = getattr(command, "handle", None)
            if handle is None:
                raise
            _LOG.exception("request %d failed", handle)
            refusal = refusals.step_failed(handle, error)
            if handle in self._requests:
                self.abort(refusal)
            else:
                self.report(refusal)

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
                self.report(CacheFlushed(self._scheduler.caches.flush()))
            case FollowCache():
                self._scheduler.caches.follow()

    def _add(self, command: AddRequest) -> None:
        checked = command.checked
        max_tokens = [
            min(checked.stopping.max_tokens, checked.stopping.context_length - len(prompt))
            for prompt in checked.prompts
        ]
        if (refusal := self._refusal(command, max_tokens)) is not None:
            self.report(refusal)
            return
        request = self._make_request(command, max_tokens)
        earlier = {
            id(s.request) for s in self._scheduler.waiting if s.request.order <= request.order
        }
        cached = [0] * len(checked.prompts)
        for sequence in request.sequences:
            found = self._scheduler.add(sequence)
            cached[sequence.prompt_index] = max(cached[sequence.prompt_index], found)
        self.report(Admitted(command.handle, max_tokens, cached, len(earlier)))
        for sequence in request.sequences:
            if sequence.position:
                self._end_if_done(sequence, sequence.newest)

    def _make_request(self, command: AddRequest, max_tokens: Sequence[int]) -> Request:
        """Create a request with its sequences, and add it to the table."""
        checked, size = command.checked, self._scheduler.caches.block_size
        request = Request(command, self._last_ids(checked.stopping))
        if checked.beams is not None and checked.stopping.max_tokens:
            causes = {token: _end_cause(token, checked.stopping) for token in request.last_ids}
            request.searches = [
                BeamSearch(checked.beams, checked.n, most, causes) for most in max_tokens
            ]
        resumed = {resume.sequence: resume for resume in checked.resume}
        prompts = [
            Prompt(
                ids,
                prompt_salt(command.cache_salt, command.adapter_fingerprint),
                size,
                PromptImages(checked.images[index], len(ids)) if index in checked.images else None,
            )
            for index, ids in enumerate(checked.prompts)
        ]
        for index in range(checked.num_sequences):
            prompt = index // checked.n
            request.sequences.append(
                TokenSequence(
                    request, index, prompts[prompt], resumed.get(index), max_tokens[prompt]
                )
            )
        if request.searches:
            self._deliveries |= {each: Delivery(command.credit) for each in request.sequences}
        request.unfinished = len(request.sequences)
        self._requests[command.handle] = request
        return request

    def _last_ids(self, stopping: StoppingSettings) -> frozenset[int]:
        if stopping.ignore_eos:
            return stopping.stop_token_ids
        return stopping.stop_token_ids | self._limits.eos_token_ids

    def _refusal(self, command: AddRequest, max_tokens: Sequence[int]) -> Refused | None:
        if self._is_full_for(command):
            return refusals.queue_full(command.handle, len(self._scheduler.waiting))
        for prompt, output in zip(command.checked.prompts, max_tokens, strict=True):
            if not self._scheduler.fits(len(prompt) + output):
                size = self._scheduler.caches.most_tokens
                return refusals.kv_cache_too_small(command.handle, len(prompt), output, size)
        return None

    def _is_full_for(self, command: AddRequest) -> bool:
        """Return whether the queue has no room for a request.

        Tenants below their share of the queue may exceed its size, up to twice, so that a tenant
        that fills the queue is refused first.
        """
        scheduler, limit = self._scheduler, self._limits.max_waiting
        waiting, count = len(scheduler.waiting), command.checked.num_sequences
        places = 0 if waiting else scheduler.free_places  # waiting sequences come first
        if waiting + count - places <= limit:
            return False
        mine = scheduler.tenants.waiting_of(command.cache_salt)
        tenants = len(scheduler.tenants) + (0 if mine else 1)
        return mine + count > limit // tenants or waiting + count > 2 * limit

    def _cancel(self, command: CancelRequest) -> None:
        request = self._requests.get(command.handle)
        if request is None:
            return
        for index in command.sequences or range(len(request.sequences)):
            sequence = request.sequences[index]
            if sequence in self._deliveries:
                self._cancel_result(sequence)
            elif sequence.state is not SequenceState.FINISHED:
                self.finish(sequence, FinishCause.CANCELLED)

    def _grant(self, command: GrantCredit) -> None:
        request = self._requests.get(command.handle)
        for sequence in request.sequences if request else ():
            delivery = self._deliveries.get(sequence)
            if delivery is not None and delivery.credit is not None:
                delivery.credit += command.tokens
                sequence.starved_since = None
                self._starved.pop(sequence, None)
                self._deliver(sequence)
            elif sequence.credit is not None:
                sequence.credit += command.tokens
                sequence.starved_since = None
                self._starved.pop(sequence, None)
                self._append_forced(sequence)

    def _set_mask(self, mask: Mask) -> None:
        request = self._requests.get(mask.handle)
        if request is None:
            return
        sequence = request.sequences[mask.sequence]
        # some of the forced tokens may already be drawn, under a mask from before a service loss
        is_current = mask.position <= sequence.position + sequence.in_flight <= mask.end
        if sequence.state is SequenceState.FINISHED or not is_current:
            return
        sequence.mask = mask
        if sequence.is_at_end:
            self.finish(sequence, FinishCause.GRAMMAR)
        else:
            self._append_forced(sequence)

    def _append_forced(self, sequence: TokenSequence) -> None:
        """Append the tokens that the mask forces, which needs no logits.

        Forced tokens are drawn like others if scores need logits, or if the request itself
        may forbid them.
        """
        checked = sequence.request.command.checked
        is_drawn = checked.logprobs is not None or checked.sampling.limits_ids
        if is_drawn or sequence.scored < sequence.prompt_length or sequence.max_tokens == 0:
            return
        if sequence.in_flight:
            return  # the device has already drawn the first forced token
        for token in sequence.forced:
            if sequence.state is SequenceState.FINISHED or sequence.credit == 0:
                return
            if sequence.mirostat is not None:
                sequence.mirostat.observe(0.0)  # a certain token has a surprise of 0 bits
            self.append(sequence, token, None)

    # Progress of sequences.

    def note_started(self, sequences: Iterable[TokenSequence]) -> None:
        """Record that a step computes tokens of these sequences."""
        now = self._clock()
        for sequence in sequences:
            if sequence.request.started is None:
                sequence.request.started = now
            if sequence.credit == 0 and sequence.max_tokens and sequence.starved_since is None:
                self._starve(sequence, now)

    def append(self, sequence: TokenSequence, token: int, score: Score | None) -> None:
        """Append a token, report it, and end the sequence if it was the last one."""
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
        handle = request.command.handle
        self._outputs.append(Token(handle, sequence.index, position, token, score, mu))
        self._end_if_done(sequence, token)

    def finish(self, sequence: TokenSequence, cause: FinishCause, token: int | None = None) -> None:
        """End a sequence, and with the last one its request."""
        self._scheduler.remove(sequence)
        self._report_end(sequence, cause, token, sequence.position)

    def _report_end(
        self, sequence: TokenSequence, cause: FinishCause, token: int | None, completion_tokens: int
    ) -> None:
        self._starved.pop(sequence, None)
        request, handle = sequence.request, sequence.request.command.handle
        self.report(Finished(handle, sequence.index, cause, token, completion_tokens))
        request.unfinished -= 1
        if request.unfinished == 0:
            del self._requests[handle]
            self.report(self._done(request))

    # Beam searches.

    def append_to_beam(self, sequence: TokenSequence, token: int) -> None:
        """Append a token to a beam. The client receives it only if it is part of a result."""
        if sequence.request.first_token is None:
            sequence.request.first_token = self._clock()
        sequence.append(token)

    def end_search(self, sequences: Sequence[TokenSequence], search: BeamSearch) -> None:
        """Release the beams' blocks, and give the results to the sequences in order, best first."""
        for sequence, result in zip(sequences, search.results, strict=True):
            self._scheduler.remove(sequence)
            self._deliveries[sequence].begin(result)
            self._deliver(sequence)

    def _deliver(self, sequence: TokenSequence) -> None:
        """Queue a result, if there is one, for the next `take_outputs`."""
        has_ended = sequence.state is SequenceState.FINISHED
        if has_ended and self._deliveries[sequence].cause is not None:
            self._delivering[sequence] = None

    def _send_results(self) -> None:
        """Report the tokens of results for which there is credit, then the sequences' ends.

        Results come in parts, so that those of long searches neither stop the steps nor exceed a
        message.
        """
        left = _DELIVERED_TOKENS
        while self._delivering and left:
            sequence = next(iter(self._delivering))
            delivery, handle = self._deliveries[sequence], sequence.request.command.handle
            before = delivery.sent
            for position, token, score in delivery.take(left):
                self._outputs.append(Token(handle, sequence.index, position, token, score))
            left -= delivery.sent - before
            if delivery.is_complete:
                assert delivery.cause is not None
                del self._delivering[sequence], self._deliveries[sequence]
                sequence.request.delivered += delivery.sent
                self._report_end(sequence, delivery.cause, delivery.end_id, delivery.sent)
            elif delivery.credit == 0:
                del self._delivering[sequence]
                self._starve(sequence, self._clock())

    @property
    def is_delivering(self) -> bool:
        """True if `take_outputs` has left a part of a result for its next call."""
        return bool(self._delivering)

    def _cancel_result(self, sequence: TokenSequence) -> None:
        """Stop sending a result; end the search once all of its results are cancelled."""
        self._deliveries[sequence].is_cancelled = True
        beams = [s for s in sequence.request.sequences if s.search is sequence.search]
        if sequence.state is SequenceState.FINISHED:
            self._deliver(sequence)
        elif all(self._deliveries[beam].is_cancelled for beam in beams):
            for beam in beams:
                self._scheduler.remove(beam)
                self._deliver(beam)

    def cut_starved(self) -> None:
        """Abort requests that have had no credit for too long: their clients read nothing."""
        limit = self._clock() - self._limits.starvation_seconds
        while self._starved:
            longest = next(iter(self._starved))
            if longest.starved_since is None or longest.starved_since >= limit:
                return
            handle = longest.request.command.handle
            self.abort(refusals.stalled(handle, self._limits.starvation_seconds))

    def abort(self, refusal: Refused) -> None:
        """End a request with a reason, unless it has ended already."""
        request = self._requests.pop(refusal.handle, None)
        if request is None:
            return
        for sequence in request.sequences:
            self._starved.pop(sequence, None)
            self._deliveries.pop(sequence, None)
            self._delivering.pop(sequence, None)
            if sequence.state is not SequenceState.FINISHED:
                self._scheduler.remove(sequence)
        self.report(refusal)

    def _starve(self, sequence: TokenSequence, now: float) -> None:
        sequence.starved_since = now
        self._starved[sequence] = None

    def _end_if_done(self, sequence: TokenSequence, token: int) -> None:
        request = sequence.request
        if token in request.last_ids:
            self.finish(sequence, _end_cause(token, request.command.checked.stopping), token)
        elif sequence.position >= sequence.max_tokens:
            self.finish(sequence, FinishCause.LENGTH)
        elif sequence.is_at_end:
            self.finish(sequence, FinishCause.GRAMMAR)

    def _done(self, request: Request) -> RequestDone:
        command, now = request.command, self._clock()
        started = request.started if request.started is not None else now
        # forced tokens may come before the first step
        first = max(request.first_token, started) if request.first_token is not None else now
        # only the first choice of a prompt counts: the others share the blocks that it computed
        firsts = request.sequences[:: command.checked.n]
        return RequestDone(
            handle=command.handle,
            prompt_tokens=sum(len(prompt) for prompt in command.checked.prompts),
            completion_tokens=_completion_tokens(request),
            cached_tokens=sum(s.cached_tokens or 0 for s in firsts),
            queue_seconds=started - command.arrival,
            prefill_seconds=first - started,
            decode_seconds=now - first,
            drafts=draft_counts(
                [each.speculation.counts for each in request.sequences],
                [DraftKind.PREDICTION] if command.checked.prediction else (),
            ),
        )

    # Outputs.

    def report(self, output: Output) -> None:
        """Add an output to those of the present step."""
        self._outputs.append(output)

    def take_outputs(self) -> list[Output]:
        """Return the outputs since the last call."""
        self._send_results()
        outputs, self._outputs = self._outputs, []
        return outputs


def _end_cause(token: int, stopping: StoppingSettings) -> FinishCause:
    """Return the cause of the end of a sequence that ends with an id."""
    return FinishCause.STOP_TOKEN if token in stopping.stop_token_ids else FinishCause.EOS


def _completion_tokens(request: Request) -> int:
    """Return the number of generated tokens; for a search, those of its results."""
    if request.searches:
        return request.delivered
    return sum(sequence.position for sequence in request.sequences)
