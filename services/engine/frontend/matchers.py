"""Matchers of all constrained sequences in the grammar service, restored after a loss.

All of it runs on the event loop. A matcher's state follows from its tokens: a lost matcher is
opened again, there or at another replica, with the tokens that its sequence has generated.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import grpc

from services.engine.frontend.mask_stream import GRAMMAR_HANGS, GrammarClient, MaskState, MaskStream
from services.engine.messages import DraftTokens, Mask, Token
from tokenwire.channel import LOST_SECONDS, connect
from tokenwire.errors import ServiceError
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec
from tokenwire.tls import ClientTls

__all__ = ["Matchers"]

_ANSWER_SECONDS = 10.0
"""Time limit of an answer; a service that takes longer counts as hanging"""
_RETRY_SECONDS = 0.1
"""Time between attempts to reach the service"""
_MAX_RESTORES = 3
"""Times that a sequence may lose its grammar or meet a hanging service"""
_TRANSIENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)


@dataclass(slots=True, eq=False)
class _Matcher:
    """Matcher of one constrained sequence."""

    number: int
    handle: int
    sequence: int
    grammar_id: str
    spec: GrammarSpec
    generated: list[int]
    num_consumed: int
    """Tokens that the service has been fed or has forced"""
    resume_index: int | None
    """Index within the request's `resume`; None = a new sequence"""
    is_open: bool = True
    """False while the matcher waits to be opened again"""
    asked_at: float | None = field(default_factory=time.monotonic)
    """time.monotonic() of the command that the service has not answered; None = it has"""
    mask_seconds: float = 0.0
    """Time that the answers took"""
    restores: int = 0
    draft: Sequence[int] = ()
    """Draft tokens whose masks the last command requested"""


