"""The engine as its servicers see it: requests in, events into outboxes.

Lives on the event loop. It owns the streams; the step loop owns the sequences.
"""

import asyncio
import hashlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from services.common.contract import MAX_SEQUENCES
from services.common.errors import internal_error
from services.common.logging import request_fields
from services.engine.frontend import metrics
from services.engine.frontend.admission import (
    Admission,
    CheckedRequest,
    resolved_sampling,
)
from services.engine.frontend.loop_client import EngineProcess
from services.engine.frontend.matchers import Matchers
from services.engine.frontend.outbox import add_scores
from services.engine.frontend.sink import Sink
from services.engine.messages import (
    AddRequest,
    Admitted,
    CacheFlushed,
    CancelRequest,
    FinishCause,
    Finished,
    FlushCache,
    GrantCredit,
    Guessed,
    LoadSnapshot,
    ModelDescription,
    Output,
    Refused,
    RequestDone,
    ScoredPrompt,
    SetMasks,
    StepOutput,
    Token,
)
from services.engine.settings import EngineSettings
from tokenwire.errors import ServiceError
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.types.v1.types_pb2 import FinishReason, GrammarSpec, StopMatch, Usage

__all__ = ["Caller", "Frontend"]

_LOG = logging.getLogger("engine")
_RATE_SECONDS = 5.0
"""What tokens_per_second is averaged over"""


@dataclass(frozen=True, slots=True)
class Caller:
    """On whose behalf a request runs."""

    request_id: str
    traceparent: str = ""
    tenant: str = ""
    priority: int = 0
    timeout_seconds: float | None = None


@dataclass(slots=True, eq=False)
class _Live:
    """A request that the loop holds."""

    caller: Caller
    request: CheckedRequest
    sink: Sink[Any]
    arrival: float
    last_token: dict[int, float] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None
    is_cancelled: bool = False
    """All of it, by its client"""


@dataclass(slots=True, eq=False)
class _Compiling:
    """A request whose grammar is compiled: it is here, but not in the loop yet."""

    request_id: str
    until: asyncio.Timeout
    failure: ServiceError | None = None
    """Why it is ended, where that is not its deadline"""

    def end(self, failure: ServiceError) -> None:
        """Let it fail; the first reason counts."""
        self.failure = self.failure or failure
        if not self.until.expired():  # else it is about to end, and tells this
            self.until.reschedule(asyncio.get_running_loop().time())


