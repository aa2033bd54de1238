"""One running completion, from validation to the last response."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine

import grpc

from services.common.accounts.usage import RequestUsage
from services.common.errors import draining_error, internal_error
from services.common.failures import failure
from services.common.peers.losses import Losses
from services.tokenizer import metrics
from services.tokenizer.completion.completion_output import CompletionOutput
from services.tokenizer.completion.completion_span import end_span
from services.tokenizer.completion.engine_request import CallContext, EngineRequest
from services.tokenizer.completion.plan import CompletionPlan
from services.tokenizer.completion.request_processor import AddResponse, RequestProcessor
from services.tokenizer.engines.engine_link import EngineLink
from services.tokenizer.engines.engine_pool import EnginePool
from services.tokenizer.send_queue import SendQueue
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["CompletionStream"]

_LOG = logging.getLogger("completion")
_LOGGED_LABEL = 128  # characters of a user's label
_LOSS_REASONS = frozenset({"SESSION_LOST", "ENGINE_LOST"})
_RETRY_REASONS = _LOSS_REASONS | {"DRAINING", "LOADING"}
"""Error reasons of an engine after which a completion continues on another, or waits for one"""


def _never_full() -> bool:
    return False


def _cancelled() -> ServiceError:
    return ServiceError(grpc.StatusCode.CANCELLED, "CANCELLED", "The request was cancelled.")


def _for_client(error: ServiceError) -> ServiceError:
    """Return the engine's error, UNAVAILABLE if the engine refuses this service itself."""
    if error.code not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return error
    message = f"The engine refuses this service: {error.message}"
    return ServiceError(grpc.StatusCode.UNAVAILABLE, "SESSION_LOST", message, retry_seconds=1)


def _too_many_losses(error: ServiceError) -> ServiceError:
    """Return an error that does not ask the client to try again: the request may be the cause."""
    message = (
        "The engines that had this request were lost one after the other, without progress: "
        f"{error.message}"
    )
    return ServiceError(grpc.StatusCode.UNAVAILABLE, "ENGINE_LOST", message)