class Matchers:
    """Opens matchers, feeds them drawn tokens, and hands their masks on.

    `on_masks` gets the masks of a step; `on_failed` gets the handle and error of a failed request.
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
        tls: ClientTls | None = None,
    ) -> None:
        """wait_seconds: time limit of constrained requests that wait for a lost grammar service."""
        self._wait_seconds = wait_seconds
        self._channel = connect(target, lost_seconds, tls)
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
        """By matcher number"""
        self._by_sequence: dict[tuple[int, int], _Matcher] = {}
        """By handle and sequence"""
        self._restoring: dict[str, asyncio.Task[None]] = {}
        """Running compilations of lost grammars, by grammar id"""

    async def compile(self, spec: GrammarSpec) -> str:
        """Return the grammar's id, once the service is reachable.

        Raises ServiceError, also when no service compiles the grammar in time.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._wait_seconds
        while True:
            try:
                return await self._grammar.compile(spec, deadline - loop.time(), waits=True)
            except ServiceError as error:
                if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
                    message = "The grammar service is unreachable or does not answer."
                    code = grpc.StatusCode.UNAVAILABLE
                    raise ServiceError(code, "GRAMMAR_LOST", message, retry_seconds=1) from None
                if error.code not in _TRANSIENT or loop.time() + _RETRY_SECONDS >= deadline:
                    raise
            await asyncio.sleep(_RETRY_SECONDS)

    def open(
        self,
        handle: int,
        count: int,
        grammar_id: str,
        spec: GrammarSpec,
        generated: Mapping[int, Sequence[int]],
    ) -> None:
        """Open matchers for the sequences of a request.

        generated: tokens of resumed sequences, in the order of the request's `resume`.
        """
        resume_indices = {sequence: index for index, sequence in enumerate(generated)}
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
                resume_indices.get(sequence),
            )
            self._matchers[matcher.number] = matcher
            self._by_sequence[handle, sequence] = matcher
            self._masks.open(matcher.number, grammar_id, tokens)

    def feed(self, outputs: Iterable[Token | DraftTokens]) -> None:
        """Feed the tokens of a step, and request masks for its draft tokens."""
        drafts: dict[_Matcher, Sequence[int]] = {}
        for output in outputs:
            matcher = self._by_sequence.get((output.handle, output.sequence))
            if matcher is None:
                continue
            drafts.setdefault(matcher, ())
            if isinstance(output, Token):
                matcher.generated.append(output.id)
            else:
                drafts[matcher] = output.ids
        for matcher, draft in drafts.items():
            self._catch_up(matcher, draft)

    def close(self, handle: int, sequence: int) -> float:
        """Close the matcher of a sequence. Returns the seconds that its masks took."""
        matcher = self._by_sequence.pop((handle, sequence), None)
        if matcher is None:
            return 0.0
        del self._matchers[matcher.number]
        if matcher.is_open:
            self._masks.close(matcher.number)
        return matcher.mask_seconds

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
        now = time.monotonic()
        for state in states:
            matcher = self._matchers.get(state.matcher)
            if matcher is None:
                continue  # the sequence has ended in the meantime
            if matcher.asked_at is not None:
                matcher.mask_seconds += now - matcher.asked_at
                matcher.asked_at = None
            if state.error is None:
                draft, matcher.draft = matcher.draft[len(state.forced) :], ()
                masks.append(
                    Mask(
                        matcher.handle,
                        matcher.sequence,
                        matcher.num_consumed,
                        state.forced,
                        state.mask,
                        state.terminated,
                        list(zip(draft, state.draft_masks, strict=False)),
                    )
                )
                matcher.num_consumed += len(state.forced)
                self._catch_up(matcher)
            elif state.error.reason == "GRAMMAR_NOT_FOUND" and matcher.restores < _MAX_RESTORES:
                matcher.restores += 1
                self._restore([matcher])
            else:
                _name_field(matcher, state.error)
                self._on_failed(matcher.handle, state.error)
        if masks:
            self._on_masks(masks)

    def _catch_up(self, matcher: _Matcher, draft: Sequence[int] = ()) -> None:
        """Feed the tokens that the service has not consumed, once it has answered.

        The pending answer may force some of these tokens, which the service has then consumed.
        """
        unconsumed = matcher.generated[matcher.num_consumed :]
        if not unconsumed or matcher.asked_at is not None or not matcher.is_open:
            return
        matcher.num_consumed = len(matcher.generated)
        if unconsumed[-1] in self._eos_token_ids:
            return
        matcher.asked_at, matcher.draft = time.monotonic(), draft
        self._masks.accept(matcher.number, unconsumed)
        if draft:
            self._masks.ask_draft_masks(matcher.number, draft)

    def _on_lost(self, error: ServiceError) -> None:
        lost = [matcher for matcher in self._matchers.values() if matcher.is_open]
        if error.reason == GRAMMAR_HANGS:
            for matcher in [each for each in lost if each.asked_at is not None]:
                matcher.restores += 1
                if matcher.restores > _MAX_RESTORES:
                    lost.remove(matcher)
                    matcher.is_open = False
                    self._on_failed(matcher.handle, error)
        self._restore([matcher for matcher in lost if matcher.number in self._matchers])

    def _restore(self, matchers: Sequence[_Matcher]) -> None:
        """Compile the grammars of lost matchers, and then open the matchers again."""
        for matcher in matchers:
            matcher.is_open = False
            if matcher.grammar_id not in self._restoring:
                self._restoring[matcher.grammar_id] = asyncio.ensure_future(
                    self._restore_grammar(matcher.grammar_id, matcher.spec)
                )

    async def _restore_grammar(self, grammar_id: str, spec: GrammarSpec) -> None:
        failure: ServiceError | None = None
        try:
            await self.compile(spec)
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
                matcher.is_open, matcher.asked_at = True, time.monotonic()
                matcher.num_consumed = len(matcher.generated)
                self._masks.open(matcher.number, grammar_id, matcher.generated)


def _name_field(matcher: _Matcher, error: ServiceError) -> None:
    """Replace the field of a grammar service command by the client's field."""
    if error.field.startswith("commands"):
        refused = error.reason == "TOKEN_REFUSED" and matcher.resume_index is not None
        error.field = f"resume[{matcher.resume_index}].generated.ids" if refused else ""
