"""Queue of the events for one client; the tokens of a sequence are merged into deltas."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from services.engine.frontend.events import add_scores
from services.engine.messages import Token
from tokenwire.pb.engine.v1.engine_pb2 import GenerateResponse, OutputDelta, SessionEvent

__all__ = ["EventQueue"]

_PACE_SECONDS = 0.001
"""Shortest time between messages that only continue sequences, times the number of sequences in
them. Tokens of short steps are merged: each message costs CPU time in every service on its way"""
_LEAST_PACE_SECONDS = 0.003
"""Shortest pace of a message: with longer steps, a single stream gets its tokens one by one"""
_MOST_PACE_SECONDS = 0.024
"""Longest pace of a message, as long as a frame of a film: a reader does not notice it"""


E = TypeVar("E", bound=GenerateResponse | SessionEvent)


class EventQueue(Generic[E]):
    """Events in order. The credit of the sequences bounds their number.

    A token that continues a sequence may wait for the next step's token. Any other event ends the
    wait.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: list[E] = []
        self._deltas: dict[tuple[int, int], OutputDelta] = {}
        """Deltas in `_events`, by handle and sequence"""
        self._wake = asyncio.Event()
        self._taken_at = 0.0
        """Event loop time of the last `take`"""
        self._taken_sequences = 0
        """Sequences with tokens in the last `take`"""
        self._pace: asyncio.TimerHandle | None = None
        """Timer that sends waiting tokens if no step follows"""
        self._silent_at = 0.0
        """Event loop time at which the present `take` returns without events"""
        self._silence: asyncio.TimerHandle | None = None
        """One shared timer that ends a silent wait, rescheduled for later waits"""
        self._sending_since: float | None = None
        """Event loop time since which the client has not taken a message"""

    def put(self, event: E) -> None:
        self._events.append(event)
        self._wake.set()

    def put_token(self, handle: int, token: Token, make: Callable[[], E]) -> None:
        """Add a token to the sequence's waiting delta, or to a new event from `make`."""
        delta = self._deltas.get((handle, token.sequence))
        if delta is None:
            event = make()
            delta = event.delta  # reading it creates an empty one
            delta.sequence = token.sequence
            delta.position = token.position
            self._deltas[handle, token.sequence] = delta
            self._events.append(event)
        delta.tokens.ids.append(token.id)
        if token.score is not None:
            add_scores(delta.tokens, [token.score])
        if token.mirostat_mu is not None:
            delta.mirostat_mu = token.mirostat_mu
        sequences = max(len(self._deltas), self._taken_sequences)
        pace = min(max(sequences * _PACE_SECONDS, _LEAST_PACE_SECONDS), _MOST_PACE_SECONDS)
        if token.position == 0 or self._loop.time() - self._taken_at >= pace:
            self._wake.set()
        elif self._pace is None:
            self._pace = self._loop.call_later(pace, self._wake.set)

    async def take(self, timeout: float) -> list[E]:
        """Return all events once one is due, or after `timeout` seconds, even if there are none."""
        self._silent_at = self._loop.time() + timeout
        if self._silence is None:
            self._silence = self._loop.call_later(timeout, self._end_silence)
        await self._wake.wait()
        self._wake.clear()
        self._taken_at = self._loop.time()
        if self._pace is not None:
            self._pace.cancel()
            self._pace = None
        events, self._events = self._events, []
        self._taken_sequences = len(self._deltas)
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
        """Time for which the client has not taken the present message; 0 without one."""
        since = self._sending_since
        return 0.0 if since is None else self._loop.time() - since

    @property
    def pending(self) -> bool:
        return bool(self._events)

    def clear(self) -> None:
        """Drop all events and end the present `take`."""
        self._events.clear()
        self._deltas.clear()
        self._wake.set()

    def wake(self) -> None:
        """End the present `take`, even without events."""
        self._wake.set()

    def close(self) -> None:
        """Stop the timer, after the last `take`."""
        if self._silence is not None:
            self._silence.cancel()

    def begin_send(self) -> None:
        """Record that a message goes to the client's stream, which may have no room."""
        self._sending_since = self._loop.time()

    def end_send(self) -> None:
        """Record that the stream has taken the message."""
        self._sending_since = None
