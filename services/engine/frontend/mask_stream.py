"""Client of the grammar service: grammar compilation and one stream of masks.

The client runs on the event loop. Its owner opens a matcher for each constrained sequence, feeds it
the drawn tokens, and gets the next masks of all matchers in one callback per step.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import grpc

from services.common.block_hash import tenant_salt
from services.common.logging import request_id, traceparent
from services.common.priority import TENANT_KEY
from services.engine.checked_request import bitmask
from tokenwire.channel import stop_writing_at_end
from tokenwire.errors import ServiceError
from tokenwire.pb.grammar.v1 import grammar_pb2
from tokenwire.pb.grammar.v1.grammar_pb2_grpc import GrammarServiceStub
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec

__all__ = [
    "ANOTHER_TOKENIZER",
    "GRAMMAR_HANGS",
    "GrammarClient",
    "MaskState",
    "MaskStream",
    "lost_service",
]

_LOG = logging.getLogger("grammar")
GRAMMAR_HANGS = "GRAMMAR_HANGS"
"""Error reason for a service that is reachable but sends no usable masks"""
ANOTHER_TOKENIZER = "ANOTHER_TOKENIZER"
"""Error reason for a service whose masks are for other ids"""
_RETRY_SECONDS = 1.0
_Call: TypeAlias = "grpc.aio.StreamStreamCall[Any, Any]"


@dataclass(frozen=True, slots=True)
class MaskState:
    """Tokens that a matcher forces and allows next, or the error that closed it."""

    matcher: int
    forced: tuple[int, ...] = ()
    """Ids that must come next; the matcher has consumed them already"""
    mask: bytes | None = None
    """Bitmask for the token after `forced`: ceil(vocabulary / 8) bytes, least significant bit
    first; None = every id"""
    terminated: bool = False
    """True if the output must end after `forced`"""
    draft_masks: tuple[bytes | None, ...] = ()
    """Bitmasks behind each requested draft token after `forced`"""
    error: ServiceError | None = None
    """Error for which the service closed the matcher; the other fields are then unset"""


class GrammarClient:
    """Client that compiles grammars."""

    def __init__(self, channel: grpc.aio.Channel, fingerprint: str = "") -> None:
        """fingerprint: SHA-256 of the tokenizer.json that the service must have; empty = any."""
        self._stub = GrammarServiceStub(channel)
        self._fingerprint = fingerprint
        self._is_refused = False

    async def compile(
        self, spec: GrammarSpec, timeout: float | None = None, tenant: str = ""
    ) -> str:
        """Return the id of a tenant's grammar.

        timeout: seconds. Raises ServiceError: INVALID_ARGUMENT with the invalid field, or
        UNAVAILABLE with the time of a retry if the service is lost or has another tokenizer.
        """
        names = (
            ("x-request-id", request_id.get()),
            ("traceparent", traceparent.get()),
            (TENANT_KEY, tenant_salt(tenant).hex() if tenant else ""),  # metadata is ASCII
        )
        try:
            response = await self._stub.Compile(
                grammar_pb2.CompileRequest(grammar=spec),
                timeout=timeout,
                metadata=[(key, value) for key, value in names if value],
            )
        except grpc.aio.AioRpcError as failure:
            is_refused = failure.code() is grpc.StatusCode.UNAUTHENTICATED
            if is_refused and not self._is_refused:
                _LOG.error("the grammar service refuses this engine: %s", failure.details())
            self._is_refused = is_refused
            raise _service_error(failure) from None
        self._is_refused = False
        if self._fingerprint and response.tokenizer_fingerprint != self._fingerprint:
            message = "The grammar service has another tokenizer.json than the engine."
            raise lost_service(message, ANOTHER_TOKENIZER)
        return response.grammar_id


class MaskStream:
    """All matchers of this engine over one stream with one message per step.

    The stream connects at the first command, and again at the first command after a loss. Commands
    of one event loop turn share a message. A loss closes all matchers and calls `on_lost` once; the
    owner then opens the matchers again with their tokens, or fails them. A stream that leaves a
    message unanswered for `answer_seconds` counts as lost, with the reason GRAMMAR_HANGS.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        vocabulary_size: int,
        eos_token_ids: Sequence[int],
        on_states: Callable[[list[MaskState]], None],
        on_lost: Callable[[ServiceError], None],
        answer_seconds: float,
        mask_slots: int = 1024,
    ) -> None:
        self._stub = GrammarServiceStub(channel)
        self._configuration = grammar_pb2.MasksConfiguration(
            vocabulary_size=vocabulary_size, mask_slots=mask_slots
        )
        self._answer_seconds = answer_seconds
        self._eos_token_ids = tuple(eos_token_ids)
        self._on_states = on_states
        self._on_lost = on_lost
        self._commands: list[grammar_pb2.MatcherCommand] = []
        self._wake = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    def open(self, matcher: int, grammar_id: str, generated: Sequence[int]) -> None:
        """Open a matcher for a sequence that has already generated these tokens."""
        command = grammar_pb2.MatcherOpen(
            grammar_id=grammar_id, generated=generated, eos_token_ids=self._eos_token_ids
        )
        self._send(grammar_pb2.MatcherCommand(matcher=matcher, open=command))

    def accept(self, matcher: int, ids: Sequence[int]) -> None:
        """Feed drawn tokens."""
        command = grammar_pb2.MatcherAccept(ids=ids)
        self._send(grammar_pb2.MatcherCommand(matcher=matcher, accept=command))

    def ask_draft_masks(self, matcher: int, draft: Sequence[int]) -> None:
        """Request masks after these draft tokens with the next state."""
        command = grammar_pb2.MatcherPath(ids=draft)
        self._send(grammar_pb2.MatcherCommand(matcher=matcher, path=command))

    def close(self, matcher: int) -> None:
        """Close a matcher. The service sends no answer; an earlier state may still arrive."""
        if self._running is not None:  # the service discards the matchers of a lost stream
            command = grammar_pb2.MatcherClose()
            self._send(grammar_pb2.MatcherCommand(matcher=matcher, close=command))

    async def aclose(self) -> None:
        """End the stream without calling `on_lost`."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    def _send(self, command: grammar_pb2.MatcherCommand) -> None:
        if self._running is None:
            self._commands.clear()
            self._running = asyncio.ensure_future(self._run())
        self._commands.append(command)
        self._wake.set()

    async def _run(self) -> None:
        call = self._stub.Masks()
        error = lost_service("The stream of the grammar service ended.")
        writer: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(None) as timeout:
                clock = _AnswerClock(timeout, self._answer_seconds)
                writer = asyncio.ensure_future(self._write(call, clock))
                stop_writing_at_end(call, writer)
                await self._read(call, clock)
        except grpc.aio.AioRpcError as failure:
            error = _service_error(failure)
        except TimeoutError:
            message = f"The grammar service sent no mask for {self._answer_seconds:g} s."
            error = lost_service(message, GRAMMAR_HANGS)
        except Exception:  # the answer is invalid; without a new stream, all sequences would wait
            _LOG.exception("the stream of masks failed")
            error = lost_service("The grammar service sent an unreadable mask.", GRAMMAR_HANGS)
        finally:
            if writer is not None:
                writer.cancel()
            call.cancel()
            self._running = None
        self._on_lost(error)

    async def _read(self, call: _Call, clock: "_AnswerClock") -> None:
        slots: dict[int, bytes] = {}
        while (response := cast(Any, await call.read())) is not grpc.aio.EOF:
            clock.on_answer()
            if response.states:
                self._on_states([self._state(state, slots) for state in response.states])

    async def _write(self, call: _Call, clock: "_AnswerClock") -> None:
        step = 0
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                commands, self._commands = self._commands, []
                configuration = None if step else self._configuration
                clock.on_request()
                await call.write(
                    grammar_pb2.MasksRequest(
                        configuration=configuration, commands=commands, step=step
                    )
                )
                step += 1
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the reader sees the same failure and reports it
        except Exception:  # without a writer, every sequence would wait forever
            _LOG.exception("the stream of masks can't be written")
            clock.expire()

    def _state(self, state: grammar_pb2.MatcherState, slots: dict[int, bytes]) -> MaskState:
        if state.HasField("error"):
            return MaskState(state.matcher, error=ServiceError.from_status(state.error))
        mask = self._mask(state, slots)
        draft_masks = tuple(self._mask(drafted, slots) for drafted in state.ahead)
        return MaskState(state.matcher, tuple(state.forced), mask, state.terminated, draft_masks)

    def _mask(self, state: grammar_pb2.MatcherState, slots: dict[int, bytes]) -> bytes | None:
        """Return the state's mask, and store it in a slot if the state names one."""
        mask: bytes | None
        match state.WhichOneof("mask"):
            case "held_slot":
                mask = slots[state.held_slot]
            case "allowed":
                mask = bitmask(state.allowed.ids, self._configuration.vocabulary_size)
            case "bitmask":
                mask = state.bitmask
            case _:
                mask = None
        if state.HasField("store_slot") and mask is not None:
            slots[state.store_slot] = mask
        return mask


