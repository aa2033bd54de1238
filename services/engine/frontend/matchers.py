"""Matchers of all constrained sequences in the grammar services, restored after a loss.

All code here runs on the event loop. A matcher's state follows from its tokens, so a lost matcher
is opened again, at any service, with the tokens that its sequence has generated.
"""

import asyncio
import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import grpc

from services.common.errors import internal_error
from services.common.peers.losses import Losses
from services.common.peers.peer import ChannelSettings, Peer
from services.common.peers.targets import parse_targets, warn_of_clear_text
from services.engine.frontend.grammar_link import GrammarLink
from services.engine.frontend.grammar_pool import GrammarPool
from services.engine.frontend.mask_stream import (
    GRAMMAR_HANGS,
    MaskState,
    MaskStream,
    lost_service,
)
from services.engine.frontend.metrics import MOVED_MATCHERS
from services.engine.messages import DraftTokens, Mask, Token
from services.engine.model.checkpoint.fingerprint import tokenizer_fingerprint
from services.engine.model_description import ModelDescription
from services.engine.settings import EngineSettings
from tokenwire.channel_options import LOST_SECONDS
from tokenwire.errors import ServiceError
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec
from tokenwire.tls import ClientTls
from tokenwire.token_file import TokenFile

__all__ = ["CompiledGrammar", "Matchers"]

_LOG = logging.getLogger("matchers")
_ANSWER_SECONDS = 10.0
"""Seconds for an answer; a service that takes longer counts as hung"""
_COMPILE_SECONDS = 20.0
"""Seconds for a compilation that another service can take over"""
_LATE = "The grammar was not compiled in time: the grammar service is busy or does not answer."
_RETRY_SECONDS = 0.1
"""Seconds between attempts to reach the service"""
_TRANSIENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar that a service has compiled."""

    grammar_id: str
    """Id of the grammar, the same at all services"""
    spec: GrammarSpec
    tenant: str
    """Tenant in whose cache the grammar is"""
    key: bytes
    """Digest of the grammar, for the choice of its service"""
    link: GrammarLink
    """Service that has compiled the grammar"""


@dataclass(slots=True, eq=False)
class _Matcher:
    """Matcher of one constrained sequence."""

    number: int
    """Number of the matcher at its service. It changes with each loss, so that answers to the lost
    matcher are recognized"""
    handle: int
    sequence: int
    grammar: CompiledGrammar
    generated: list[int]
    num_consumed: int
    """Number of tokens that the service has been fed or has forced"""
    resume_index: int | None
    """Index within the request's `resume`; None = a new sequence"""
    link: GrammarLink | None = None
    """Service at which the matcher is open; None = it waits to be opened"""
    asked_at: float | None = field(default_factory=time.monotonic)
    """time.monotonic() of the command that the service has not answered; None = it answered all"""
    mask_seconds: float = 0.0
    """Seconds that the service took to answer with masks"""
    num_answers: int = 0
    """Number of answers of the services"""
    losses: Losses = field(default_factory=Losses)
    """Losses of services that had not answered a command of this matcher"""
    draft: Sequence[int] = ()
    """Draft tokens whose masks the last command requested"""