class Frontend:
    """Submits requests to the loop and routes what comes back."""

    def __init__(self, settings: EngineSettings, on_failure: Callable[[str], None]) -> None:
        self._settings = settings
        self._most_requests = settings.max_running + settings.max_waiting
        self._on_failure = on_failure
        self.model_id = settings.model_id or settings.model.resolve().name
        self._admission: Admission | None = None
        self._process = EngineProcess(settings, self._on_output, self._on_death)
        self._matchers: Matchers | None = None
        self._live: dict[int, _Live] = {}
        self._heard = 0.0
        """When the loop reported last, or had nothing to report on, as time.monotonic() has it"""
        self._compiling: set[_Compiling] = set()
        self._handles = itertools.count(1)
        self._flushes: deque[asyncio.Future[int]] = deque()
        self._changed = asyncio.Event()
        self._rate: deque[tuple[float, int]] = deque()
        self.load = LoadSnapshot()
        self.draining = False
        self.version = 0
        """Counts steps and changes of what runs"""

    async def start(self) -> None:
        """Load the model. Raises StartupError."""
        model = await self._process.start()
        settings = self._settings
        self._admission = Admission(
            self.model_id,
            model,
            settings.max_logprobs,
            # one that has more could never be admitted, however often its client tries again
            min(MAX_SEQUENCES, settings.max_running + settings.max_waiting),
            bool(settings.grammar),
        )
        self.load = LoadSnapshot(free_blocks=model.total_blocks, total_blocks=model.total_blocks)
        if self._settings.grammar:
            self._matchers = Matchers(
                self._settings.grammar,
                vocabulary_size=model.vocabulary_size,
                eos_token_ids=model.eos_token_ids,
                on_masks=lambda masks: self._process.send(SetMasks(masks)),
                on_failed=lambda handle, error: self._fail(handle, error, "failed"),
                lost_seconds=self._settings.lost_seconds,
                wait_seconds=self._settings.grammar_wait,
            )

    async def stop(self) -> None:
        """Abort everything and end the loop."""
        self.draining = True
        for request in self._compiling:  # before their channel is closed, which would cancel them
            request.end(_draining())
        while self._compiling:
            await self.changed_since(self.version)
        if self._matchers is not None:
            await self._matchers.aclose()
        await self._process.stop()

    async def drained(self) -> None:
        """Returns when no request is left."""
        while self.num_requests:
            await self.changed_since(self.version)

    async def changed_since(self, version: int) -> None:
        """Returns when a step was taken, or what runs has changed, after this version."""
        while self.version == version:
            await self._changed.wait()

    @property
    def admission(self) -> Admission:
        """What requests must keep to. Raises ServiceError while the model loads."""
        if self._admission is None:
            raise ServiceError(
                grpc.StatusCode.UNAVAILABLE, "LOADING", "The model is loading.", retry_seconds=1
            )
        return self._admission

    @property
    def model(self) -> ModelDescription:
        """The model. Raises ServiceError while it loads."""
        return self.admission.model

    @property
    def num_requests(self) -> int:
        """Requests that run or wait, for their grammar too."""
        return len(self._live) + len(self._compiling)

    @property
    def silent_seconds(self) -> float:
        """For how long the loop has reported nothing, though requests run: a step hangs, or is very
        long."""
        return time.monotonic() - self._heard if self._live else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second, over the last seconds."""
        self._forget_rates()
        return sum(count for _, count in self._rate) / _RATE_SECONDS

    # Requests.

    async def submit(
        self,
        request: engine_pb2.GenerateRequest,
        caller: Caller,
        credit: int | None,
        sink: Sink[Any],
    ) -> int:
        """Check a request and hand it to the loop. Returns its handle; raises ServiceError.

        A request that the loop refuses gets its error through the sink. Who cancels this counts
        the request: a task that is cancelled before its first step has not come here.
        """
        arrival = time.monotonic()
        try:
            if self.draining:
                raise _draining()
            if self.num_requests >= self._most_requests:
                raise _queue_full(self.num_requests)
            checked = self.admission.check(request)
            matchers = self._matchers if checked.constrained else None
            grammar_id = ""
            if matchers is not None:
                grammar_id = await self._compile(matchers, request.grammar, caller)
        except ServiceError as error:
            metrics.REQUESTS.labels(_outcome(error.reason)).inc()
            raise
        handle = next(self._handles)
        live = _Live(caller, checked, sink, arrival)
        if not self._live:
            self._heard = time.monotonic()
        self._live[handle] = live
        if matchers is not None:
            count = len(checked.prompts) * checked.n
            generated = {resume.sequence: resume.generated for resume in checked.resume}
            matchers.open(handle, count, grammar_id, request.grammar, generated)
        if caller.timeout_seconds is not None:
            loop = asyncio.get_running_loop()
            left = arrival + caller.timeout_seconds - time.monotonic()
            live.timer = loop.call_later(left, self._expire, handle)
        self._process.send(
            AddRequest(
                handle=handle,
                prompts=checked.prompts,
                n=checked.n,
                sampling=checked.sampling,
                stopping=checked.stopping,
                logprobs=checked.logprobs,
                prompt_logprobs=checked.prompt_logprobs,
                resume=checked.resume,
                constrained=checked.constrained,
                credit=credit,
                cache_salt=hashlib.blake2b(caller.tenant.encode(), digest_size=16).digest(),
                priority=caller.priority,
                arrival=arrival,
            )
        )
        return handle

    async def _compile(self, matchers: Matchers, grammar: GrammarSpec, caller: Caller) -> str:
        """The grammar's id. Meanwhile the request counts as one that is here."""
        compiling = _Compiling(caller.request_id, asyncio.timeout(caller.timeout_seconds))
        if len(self._compiling) >= self._settings.max_waiting:
            raise _too_many(len(self._compiling))
        self._compiling.add(compiling)
        try:
            async with compiling.until:
                return await matchers.compile(grammar)
        except TimeoutError:
            raise (compiling.failure or _expired()) from None
        finally:
            self._compiling.discard(compiling)
            self.notify()

    def cancel(self, handle: int, sequences: Sequence[int] = ()) -> None:
        """End sequences; none named = all. Raises ServiceError for one that does not exist."""
        live = self._live.get(handle)
        if live is None:
            return
        count = len(live.request.prompts) * live.request.n
        if any(index >= count for index in sequences):
            raise ServiceError(
                grpc.StatusCode.INVALID_ARGUMENT,
                "INVALID_FIELD",
                f"The request has {count} sequences.",
                field="cancel.sequences",
            )
        live.is_cancelled = live.is_cancelled or not sequences
        self._process.send(CancelRequest(handle, tuple(sequences)))

    def drop(self, handle: int) -> None:
        """End a request whose client is gone: nothing more is delivered."""
        if handle in self._live:
            self._process.send(CancelRequest(handle))
            self._forget(handle, "cancelled")

    def grant(self, handle: int, tokens: int) -> None:
        """Let every sequence of a request generate further tokens."""
        if handle in self._live:
            self._process.send(GrantCredit(handle, tokens))

    def abort(self, request_ids: Sequence[str] | None) -> int:
        """End requests by id, or all. Returns how many there were."""

        def is_meant(request_id: str) -> bool:
            return request_ids is None or request_id in request_ids

        handles = [h for h, live in self._live.items() if is_meant(live.caller.request_id)]
        for handle in handles:
            self._fail(handle, _aborted(), "aborted")
        compiling = [request for request in self._compiling if is_meant(request.request_id)]
        for request in compiling:
            request.end(_aborted())
        return len(handles) + len(compiling)

    async def flush_cache(self) -> int:
        """Forget cached prefixes. Returns the blocks freed."""
        flushed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._flushes.append(flushed)
        self._process.send(FlushCache())
        return await flushed

    # What the loop reports.

    def _on_output(self, output: StepOutput) -> None:
        self.load = output.load
        metrics.observe_load(output.load)
        self._feed_matchers(output)
        now, generated = time.monotonic(), 0
        self._heard = now
        for item in output.outputs:
            if isinstance(item, CacheFlushed):
                self._on_flushed(item)
                continue
            live = self._live.get(item.handle)
            if live is None:
                continue  # its client left while this was under way
            generated += isinstance(item, Token)
            try:
                self._deliver(item, live, now)
            except Exception:
                _LOG.exception("unexpected failure")
                self._fail(item.handle, internal_error(), "failed")
        if generated:
            metrics.GENERATED_TOKENS.inc(generated)
            self._rate.append((now, generated))
            self._forget_rates()
        self.notify()

    def _deliver(self, item: Output, live: _Live, now: float) -> None:
        match item:
            case Token():
                self._on_token(live, item, now)
            case ScoredPrompt():
                live.sink.on_prompt_scores(_prompt_scores(item))
            case Finished():
                self._close_matchers(live, item.handle, (item.sequence,))
                live.sink.on_finished(_finished(item))
            case Admitted():
                live.sink.on_accepted(_accepted(item, live))
            case RequestDone():
                self._on_done(live, item)
            case Refused():
                self._forget(item.handle, _outcome(item.reason))
                code = grpc.StatusCode[item.code]
                if code is grpc.StatusCode.INTERNAL:
                    names = request_fields(live.caller.request_id, live.caller.traceparent)
                    _LOG.error(item.message, extra=names)
                live.sink.on_error(
                    ServiceError(
                        code,
                        item.reason,
                        item.message,
                        field=item.field,
                        retry_seconds=item.retry_seconds,
                    )
                )

    def _on_flushed(self, flushed: CacheFlushed) -> None:
        waiting = self._flushes.popleft()
        if not waiting.done():  # its client may have left
            waiting.set_result(flushed.freed_blocks)

    def _forget_rates(self) -> None:
        horizon = time.monotonic() - _RATE_SECONDS
        while self._rate and self._rate[0][0] < horizon:
            self._rate.popleft()

    def _on_token(self, live: _Live, token: Token, now: float) -> None:
        live.sink.on_token(token)
        last = live.last_token.get(token.sequence)
        if last is None:
            metrics.TIME_TO_FIRST_TOKEN.observe(now - live.arrival)
        else:
            metrics.INTER_TOKEN.observe(now - last)
        live.last_token[token.sequence] = now

    def _feed_matchers(self, output: StepOutput) -> None:
        """Before all else that a step brings: the loop may have to wait for the masks."""
        if self._matchers is not None:
            self._matchers.feed(o for o in output.outputs if isinstance(o, Token | Guessed))

    def _close_matchers(self, live: _Live, handle: int, sequences: Iterable[int]) -> None:
        if self._matchers is not None and live.request.constrained:
            for sequence in sequences:
                self._matchers.close(handle, sequence)

    def _on_done(self, live: _Live, done: RequestDone) -> None:
        metrics.PROMPT_TOKENS.inc(done.prompt_tokens)
        metrics.CACHED_TOKENS.inc(done.cached_tokens)
        metrics.QUEUE_TIME.observe(done.queue_seconds)
        self._forget(done.handle, "cancelled" if live.is_cancelled else "ok")
        usage = Usage(
            prompt_tokens=done.prompt_tokens,
            completion_tokens=done.completion_tokens,
            cached_tokens=done.cached_tokens,
            queue_seconds=done.queue_seconds,
            prefill_seconds=done.prefill_seconds,
            decode_seconds=done.decode_seconds,
        )
        live.sink.on_completed(engine_pb2.Completed(usage=usage))

    def _on_death(self, why: str) -> None:
        self.draining = True  # whoever tries again must not come back here
        self._on_failure(why)
        error = ServiceError(grpc.StatusCode.UNAVAILABLE, "ENGINE_LOST", why, retry_seconds=1)
        for handle in list(self._live):
            self._fail(handle, error, "failed")
        for request in self._compiling:
            request.end(error)

    def _expire(self, handle: int) -> None:
        self._fail(handle, _expired(), "expired")

    def _fail(self, handle: int, error: ServiceError, outcome: str) -> None:
        live = self._live.get(handle)
        if live is not None:
            self._process.send(CancelRequest(handle))
            self._forget(handle, outcome)
            live.sink.on_error(error)

    def _forget(self, handle: int, outcome: str) -> None:
        live = self._live.pop(handle)
        if live.timer is not None:
            live.timer.cancel()
        self._close_matchers(live, handle, range(len(live.request.prompts) * live.request.n))
        metrics.REQUESTS.labels(outcome).inc()
        self.notify()

    def notify(self) -> None:
        """Wake those that wait for a change of what runs."""
        self.version += 1
        self._changed.set()  # for those that wait by now
        self._changed.clear()


