"""The engine's side of the grammar service: compiles grammars, and keeps one stream of masks.

Everything here runs on the event loop. The owner opens a matcher per constrained sequence, feeds it
what was sampled, and gets the next mask by callback, for all matchers of a step at once.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import grpc

from services.common.logging import request_id, traceparent
from tokenwire.errors import ServiceError
from tokenwire.pb.grammar.v1 import grammar_pb2
from tokenwire.pb.grammar.v1.grammar_pb2_grpc import GrammarServiceStub
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec

__all__ = ["GRAMMAR_HANGS", "GrammarClient", "MaskState", "MaskStream"]

_LOG = logging.getLogger("constraint")
GRAMMAR_HANGS = "GRAMMAR_HANGS"
"""Reason of the error of a service that lives, but gives no masks"""
_RETRY = 1.0  # seconds
_Call: TypeAlias = "grpc.aio.StreamStreamCall[Any, Any]"


@dataclass(frozen=True, slots=True)
class MaskState:
    """What a matcher allows next, or why it is broken."""

    matcher: int
    forced: tuple[int, ...] = ()
    """Ids that come next; the matcher has taken them already."""
    mask: bytes | None = None
    """What may follow them: ceil(vocabulary / 8) bytes; bit i of byte i // 8, lowest first, is
    id i. None = every id."""
    terminated: bool = False
    """Nothing may follow them but the end."""
    ahead: tuple[bytes | None, ...] = ()
    """Masks along the path that was asked for, behind those of its ids that are forced"""
    error: ServiceError | None = None
    """The matcher is broken and forgotten; nothing above holds."""


class GrammarClient:
    """Compiles grammars."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = GrammarServiceStub(channel)

    async def compile(
        self, spec: GrammarSpec, timeout: float | None = None, *, waits: bool = False
    ) -> str:
        """The grammar's id.

        Raises ServiceError: INVALID_ARGUMENT with the field to blame, or UNAVAILABLE with a time to
        retry when the service is gone. `timeout` is in seconds; `waits` for a service that is not
        there, within that time.
        """
        names = (("x-request-id", request_id.get()), ("traceparent", traceparent.get()))
        try:
            response = await self._stub.Compile(
                grammar_pb2.CompileRequest(grammar=spec),
                timeout=timeout,
                wait_for_ready=waits,
                metadata=[(key, value) for key, value in names if value],
            )
        except grpc.aio.AioRpcError as failure:
            raise _typed(failure) from None
        return response.grammar_id