class Matchers:
    """All matchers: they are opened here, fed with drawn tokens, and their masks passed on.

    `on_masks` gets the masks of a step; `on_failed` gets the handle and error of a failed request.
    """

    def __init__(
        self,
        targets: Sequence[str],
        *,
        vocabulary_size: int,
        eos_token_ids: Sequence[int],
        on_masks: Callable[[Sequence[Mask]], None],
        on_failed: Callable[[int, ServiceError], None],
        fingerprint: str = "",
        lost_seconds: float = LOST_SECONDS,
        wait_seconds: float = 60.0,
        tls: ClientTls | None = None,
        token: TokenFile | None = None,
    ) -> None:
        """targets: targets of the grammar services, from `parse_targets`.

        fingerprint: SHA-256 of the tokenizer.json that the services must have; empty = any.
        wait_seconds: seconds that constrained requests wait for a lost grammar service.
        """
        self._wait_seconds = wait_seconds
        self._fingerprint = fingerprint
        self._vocabulary_size = vocabulary_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._on_masks = on_masks
        self._on_failed = on_failed
        self._numbers = itertools.count(1)
        self._matchers: dict[int, _Matcher] = {}
        """Matchers by number"""
        self._by_sequence: dict[tuple[int, int], _Matcher] = {}
        """Matchers by handle and sequence"""
        self._restoring: dict[str, asyncio.Task[None]] = {}
        """Running compilations for waiting matchers, by grammar id"""
        channels = ChannelSettings(lost_seconds, tls, token)
        self._pool = GrammarPool(targets, channels, self._open_link, self._on_leaving)

    @classmethod
    def start_for(
        cls,
        settings: EngineSettings,
        model: ModelDescription,
        on_masks: Callable[[Sequence[Mask]], None],
        on_failed: Callable[[int, ServiceError], None],
    ) -> "Matchers | None":
        """Return the matchers of a loaded model, or None if the engine has no grammar service.

        Raises StartupError for targets that are none.
        """
        if not settings.grammar:
            return None
        targets = parse_targets(settings.grammar, "--grammar")
        warn_of_clear_text(targets, settings)
        return cls(
            targets,
            vocabulary_size=model.vocabulary_size,
            eos_token_ids=model.eos_token_ids,
            on_masks=on_masks,
            on_failed=on_failed,
            fingerprint=tokenizer_fingerprint(settings.model),
            lost_seconds=settings.lost_seconds,
            wait_seconds=settings.grammar_wait,
            tls=settings.peer_tls,
            token=settings.peer_token,
        )

    async def compile(self, spec: GrammarSpec, tenant: str = "") -> CompiledGrammar:
        """Compile a tenant's grammar at the service that should have its sequences.

        Waits until a service serves. Raises ServiceError for a refused grammar, and if no service
        compiles the grammar in time.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._wait_seconds
        content = spec.SerializeToString(deterministic=True)
        key = hashlib.blake2b(content, digest_size=16).digest()
        tried: set[GrammarLink] = set()
        busy: ServiceError | None = None
        while True:
            link = await self._pool.wait_and_choose(key, deadline, tried)
            tried.add(link)
            has_other = self._pool.has_other(tried)
            left = deadline - loop.time()
            try:
                timeout = min(left, _COMPILE_SECONDS) if has_other else left
                grammar_id = await link.compile(spec, timeout, tenant)
                return CompiledGrammar(grammar_id, spec, tenant, key, link)
            except ServiceError as error:
                if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    busy = error
                elif error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
                    if busy is not None:  # the service answers, so grammars of others took the time
                        raise busy from None
                    link.peer.suspend()
                    error = lost_service(_LATE)
                if error.code not in _TRANSIENT or loop.time() + _RETRY_SECONDS >= deadline:
                    raise error from None
            if not has_other:
                tried.clear()
                await asyncio.sleep(_RETRY_SECONDS)

    def open(
        self,
        handle: int,
        count: int,
        grammar: CompiledGrammar,
        generated: Mapping[int, Sequence[int]],
    ) -> None:
        """Open matchers for the sequences of a request.

        generated: tokens of resumed sequences, in the order of the request's `resume`.
        """
        resume_indices = {sequence: index for index, sequence in enumerate(generated)}
        elsewhere = []
        for sequence in range(count):
            tokens = list(generated.get(sequence, ()))
            matcher = _Matcher(
                next(self._numbers),
                handle,
                sequence,
                grammar,
                tokens,
                len(tokens),
                resume_indices.get(sequence),
            )
            self._matchers[matcher.number] = matcher
            self._by_sequence[handle, sequence] = matcher
            if self._pool.choose(grammar.key) is grammar.link:
                self._open(matcher, grammar.link)
            else:
                elsewhere.append(matcher)
        self._restore(elsewhere)

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
        self._detach(matcher)
        return matcher.mask_seconds

    async def aclose(self) -> None:
        """End the streams of masks and the channels."""
        tasks = list(self._restoring.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._pool.aclose()

    def _open_link(self, peer: Peer) -> GrammarLink:
        def masks(link: GrammarLink) -> MaskStream:
            return MaskStream(
                peer.channel,
                vocabulary_size=self._vocabulary_size,
                eos_token_ids=tuple(self._eos_token_ids),
                on_states=self._on_states,
                on_lost=lambda error: self._on_lost(link, error),
                answer_seconds=_ANSWER_SECONDS,
            )

        return GrammarLink(peer, masks, self._fingerprint)

    def _on_states(self, states: Sequence[MaskState]) -> None:
        masks: list[Mask] = []
        now = time.monotonic()
        for state in states:
            matcher = self._matchers.get(state.matcher)
            if matcher is None:
                continue  # the sequence has ended, or moved to another service
            if matcher.asked_at is not None:
                matcher.mask_seconds += now - matcher.asked_at
                matcher.asked_at = None
            if state.error is None:
                matcher.num_answers += 1
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
            elif state.error.reason == "GRAMMAR_NOT_FOUND" and _may_continue(matcher):
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
        if not unconsumed or matcher.asked_at is not None or matcher.link is None:
            return
        matcher.num_consumed = len(matcher.generated)
        if unconsumed[-1] in self._eos_token_ids:
            return
        matcher.asked_at, matcher.draft = time.monotonic(), draft
        matcher.link.accept(matcher.number, unconsumed, draft)

    def _on_lost(self, link: GrammarLink, error: ServiceError) -> None:
        """Open the matchers of a lost stream again, except those that may be the cause."""
        lost = [matcher for matcher in self._matchers.values() if matcher.link is link]
        failed = [each for each in lost if each.asked_at is not None and not _may_continue(each)]
        self._restore([matcher for matcher in lost if matcher not in failed])
        if error.reason == GRAMMAR_HANGS:
            link.peer.suspend()
        for matcher in failed:
            self._on_failed(matcher.handle, error)

    def _on_leaving(self, link: GrammarLink) -> None:
        """Move the matchers of a service that stops, is lost or is gone from DNS."""
        self._restore([matcher for matcher in self._matchers.values() if matcher.link is link])

    def _open(self, matcher: _Matcher, link: GrammarLink) -> None:
        matcher.link = link
        matcher.asked_at = time.monotonic()
        matcher.num_consumed = len(matcher.generated)
        link.open_matcher(matcher.number, matcher.grammar.grammar_id, matcher.generated)

    def _detach(self, matcher: _Matcher) -> None:
        """Close a matcher if it is open."""
        link, matcher.link = matcher.link, None
        if link is not None:
            link.close_matcher(matcher.number)

    def _restore(self, matchers: Sequence[_Matcher]) -> None:
        """Compile the grammars of these matchers at their services, and open the matchers there."""
        for matcher in matchers:
            if matcher.link is not None:
                MOVED_MATCHERS.inc()
                self._detach(matcher)
                del self._matchers[matcher.number]
                matcher.number = next(self._numbers)
                self._matchers[matcher.number] = matcher
            grammar = matcher.grammar
            if grammar.grammar_id not in self._restoring:
                self._restoring[grammar.grammar_id] = asyncio.ensure_future(
                    self._restore_grammar(grammar)
                )

    async def _restore_grammar(self, grammar: CompiledGrammar) -> None:
        """Open the waiting matchers of a grammar. Services take their shares one by one."""
        failure: ServiceError | None = None
        waiting: list[_Matcher] = []
        try:
            while waiting := self._waiting(grammar.grammar_id):
                compiled = await self.compile(grammar.spec, grammar.tenant)
                self._open(waiting[0], compiled.link)
                for matcher in waiting[1:]:
                    if self._pool.choose(grammar.key) is compiled.link:
                        self._open(matcher, compiled.link)
        except ServiceError as error:
            failure = error
        except Exception:  # the sequences would wait for ever
            _LOG.exception("a grammar could not be restored")
            failure = internal_error()
        finally:
            del self._restoring[grammar.grammar_id]
        if failure is not None:
            for matcher in self._waiting(grammar.grammar_id):
                self._on_failed(matcher.handle, failure)

    def _waiting(self, grammar_id: str) -> list[_Matcher]:
        """Return the matchers of a grammar that are open at no service."""
        matchers = self._matchers.values()
        return [
            each for each in matchers if each.link is None and each.grammar.grammar_id == grammar_id
        ]


def _may_continue(matcher: _Matcher) -> bool:
    """Count a loss. Return False for a matcher that may be the cause: it stays closed."""
    return matcher.losses.count(matcher.num_answers)


def _name_field(matcher: _Matcher, error: ServiceError) -> None:
    """Replace a field of the grammar service's command by the field of the client's request."""
    if error.field.startswith("commands"):
        refused = error.reason == "TOKEN_REFUSED" and matcher.resume_index is not None
        error.field = f"resume[{matcher.resume_index}].generated.ids" if refused else ""