def _outcome(reason: str) -> str:
    """What a request that got this error counts as."""
    outcomes = {
        "ABORTED": "aborted",
        "DEADLINE_EXCEEDED": "expired",
        "NOT_FINITE": "failed",
        "OUT_OF_MEMORY": "failed",
        "STEP_FAILED": "failed",
        "STALLED": "stalled",
    }
    return outcomes.get(reason, "refused")


def _draining() -> ServiceError:
    message = "This engine takes no new requests."
    return ServiceError(grpc.StatusCode.UNAVAILABLE, "DRAINING", message, retry_seconds=1)


def _too_many(waiting: int) -> ServiceError:
    return _full(f"{waiting} requests wait for their grammars already; try again.")


def _queue_full(count: int) -> ServiceError:
    """As the loop refuses, which counts sequences. Here it costs the loop nothing."""
    return _full(f"{count} requests are here already; try again.")


def _full(message: str) -> ServiceError:
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    return ServiceError(code, "QUEUE_FULL", message, retry_seconds=1)


def _aborted() -> ServiceError:
    return ServiceError(grpc.StatusCode.CANCELLED, "ABORTED", "Aborted by an operator.")


def _expired() -> ServiceError:
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    return ServiceError(code, "DEADLINE_EXCEEDED", "The deadline passed.")