class MaskStream:
    """All matchers of this engine, over one stream that carries one message per step.

    It connects at the first command and anew after a loss. Commands of one turn of the event loop
    leave together. A lost stream forgets its matchers: `on_lost` is told, once, and the owner opens
    them again with what was generated, or fails them. A stream that leaves a message unanswered for
    `answer_seconds` counts as lost: its service lives, but hangs.
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
        self._outbox: list[grammar_pb2.MatcherCommand] = []
        self._wake = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    def open(self, matcher: int, grammar_id: str, generated: Sequence[int]) -> None:
        """Make a matcher, for a sequence that already has these tokens of its output."""
        command = grammar_pb2.MatcherOpen(
            grammar_id=grammar_id, generated=generated, eos_token_ids=self._eos_token_ids
        )
        self._send(grammar_pb2.MatcherCommand(matcher=matcher, open=command))

    def accept(self, matcher: int, ids: Sequence[int]) -> None:
        """Feed tokens."""
        command = grammar_pb2.MatcherAccept(ids=ids)
        self._send(grammar_pb2.MatcherCommand(matcher=matcher, accept=command))

    def ask_ahead(self, matcher: int, path: Sequence[int]) -> None:
        """Have the next state tell what may follow these guesses, too."""
        command = grammar_pb2.MatcherPath(ids=path)
        self._send(grammar_pb2.MatcherCommand(matcher=matcher, path=command))

    def close(self, matcher: int) -> None:
        """Forget a matcher. Nothing is answered; a state that is under way may still arrive."""
        command = grammar_pb2.MatcherClose()
        self._send(grammar_pb2.MatcherCommand(matcher=matcher, close=command))

    async def aclose(self) -> None:
        """End the stream, without a call of `on_lost`."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    def _send(self, command: grammar_pb2.MatcherCommand) -> None:
        if self._running is None:
            self._outbox.clear()
            self._running = asyncio.ensure_future(self._run())
        self._outbox.append(command)
        self._wake.set()

    async def _run(self) -> None:
        call = self._stub.Masks()
        error = _gone("The stream of the grammar service ended.")
        writer: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(None) as patience:
                clock = _AnswerClock(patience, self._answer_seconds)
                writer = asyncio.ensure_future(self._write(call, clock))
                await self._read(call, clock)
        except grpc.aio.AioRpcError as failure:
            error = _typed(failure)
        except TimeoutError:
            message = f"The grammar service gave no mask for {self._answer_seconds:g} s."
            error = _gone(message, GRAMMAR_HANGS)
        except Exception:  # what it sent makes no sense: without a new stream nobody would go on
            _LOG.exception("the stream of masks failed")
            error = _gone("The grammar service gave no mask that can be read.", GRAMMAR_HANGS)
        finally:
            if writer is not None:
                writer.cancel()
            call.cancel()
            self._running = None
        self._on_lost(error)

    async def _read(self, call: _Call, clock: "_AnswerClock") -> None:
        held: dict[int, bytes] = {}
        while (response := cast(Any, await call.read())) is not grpc.aio.EOF:
            clock.answered()
            if response.states:
                self._on_states([self._expand(state, held) for state in response.states])

    async def _write(self, call: _Call, clock: "_AnswerClock") -> None:
        step = 0
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                commands, self._outbox = self._outbox, []
                configuration = None if step else self._configuration
                clock.asked()
                await call.write(
                    grammar_pb2.MasksRequest(
                        configuration=configuration, commands=commands, step=step
                    )
                )
                step += 1
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the reader sees the same failure and reports it

    def _expand(self, state: grammar_pb2.MatcherState, held: dict[int, bytes]) -> MaskState:
        if state.HasField("error"):
            return MaskState(state.matcher, error=ServiceError.from_status(state.error))
        mask = self._mask(state, held)
        ahead = tuple(self._mask(guessed, held) for guessed in state.ahead)
        return MaskState(state.matcher, tuple(state.forced), mask, state.terminated, ahead)

    def _mask(self, state: grammar_pb2.MatcherState, held: dict[int, bytes]) -> bytes | None:
        mask: bytes | None
        match state.WhichOneof("mask"):
            case "held_slot":
                mask = held[state.held_slot]
            case "allowed":
                mask = self._of_ids(state.allowed.ids)
            case "bitmask":
                mask = state.bitmask
            case _:
                mask = None
        if state.HasField("store_slot") and mask is not None:
            held[state.store_slot] = mask
        return mask

    def _of_ids(self, ids: Sequence[int]) -> bytes:
        mask = bytearray((self._configuration.vocabulary_size + 7) // 8)
        for token in ids:
            mask[token >> 3] |= 1 << (token & 7)
        return bytes(mask)


class _AnswerClock:
    """Lets a timeout run while a message has no answer. Each has one, in order."""

    def __init__(self, patience: asyncio.Timeout, seconds: float) -> None:
        self._patience = patience
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._unanswered = 0

    def asked(self) -> None:
        """A message leaves."""
        self._unanswered += 1
        if self._unanswered == 1 and not self._patience.expired():
            self._patience.reschedule(self._loop.time() + self._seconds)

    def answered(self) -> None:
        """An answer has come: the next one has as long again."""
        self._unanswered -= 1
        if not self._patience.expired():
            later = self._loop.time() + self._seconds if self._unanswered else None
            self._patience.reschedule(later)


def _gone(message: str, reason: str = "GRAMMAR_LOST") -> ServiceError:
    return ServiceError(grpc.StatusCode.UNAVAILABLE, reason, message, retry_seconds=_RETRY)


def _typed(failure: grpc.aio.AioRpcError) -> ServiceError:
    error = ServiceError.from_rpc_error(failure)
    if error.code is grpc.StatusCode.UNAVAILABLE:
        return _gone("The grammar service can't be reached; requests without a grammar are served.")
    return error
