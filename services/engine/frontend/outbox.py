"""What waits to be sent to one client. Deltas of a sequence merge until the client takes them."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from services.engine.messages import Score, Token
from tokenwire.pb.engine.v1.engine_pb2 import OutputDelta
from tokenwire.pb.types.v1.types_pb2 import TokenColumns

__all__ = ["Event", "Outbox", "add_scores"]

_PACE_SECONDS = 0.008
"""Least time between messages that only continue sequences: too short for a reader to notice. Where
steps are shorter, the tokens of several go together: each message costs CPU time in every
service up to the client"""


class Event(Protocol):
    """SessionEvent or GenerateResponse: both name their events alike."""

    @property
    def delta(self) -> OutputDelta:
        """The delta, made when it is first written to."""


E = TypeVar("E", bound=Event)


class Outbox(Generic[E]):
    """Events in order, bounded by what sequences may generate.

    A token that only continues a sequence may wait a little for the next step's; whatever else
    comes takes it along.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: list[E] = []
        self._deltas: dict[tuple[int, int], OutputDelta] = {}
        self._wake = asyncio.Event()
        self._taken_at = 0.0  # in the loop's time
        self._pause: asyncio.TimerHandle | None = None
        """Ends the wait of tokens for a further step, if none comes"""
        self._silent_at = 0.0  # in the loop's time
        self._silence: asyncio.TimerHandle | None = None
        """Looks whether it is as late as that: one timer for many waits"""
        self._sending_since: float | None = None
        """In the loop's time: since when the client has not taken the message that it is sent"""

    def put(self, event: E) -> None:
        """Add an event."""
        self._events.append(event)
        self._wake.set()

    def put_token(self, handle: int, token: Token, make: Callable[[], E]) -> None:
        """Add a token: to the delta that still waits, or to a new one in an event from `make`."""
        delta = self._deltas.get((handle, token.sequence))
        if delta is None:
            event = make()
            delta = event.delta
            delta.sequence = token.sequence
            delta.position = token.position
            self._deltas[handle, token.sequence] = delta
            self._events.append(event)
        delta.tokens.ids.append(token.id)
        if token.score is not None:
            add_scores(delta.tokens, [token.score])
        if token.mirostat_mu is not None:
            delta.mirostat_mu = token.mirostat_mu
        if token.position == 0 or self._loop.time() - self._taken_at >= _PACE_SECONDS:
            self._wake.set()
        elif self._pause is None:
            self._pause = self._loop.call_later(_PACE_SECONDS, self._wake.set)

    async def take(self, timeout: float) -> list[E]:
        """All events, once there are any that should not wait; what there is after `timeout`
        seconds of silence."""
        self._silent_at = self._loop.time() + timeout
        if self._silence is None:
            self._silence = self._loop.call_later(timeout, self._end_silence)
        await self._wake.wait()
        self._wake.clear()
        self._taken_at = self._loop.time()
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        events, self._events = self._events, []
        self._deltas.clear()
        return events

    def _end_silence(self) -> None:
        left = self._silent_at - self._loop.time()
        if left > 0:
            self._silence = self._loop.call_later(left, self._end_silence)
        else:
            self._silence = None
            self._wake.set()

    @property
    def sending_seconds(self) -> float:
        """How long the client has left a message untaken; 0 where none is being sent."""
        since = self._sending_since
        return 0.0 if since is None else self._loop.time() - since

    @property
    def pending(self) -> bool:
        """Whether events wait."""
        return bool(self._events)

    def clear(self) -> None:
        """Drop what waits."""
        self._events.clear()
        self._deltas.clear()
        self._wake.set()

    def wake(self) -> None:
        """Let `take` return, though there may be nothing to take."""
        self._wake.set()

    def close(self) -> None:
        """Nothing more is taken."""
        if self._silence is not None:
            self._silence.cancel()

    def sending(self) -> None:
        """The client's stream is given a message, for which there may be no room."""
        self._sending_since = self._loop.time()

    def sent(self) -> None:
        """It took the message."""
        self._sending_since = None


def add_scores(columns: TokenColumns, scores: Sequence[Score]) -> None:
    """Append scores to the columns."""
    for score in scores:
        columns.logprobs.append(score.logprob)
        columns.ranks.append(score.rank)
        columns.top_width = len(score.top_ids)
        columns.top_ids.extend(score.top_ids)
        columns.top_logprobs.extend(score.top_logprobs)