class _AnswerClock:
    """Timeout that runs while a message is unanswered. Each message gets one answer, in order."""

    def __init__(self, timeout: asyncio.Timeout, seconds: float) -> None:
        self._timeout = timeout
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._unanswered = 0

    def on_request(self) -> None:
        """Start the timeout with the first unanswered message."""
        self._unanswered += 1
        if self._unanswered == 1 and not self._timeout.expired():
            self._timeout.reschedule(self._loop.time() + self._seconds)

    def expire(self) -> None:
        """Let the timeout end the stream now."""
        self._timeout.reschedule(self._loop.time())

    def on_answer(self) -> None:
        """Restart the timeout for the next answer."""
        self._unanswered -= 1
        if not self._timeout.expired():
            deadline = self._loop.time() + self._seconds if self._unanswered else None
            self._timeout.reschedule(deadline)


def lost_service(message: str, reason: str = "GRAMMAR_LOST") -> ServiceError:
    """Return UNAVAILABLE with the time of a retry."""
    return ServiceError(grpc.StatusCode.UNAVAILABLE, reason, message, retry_seconds=_RETRY_SECONDS)


def _service_error(failure: grpc.aio.AioRpcError) -> ServiceError:
    error = ServiceError.from_rpc_error(failure)
    if error.code is grpc.StatusCode.UNAUTHENTICATED:  # the engine lacks the token, not its client
        return lost_service("The grammar service does not know this engine.")
    if error.code is grpc.StatusCode.UNAVAILABLE:
        return lost_service(
            "The grammar service is unreachable; only requests without a grammar are served."
        )
    return error
