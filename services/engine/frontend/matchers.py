"""Every constrained sequence's matcher in the grammar service, kept through losses of it.

Everything here runs on the event loop. Tokens are the state: a matcher that is lost is opened
again, there or at another replica, with what its sequence has generated, and goes on as before.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import grpc

from services.engine.frontend.mask_stream import GRAMMAR_HANGS, GrammarClient, MaskState, MaskStream
from services.engine.messages import Guessed, Mask, Token
from tokenwire.channel import LOST_SECONDS, connect
from tokenwire.errors import ServiceError
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec

__all__ = ["Matchers"]

_ANSWER_SECONDS = 10.0
"""How long the answer to a step may take; a service that takes longer hangs"""
_PAUSE = 0.1
"""Seconds between attempts to reach it"""
_MOST_RETURNS = 3
"""Times that a sequence may find its grammar gone, or its service hanging"""
_TRANSIENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)


@dataclass(slots=True, eq=False)
class _Matcher:
    """One constrained sequence."""

    number: int
    handle: int
    sequence: int
    grammar_id: str
    spec: GrammarSpec
    generated: list[int]
    known: int
    """Tokens that the service has been fed, or has forced"""
    resumed: int | None
    """Its place among the sequences of its request that go on with tokens from elsewhere"""
    is_open: bool = True
    """Whether the service has it; if not, it will be opened again"""
    is_asked: bool = True
    """Whether the service has yet to answer what it was told last"""
    returns: int = 0
    guesses: Sequence[int] = ()
    """What it was asked along with that"""


class Matchers:
    """Opens matchers, feeds them what was drawn, and hands on what may follow.

    `on_masks` gets the masks of a step; `on_failed` a request that can't go on, by its handle.
    """

    def __init__(
        self,
        target: str,
        *,
        vocabulary_size: int,
        eos_token_ids: Sequence[int],
        on_masks: Callable[[Sequence[Mask]], None],
        on_failed: Callable[[int, ServiceError], None],
        lost_seconds: float = LOST_SECONDS,
        wait_seconds: float = 60.0,
    ) -> None:
        """wait_seconds: how long constrained requests wait for a grammar service that is lost."""
        self._wait_seconds = wait_seconds
        self._channel = connect(target, lost_seconds)
        self._grammar = GrammarClient(self._channel)
        self._masks = MaskStream(
            self._channel,
            vocabulary_size=vocabulary_size,
            eos_token_ids=eos_token_ids,
            on_states=self._on_states,
            on_lost=self._on_lost,
            answer_seconds=_ANSWER_SECONDS,
        )
        self._eos_token_ids = frozenset(eos_token_ids)
        self._on_masks = on_masks
        self._on_failed = on_failed
        self._numbers = itertools.count(1)
        self._matchers: dict[int, _Matcher] = {}
        self._places: dict[tuple[int, int], _Matcher] = {}
        """By handle and sequence"""
        self._restoring: dict[str, asyncio.Task[None]] = {}
        """By grammar"""

    async def compile(self, spec: GrammarSpec) -> str:
        """Return the grammar's id. A service that is not there is waited for, as those do that run.

        Raises ServiceError.
        """
        return await self._compile(spec)

    def open(
        self,
        handle: int,
        count: int,
        grammar_id: str,
        spec: GrammarSpec,
        generated: Mapping[int, Sequence[int]],
    ) -> None:
        """Make matchers for the sequences of a request; some may have generated tokens already, in
        the order in which the request names them."""
        places = {sequence: place for place, sequence in enumerate(generated)}
        for sequence in range(count):
            tokens = list(generated.get(sequence, ()))
            matcher = _Matcher(
                next(self._numbers),
                handle,
                sequence,
                grammar_id,
                spec,
                tokens,
                len(tokens),
                places.get(sequence),
            )
            self._matchers[matcher.number] = matcher
            self._places[handle, sequence] = matcher
            self._masks.open(matcher.number, grammar_id, tokens)

    def feed(self, outputs: Iterable[Token | Guessed]) -> None:
        """Tell what sequences generated in a step, and what they guess; masks will be handed on."""
        fed: dict[_Matcher, Sequence[int]] = {}
        for output in outputs:
            matcher = self._places.get((output.handle, output.sequence))
            if matcher is None:
                continue
            fed.setdefault(matcher, ())
            if isinstance(output, Token):
                matcher.generated.append(output.id)
            else:
                fed[matcher] = output.ids
        for matcher, guesses in fed.items():
            self._catch_up(matcher, guesses)

    def close(self, handle: int, sequence: int) -> None:
        """Forget a sequence."""
        matcher = self._places.pop((handle, sequence), None)
        if matcher is not None:
            del self._matchers[matcher.number]
            if matcher.is_open:
                self._masks.close(matcher.number)

    async def aclose(self) -> None:
        """End the stream of masks and the channel."""
        tasks = list(self._restoring.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._masks.aclose()
        await self._channel.close()

    def _on_states(self, states: Sequence[MaskState]) -> None:
        masks: list[Mask] = []
        for state in states:
            matcher = self._matchers.get(state.matcher)
            if matcher is None:
                continue  # its sequence ended while this was under way
            matcher.is_asked = False
            if state.error is None:
                guesses, matcher.guesses = matcher.guesses[len(state.forced) :], ()
                masks.append(
                    Mask(
                        matcher.handle,
                        matcher.sequence,
                        matcher.known,
                        state.forced,
                        state.mask,
                        state.terminated,
                        list(zip(guesses, state.ahead, strict=False)),
                    )
                )
                matcher.known += len(state.forced)
                self._catch_up(matcher)
            elif state.error.reason == "GRAMMAR_NOT_FOUND" and matcher.returns < _MOST_RETURNS:
                matcher.returns += 1
                self._restore([matcher])
            else:
                _blame(matcher, state.error)
                self._on_failed(matcher.handle, state.error)
        if masks:
            self._on_masks(masks)

    def _catch_up(self, matcher: _Matcher, guesses: Sequence[int] = ()) -> None:
        """Feed what the service has not seen, but not while it still answers what came before.

        It may force tokens in that answer, and then has seen them.
        """
        unseen = matcher.generated[matcher.known :]
        if not unseen or matcher.is_asked or not matcher.is_open:
            return
        matcher.known = len(matcher.generated)
        if unseen[-1] in self._eos_token_ids:
            return
        matcher.is_asked, matcher.guesses = True, guesses
        self._masks.accept(matcher.number, unseen)
        if guesses:
            self._masks.ask_ahead(matcher.number, guesses)

    def _on_lost(self, error: ServiceError) -> None:
        lost = [matcher for matcher in self._matchers.values() if matcher.is_open]
        if error.reason == GRAMMAR_HANGS:
            for matcher in [each for each in lost if each.is_asked]:
                matcher.returns += 1
                if matcher.returns > _MOST_RETURNS:
                    lost.remove(matcher)
                    matcher.is_open = False
                    self._on_failed(matcher.handle, error)
        self._restore([matcher for matcher in lost if matcher.number in self._matchers])

    def _restore(self, matchers: Sequence[_Matcher]) -> None:
        """Open matchers again that the service has forgotten, once their grammars are compiled."""
        for matcher in matchers:
            matcher.is_open = False
            if matcher.grammar_id not in self._restoring:
                self._restoring[matcher.grammar_id] = asyncio.ensure_future(
                    self._restore_grammar(matcher.grammar_id, matcher.spec)
                )

    async def _restore_grammar(self, grammar_id: str, spec: GrammarSpec) -> None:
        failure: ServiceError | None = None
        try:
            await self._compile(spec)
        except ServiceError as error:
            failure = error
        finally:
            del self._restoring[grammar_id]
        for matcher in list(self._matchers.values()):
            if matcher.grammar_id != grammar_id or matcher.is_open:
                continue
            if failure is not None:
                self._on_failed(matcher.handle, failure)
            else:
                matcher.is_open = matcher.is_asked = True
                matcher.known = len(matcher.generated)
                self._masks.open(matcher.number, grammar_id, matcher.generated)

    async def _compile(self, spec: GrammarSpec) -> str:
        """Raises ServiceError if no service does it in time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._wait_seconds
        while True:
            try:
                return await self._grammar.compile(spec, deadline - loop.time(), waits=True)
            except ServiceError as error:
                if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
                    message = "The grammar service can't be reached, or does not answer."
                    code = grpc.StatusCode.UNAVAILABLE
                    raise ServiceError(code, "GRAMMAR_LOST", message, retry_seconds=1) from None
                if error.code not in _TRANSIENT or loop.time() + _PAUSE >= deadline:
                    raise
            await asyncio.sleep(_PAUSE)


def _blame(matcher: _Matcher, error: ServiceError) -> None:
    """Name the field that the client knows; the commands to the grammar service are ours."""
    if error.field.startswith("commands"):
        refused = error.reason == "TOKEN_REFUSED" and matcher.resumed is not None
        error.field = f"resume[{matcher.resumed}].generated.ids" if refused else ""