class CompletionStream:
    """A running completion, which gathers the engine's output until the client takes it."""

    def __init__(
        self,
        processor: RequestProcessor,
        context: CallContext,
        pool: EnginePool,
        send_queue: "SendQueue[CompletionStream]",
        on_end: "Callable[[CompletionStream], None]",
        *,
        credit: int | None,
        is_windowed: bool,
    ) -> None:
        """credit, is_windowed: parameters of `EngineRequest`. on_end: called once, at the end."""
        self.error: ServiceError | None = None
        """The failure, which the client gets after the last `write`"""
        self.processor: RequestProcessor = processor
        self._context = context
        self._pool = pool
        self._send_queue = send_queue
        self._on_end = on_end
        self._engine = EngineRequest(pool, self, context, credit=credit, is_windowed=is_windowed)
        self._losses = Losses()
        self._started = time.monotonic()
        self._task: asyncio.Task[None] | None = None
        self._output: CompletionOutput | None = None
        """Output of the engine; None until the request is planned"""
        self._is_cancelled = False
        self._is_ended = False

    @property
    def is_written(self) -> bool:
        """True if the last event was written."""
        return self._output is not None and self._output.is_written

    @property
    def is_admitted(self) -> bool:
        """True if the admission was written."""
        return self._output is not None and self._output.is_admission_written

    # called for the client

    def start(self, *, is_draining: bool) -> None:
        """Validate, plan and submit the request. A refusal becomes `error`."""
        try:
            if is_draining:
                raise draining_error()
            if self._context.deadline is not None and math.isnan(self._context.deadline):
                raise invalid("context.timeout_seconds", "The timeout must be a number.")
            if self._context.refusal is not None:
                raise self._context.refusal
            if self._pool.is_serving and self._context.meter is None:
                self._prepare()
            else:
                self._run_as_task(self._prepare_later())
        except ServiceError as error:
            self._fail(error)
        except Exception:
            self.fail_unexpectedly()

    def credit(self, tokens: int) -> None:
        """Grant the engine `tokens` more tokens of each choice."""
        if not self._is_ended:
            self._engine.add_credit(tokens)

    def extend_window(self) -> None:
        """Grant the engine as many tokens as the client has taken."""
        if self._output is not None and not self._is_ended:
            self._engine.extend_window(self._output.choices.running)

    def cancel(self) -> None:
        """Cancel the request; the client still gets the ends of its choices."""
        self._is_cancelled = True
        if self._engine.is_open:
            self._engine.cancel()
        elif not self._is_ended:
            self._fail(_cancelled())

    def abandon(self) -> None:
        """End the request of a client that has disconnected."""
        if not self._is_ended:
            self._leave_engine()
            self._end("cancelled")

    def move(self, link: EngineLink) -> None:
        """Continue on another engine if the request is on this one, which stops."""
        output = self._output
        if output is None or self._is_cancelled or self._engine.link is not link:
            return
        if engine_pb2.CAPABILITY_RESUME in self._pool.limits.capabilities:
            self._engine.leave()
            metrics.MOVED.labels("DRAINING").inc()
            self._run_as_task(self._resubmit(output, draining_error()))

    def write(self, add: AddResponse, is_full: Callable[[], bool] = _never_full) -> None:
        """Write what is ready, as responses from `add`; mark the stream again if output is left."""
        if self._output is not None and self._output.write(self.processor, add, is_full):
            self._send_queue.mark(self)

    def fail_unexpectedly(self) -> None:
        """Fail the request with INTERNAL, and log the current exception; others continue."""
        _LOG.exception("unexpected failure", extra=self._context.log_fields)
        self._leave_engine()
        self._fail(internal_error())
        # the engine may have completed the request, but the client has not
        self.error = self.error or internal_error()

    # called for the engine

    def on_event(self, event: engine_pb2.SessionEvent) -> None:
        """Take an event of the engine."""
        if self._output is None:
            return
        try:
            self._take(self._output, event)
        except ServiceError as error:
            self._leave_engine()
            self._fail(error)
        except Exception:
            self.fail_unexpectedly()

    def on_error(self, error: ServiceError) -> None:
        """Submit the request again if its engine was lost, starts or is full; else fail it."""
        error, output = _for_client(error), self._output
        remap_error = output.plan.remap_error if output is not None else None
        if remap_error is not None and error.field.startswith("grammar"):
            remap_error(error)
        elif error.field.startswith("resume["):
            error.field = "resume.choices"  # the engine numbers the running choices alone
        may_retry = self._leave_for(error)
        if output is None or not may_retry:
            self._fail(error)
        elif error.reason in _LOSS_REASONS and not self._losses.count(output.progress):
            self._fail(_too_many_losses(error))
        else:
            metrics.MOVED.labels(error.reason).inc()
            self._run_as_task(self._resubmit(output, error))

    def _leave_for(self, error: ServiceError) -> bool:
        """Leave the engine that ended the request. Return whether another engine may take it."""
        if error.reason == "QUEUE_FULL":
            return self._engine.on_full()
        if error.reason in _RETRY_REASONS:
            self._engine.on_lost()
            return True
        self._engine.on_closed()
        return False

    def _take(self, output: CompletionOutput, event: engine_pb2.SessionEvent) -> None:
        kind = event.WhichOneof("event")
        has_output = False
        if kind == "delta":
            has_output = self._take_tokens(output, event.delta)
        elif kind == "finished":
            has_output = output.end_choice(event.finished)
        elif kind == "completed":
            self._engine.on_closed()
            self._complete(output, event.completed.usage)
        elif kind == "prompt_scores":
            has_output = output.add_prompt_scores(event.prompt_scores)
        elif kind == "accepted":
            self._engine.on_admitted(event.accepted.cached_tokens)
            has_output = output.accept(event.accepted)
        if has_output:
            self._send_queue.mark(self)

    def _take_tokens(self, output: CompletionOutput, delta: engine_pb2.OutputDelta) -> bool:
        self._engine.on_output()
        choice = output.choices[delta.sequence]
        if choice.outcome is not None:
            return False
        has_output = output.add_tokens(delta)
        if choice.outcome is not None:  # a stop string, unknown to the engine, has ended the choice
            self._engine.cancel([delta.sequence])
        return has_output

    def _complete(self, output: CompletionOutput, usage: types_pb2.Usage) -> None:
        output.complete(usage)
        self._send_queue.mark(self)
        self._end("cancelled" if self._is_cancelled else "ok")

    # from preparation to the end

    def _prepare(self) -> None:
        limits = self._pool.limits_of(self.processor.model)
        self.processor.check(limits)
        plan = self.processor.plan(limits)
        if isinstance(plan, CompletionPlan):
            self._submit(plan)
        else:
            self._run_as_task(self._submit_later(plan))

    async def _prepare_later(self) -> None:
        if self._context.meter is not None:
            await self._context.meter.begin()
        if self._pool.is_serving:
            self._prepare()
            return
        if self._pool.is_known:  # refuse an invalid request without waiting
            self.processor.check(self._pool.limits_of(self.processor.model))
        await self._wait_for_engine("It is not connected.")
        self._prepare()

    async def _submit_later(self, plan: Coroutine[None, None, CompletionPlan]) -> None:
        self._submit(await plan)

    def _submit(self, plan: CompletionPlan) -> None:
        self._output = CompletionOutput(plan, self._started)
        metrics.ENCODE_SECONDS.observe(self._output.encode_seconds)
        try:
            self._engine.submit(self._output)
        except ServiceError as error:
            if error.reason != "NO_ENGINE":
                raise
            self._run_as_task(self._resubmit(self._output, error))

    async def _resubmit(self, output: CompletionOutput, error: ServiceError) -> None:
        """Continue on an engine that serves. Raises `error` if it can't resume."""
        if not output.choices.running:
            self._complete(output, types_pb2.Usage())
            return
        if self._is_cancelled:
            raise _cancelled()
        while not self._engine.is_open:
            await self._wait_for_engine(error.message)
            request = output.remaining_request()
            can_resume = engine_pb2.CAPABILITY_RESUME in self._pool.limits.capabilities
            if request.resume and not can_resume:
                raise error
            try:
                self._engine.resubmit(request, output)
            except ServiceError as refusal:
                if refusal.reason != "NO_ENGINE":
                    raise

    async def _wait_for_engine(self, why: str) -> None:
        is_new = self._output is None or not self._output.is_admitted
        await self._pool.wait_until_serving(self._context.deadline, why, is_new=is_new)

    def _run_as_task(self, work: Coroutine[None, None, None]) -> None:
        """Run a coroutine whose failure ends the request."""

        async def watched() -> None:
            try:
                await work
            except ServiceError as error:
                self._fail(error)
            except Exception:
                self.fail_unexpectedly()

        self._task = asyncio.ensure_future(watched())

    def _leave_engine(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._engine.leave()

    def _fail(self, error: ServiceError) -> None:
        if self._is_ended:
            return
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        self.error = error
        self._send_queue.mark(self)
        self._end(error.code.name.lower(), **failure(_LOG, error))

    def _end(self, outcome: str, **why: str) -> None:
        self._is_ended = True
        self.processor.close()
        metrics.REQUESTS.labels(outcome).inc()
        self._on_end(self)
        output = self._output
        if output is not None and output.plan.ids_name_blocks:
            for prompt, outputs in output.computed():
                self._pool.learn(self._context.tenant, prompt, outputs)
        if self._context.meter is not None:
            is_error = outcome not in ("ok", "cancelled")
            self._context.meter.end(
                RequestUsage("", is_error=is_error)
                if output is None
                else output.usage(is_error=is_error)
            )
        end_span(self._context.span, output, outcome, **why)
        _LOG.info(
            "completion %s",
            outcome,
            extra={
                **self._context.log_fields,
                **why,
                **self._user_field(),
                **self._key_field(),
                "prompt_tokens": output.plan.prompt_tokens if output is not None else 0,
                "completion_tokens": output.choices.received if output is not None else 0,
                "milliseconds": round((time.monotonic() - self._started) * 1e3, 2),
            },
        )

    def _key_field(self) -> dict[str, str]:
        """Return the id of the API key, if there is one."""
        meter = self._context.meter
        return {"key": meter.key_id} if meter is not None else {}

    def _user_field(self) -> dict[str, str]:
        """Return the user's label, which may be a name, at the level debug only."""
        is_logged = self._context.user and _LOG.isEnabledFor(logging.DEBUG)
        return {"user": self._context.user[:_LOGGED_LABEL]} if is_logged else {}
