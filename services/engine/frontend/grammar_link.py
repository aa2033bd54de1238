"""Connection to one grammar service: its health, its compilations, and the matchers there."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Protocol

import grpc

from services.common.background import keep_running
from services.common.peer_health import PeerHealth, Status
from services.engine.frontend.mask_stream import ANOTHER_TOKENIZER, GrammarClient, MaskStream
from tokenwire.errors import ServiceError
from tokenwire.pb.grammar.v1 import grammar_pb2
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec

__all__ = ["GrammarLink", "LinkOwner"]

_LOG = logging.getLogger("grammar_link")
_SERVICE = grammar_pb2.DESCRIPTOR.services_by_name["GrammarService"].full_name
_RETRY_SECONDS = 0.2


class LinkOwner(Protocol):
    """The pool that a link belongs to."""

    def on_changed(self, link: "GrammarLink") -> None:
        """Note that the service serves, serves no longer, or was refused."""

    def on_idle(self, link: "GrammarLink") -> None:
        """Note that no matcher is left at the service."""


class GrammarLink:
    """One grammar service, from the first mention of its address to the last."""

    def __init__(
        self,
        target: str,
        channel: grpc.aio.Channel,
        make_masks: Callable[["GrammarLink"], MaskStream],
        fingerprint: str,
    ) -> None:
        """make_masks: returns the stream of masks over `channel`.

        fingerprint: SHA-256 of the tokenizer.json that the service must have; empty = any.
        """
        self.target = target
        self.refusal = ""
        """Why the service is not used although it answers; empty = it is used"""
        self.is_serving = False
        """True if the service serves, and was not lost since it said so"""
        self.is_retired = False
        """True once its address is gone from DNS"""
        self.num_matchers = 0
        self._channel = channel
        self._grammar = GrammarClient(channel, fingerprint)
        self._health = PeerHealth(channel, _SERVICE, f"the grammar service at {target}")
        self._masks = make_masks(self)
        self._owner: LinkOwner | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def is_usable(self) -> bool:
        """True if new matchers may be opened at the service."""
        return self.is_serving and not self.refusal and not self.is_retired

    def start(self, owner: LinkOwner) -> None:
        """Follow the service's health."""
        self._owner = owner
        self._watching = keep_running("grammar_health", self._watch)

    def suspend(self) -> None:
        """Stop using the service until it reports again that it serves."""
        if self._watching is not None and self._owner is not None:
            self._watching.cancel()
            self._change(is_serving=False)
            self.start(self._owner)

    async def aclose(self) -> None:
        """End the stream of masks and the channel."""
        if self._watching is not None:
            self._watching.cancel()
        await self._masks.aclose()
        await self._channel.close()

    async def compile(self, spec: GrammarSpec, timeout: float, tenant: str) -> str:
        """Return the id of a tenant's grammar.

        timeout: seconds. Raises ServiceError: INVALID_ARGUMENT with the invalid field,
        DEADLINE_EXCEEDED, or UNAVAILABLE if the service is lost or must not be used.
        """
        try:
            return await self._grammar.compile(spec, timeout, tenant)
        except ServiceError as error:
            if error.reason == ANOTHER_TOKENIZER:
                self._refuse(f"The grammar service at {self.target} can't be used: {error.message}")
            raise

    # matchers

    def open(self, matcher: int, grammar_id: str, generated: Sequence[int]) -> None:
        """Open a matcher for a sequence that has already generated these tokens."""
        self.num_matchers += 1
        self._masks.open(matcher, grammar_id, generated)

    def accept(self, matcher: int, ids: Sequence[int], draft: Sequence[int]) -> None:
        """Feed drawn tokens, and request masks after these draft tokens with the next state."""
        self._masks.accept(matcher, ids)
        if draft:
            self._masks.ask_draft_masks(matcher, draft)

    def close(self, matcher: int) -> None:
        """Close a matcher, whether or not the service still has it."""
        self._masks.close(matcher)
        self.num_matchers -= 1
        if not self.num_matchers and self._owner is not None:
            self._owner.on_idle(self)

    # health

    async def _watch(self) -> None:
        while True:
            async with aclosing(self._health.statuses()) as statuses:
                async for status in statuses:
                    if status == Status.SERVICE_UNKNOWN:
                        self._refuse(f"The server at {self.target} is no grammar service.")
                    self._change(is_serving=status == Status.SERVING)
            self.refusal = ""  # another service may be at the address next time
            self._change(is_serving=False)
            await asyncio.sleep(_RETRY_SECONDS)

    def _refuse(self, why: str) -> None:
        if why != self.refusal:
            _LOG.error("%s", why)
            self.refusal = why
            self._notify_owner()

    def _change(self, *, is_serving: bool) -> None:
        if is_serving != self.is_serving:
            self.is_serving = is_serving
            self._notify_owner()

    def _notify_owner(self) -> None:
        if self._owner is not None:
            self._owner.on_changed(self)
