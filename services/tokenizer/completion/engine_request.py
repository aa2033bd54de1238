"""One request on the Session to the engine: submission, flow control, cancellation."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from services.common.accounts.metering import Meter
from services.common.logging import request_fields
from services.common.span import Span
from services.tokenizer.completion.choice import Choice
from services.tokenizer.completion.completion_output import CompletionOutput
from services.tokenizer.completion.plan import CompletionPlan
from services.tokenizer.engines.engine_link import EngineLink
from services.tokenizer.engines.engine_pool import EnginePool
from services.tokenizer.engines.placement import Need, Placement
from tokenwire.errors import ServiceError
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.session import Listener

__all__ = ["CallContext", "EngineRequest"]

_MARGIN_SECONDS = 0.1  # time from the engine's deadline to the caller's
_WINDOW = 1_024  # tokens per choice that the engine may be ahead of the reader of a call
_MAX_CREDIT = 2**32 - 1  # tokens that one message can grant; no choice can have more


@dataclass(frozen=True, slots=True)
class CallContext:
    """Origin of a request: its caller, tenant, deadline and limits."""

    request_id: str
    span: Span
    tenant: str
    priority: int
    deadline: float | None
    """Time of the event loop, in seconds; None without a deadline."""
    user: str = ""
    """The user's label from the request, which may be a name"""
    meter: Meter | None = None
    """Meter that counts the request against its API key's limits; None = it has no key"""
    refusal: ServiceError | None = None
    """Error for a caller that may not make the request; None = the caller may"""

    @property
    def log_fields(self) -> dict[str, str]:
        """Fields that identify the request in log lines."""
        return request_fields(self.request_id, self.span.traceparent)


class EngineRequest:
    """The engine's side of one completion. It is open from `submit` to the end of the request."""

    def __init__(
        self,
        pool: EnginePool,
        listener: Listener[engine_pb2.SessionEvent],
        context: CallContext,
        *,
        credit: int | None,
        is_windowed: bool,
    ) -> None:
        """credit: tokens per choice that the client grants; None = the client grants none.

        is_windowed: whether the client's reads limit how far the engine may be ahead.
        """
        self._pool = pool
        self._listener = listener
        self._context = context
        self._granted = credit
        """Tokens per choice granted so far; None without flow control."""
        self._is_windowed = is_windowed
        self._need: Need | None = None
        """Need of the last opened request"""
        self._placement: Placement | None = None
        self._handle = 0
        """Handle of the request on the Session of the placement's engine"""
        self._full: set[EngineLink] = set()
        """Engines that had no place for the request"""

    @property
    def is_open(self) -> bool:
        """True if an engine has the request."""
        return self._placement is not None

    @property
    def link(self) -> EngineLink | None:
        """The engine that has the request."""
        return self._placement.link if self._placement is not None else None

    def submit(self, output: CompletionOutput) -> None:
        """Open the request. Raises DEADLINE_EXCEEDED, and NO_ENGINE if none serves."""
        plan = output.plan
        if plan.whole:
            self._granted = None
        elif self._is_windowed and plan.engine_request.stopping.max_tokens > _WINDOW:
            self._granted = _WINDOW + max(choice.sent for choice in output.choices)
        if plan.resume is None:
            self._open(plan.engine_request, plan, taken=0)
        else:
            self.resubmit(output.remaining_request(), output)

    def resubmit(self, request: engine_pb2.GenerateRequest, output: CompletionOutput) -> None:
        """Open `request`, which continues the running choices. Raises as `submit`."""
        taken = min((len(choice.received) for choice in output.choices.running), default=0)
        self._open(request, output.plan, 0 if output.plan.searches else taken)
        if ended := output.choices.ended_sequences:
            self.cancel(ended)

    def add_credit(self, tokens: int) -> None:
        """Grant more tokens of each choice, if there is flow control."""
        if self._granted is None:
            return
        self._granted += tokens
        credit = engine_pb2.SessionCredit(tokens=tokens)
        self._send(engine_pb2.SessionCommand(credit=credit))

    def extend_window(self, running: Sequence[Choice]) -> None:
        """Grant tokens in place of those that the reader of a call has taken."""
        if self._granted is None or not self._is_windowed:
            return
        # the furthest choice counts, because the others may wait until those before them end
        taken = max((choice.sent for choice in running), default=0)
        more = taken + _WINDOW - self._granted
        if more >= _WINDOW // 2:
            self.add_credit(more)

    def cancel(self, sequences: Sequence[int] = ()) -> None:
        """Cancel these sequences, or all; the engine then sends their ends."""
        cancel = engine_pb2.SessionCancel(sequences=sequences)
        self._send(engine_pb2.SessionCommand(cancel=cancel))

    def leave(self) -> None:
        """Cancel the request, and drop its remaining events."""
        if self._placement is not None:
            self.cancel()
            self._placement.link.session.detach(self._handle)
            self.on_closed()

    def on_admitted(self, cached_tokens: Sequence[int]) -> None:
        """Note the number of each prompt's tokens that the engine had cached."""
        if self._placement is not None:
            self._placement.on_admitted(cached_tokens)

    def on_output(self) -> None:
        """Note that the engine has computed the prompt."""
        if self._placement is not None:
            self._placement.on_output()

    def on_closed(self) -> None:
        """Note that the engine has ended the request, or was lost."""
        if self._placement is not None:
            self._placement.leave()
            self._placement = None

    def on_lost(self) -> None:
        """Note that the engine was lost or stops, so that no request is placed on it."""
        if self._placement is not None:
            self._pool.suspend(self._placement.link)
            self.on_closed()

    def on_full(self) -> bool:
        """Note that the engine has no place. Return whether another engine may have one."""
        if self._placement is not None:
            self._full.add(self._placement.link)
            self.on_closed()
        return self._need is not None and self._pool.has_other(self._full, self._need)

    def _open(
        self,
        request: engine_pb2.GenerateRequest,
        plan: CompletionPlan,
        taken: int,
    ) -> None:
        """Open a request whose running choices have received at least `taken` tokens each."""
        command = engine_pb2.SessionCommand()
        start = command.start
        start.request.CopyFrom(request)  # the only copy, because images may be large
        start.request_id = self._context.request_id
        start.traceparent = self._context.span.traceparent
        start.tenant = self._context.tenant
        start.priority = self._context.priority
        if self._context.deadline is not None:
            left = self._context.deadline - asyncio.get_running_loop().time()
            if left <= 0:
                raise ServiceError(
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                    "DEADLINE_EXCEEDED",
                    "The deadline passed before the request reached the engine.",
                )
            start.timeout_seconds = max(left - _MARGIN_SECONDS, left / 2)
        if self._granted is not None:
            start.credit = min(max(0, self._granted - taken), _MAX_CREDIT)
        adapter = plan.limits.adapter
        self._need = Need(start.request, self._context.tenant, plan.images, adapter)
        self._placement = self._pool.place(self._need, self._full)
        self._handle = self._placement.link.session.open(self._listener)
        self._send(command)

    def _send(self, command: engine_pb2.SessionCommand) -> None:
        if self._placement is not None:
            command.handle = self._handle
            self._placement.link.session.send(command)