_FINISH: dict[FinishCause, FinishReason.ValueType] = {
    FinishCause.EOS: FinishReason.FINISH_REASON_STOP,
    FinishCause.STOP_TOKEN: FinishReason.FINISH_REASON_STOP,
    FinishCause.GRAMMAR: FinishReason.FINISH_REASON_STOP,
    FinishCause.LENGTH: FinishReason.FINISH_REASON_LENGTH,
    FinishCause.CANCELLED: FinishReason.FINISH_REASON_CANCELLED,
}


def _accepted(admitted: Admitted, live: _Live) -> engine_pb2.Accepted:
    return engine_pb2.Accepted(
        sampling=resolved_sampling(live.request.sampling),
        max_tokens=admitted.max_tokens,
        cached_tokens=admitted.cached_tokens,
        queue_position=admitted.queue_position,
    )


def _prompt_scores(scored: ScoredPrompt) -> engine_pb2.PromptScores:
    message = engine_pb2.PromptScores(prompt=scored.prompt, position=scored.position)
    message.tokens.ids.extend(scored.ids)
    add_scores(message.tokens, scored.scores)
    return message


def _finished(finished: Finished) -> engine_pb2.SequenceFinished:
    match: StopMatch | None = None
    if finished.cause is FinishCause.EOS and finished.token_id is not None:
        match = StopMatch(eos_token_id=finished.token_id)
    elif finished.cause is FinishCause.STOP_TOKEN and finished.token_id is not None:
        match = StopMatch(stop_token_id=finished.token_id)
    return engine_pb2.SequenceFinished(
        sequence=finished.sequence,
        reason=_FINISH[finished.cause],
        match=match,
        completion_tokens=finished.completion_tokens,
    )
