"""Client of a model's tokenizer services: one, or several that stand for each other."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc

from services.common.logging import request_id, traceparent
from services.common.peers.losses import Losses
from services.common.peers.peer import ChannelSettings, PeerState
from services.common.peers.peer_pool import PeerPool
from services.common.peers.targets import parse_targets
from services.common.peers.waiting_room import WaitingRoom
from services.common.priority import PRIORITY_KEY, TENANT_KEY
from services.common.sharing.tenant import current_tenant
from services.http_shim.backends.output_collector import OutputCollector
from services.http_shim.backends.submission import Submission
from services.http_shim.backends.tokenizer_link import TOKENIZERS, TokenizerLink, no_service
from services.http_shim.images.kept_images import KeptImages
from services.http_shim.images.request_images import RequestImages
from tokenwire.channel_options import LOST_SECONDS
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2, models_pb2
from tokenwire.pb.tokenizer.v1 import tokenizer_pb2
from tokenwire.tls import ClientTls
from tokenwire.token_file import TokenFile

__all__ = ["Backend", "BackendSettings"]

_CALL_SECONDS = 30.0
_ADAPTER_SECONDS = 600.0
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """Certificates and token for the calls of tokenizer services, and limits on waiting for one."""

    wait_seconds: float = 60.0
    """Longest wait of a request, in seconds"""
    max_waiting: int = 1024
    """Most requests that wait; more are refused"""
    lost_seconds: float = LOST_SECONDS
    """Silence after which a service counts as lost, in seconds"""
    tls: ClientTls | None = None
    """Certificates for the calls; None = plaintext"""
    token: TokenFile | None = None
    """Token that services are shown; None = none"""
    kept_images: KeptImages = field(default_factory=KeptImages)
    """Images of the running requests of all models"""


class Backend:
    """The tokenizer services of a model. Create it on the event loop that uses it."""

    def __init__(self, targets: str, settings: BackendSettings) -> None:
        """targets: as `parse_targets` takes them; it raises StartupError. Empty = none yet."""
        self._settings = settings
        self._waiting_room = WaitingRoom(settings.max_waiting, "the model")
        channels = ChannelSettings(settings.lost_seconds, settings.tls, settings.token)
        addresses = parse_targets(targets, "--tokenizer") if targets else ()
        self._peers = PeerPool(addresses, TOKENIZERS, channels, TokenizerLink)
        self._peers.start()

    def submit(
        self,
        request: completion_pb2.GenerateRequest,
        collector: OutputCollector,
        *,
        tenant: str,
        priority: int,
        timeout: float | None = None,
        credit: int | None = None,
        images: RequestImages | None = None,
        on_admitted: Callable[[], None] = lambda: None,
    ) -> Submission:
        """Start a completion or a chat, whose events go to `collector`.

        tenant: tenant whose prefix cache the request uses.
        priority: scheduling priority, higher first.
        timeout: seconds after which the request fails; None = none.
        credit: tokens per choice that may be sent before more are granted; None = unlimited.
        images: images of the request. After admission they belong to `kept_images`.
        on_admitted: called when the request is admitted.
        """
        context = completion_pb2.RequestContext(
            request_id=request_id.get(),
            traceparent=traceparent.get(),
            tenant=tenant,
            priority=priority,
        )
        return Submission(
            self,
            request,
            context,
            collector,
            timeout=timeout,
            credit=credit,
            images=images or None,
            on_admitted=on_admitted,
        )

    @property
    def kept_images(self) -> KeptImages:
        return self._settings.kept_images

    def choose(self) -> TokenizerLink | None:
        """Return the service with the fewest open requests; None if no address is known.

        One that reports that it takes no requests is chosen only if all do, because it may wait for
        its engines. One that was lost or refuses this server comes last: its error says why.
        """
        links = [link for link in self._peers.links if link.peer.may_serve] or self._peers.links
        links = [link for link in links if link.peer.state is not PeerState.UNREADY] or links
        if not links:
            return None
        least = min(link.session.num_open for link in links)
        return random.choice([link for link in links if link.session.num_open == least])

    def suspend(self, link: TokenizerLink) -> None:
        """Stop sending requests to a service until it is ready again."""
        link.peer.suspend()

    async def wait_until_serving(self, error: ServiceError) -> None:
        """Wait until a service may serve.

        Raises `error` if that takes too long, and RESOURCE_EXHAUSTED if too many requests wait.
        """
        if self._may_serve():
            return
        with self._waiting_room.place():
            try:
                async with asyncio.timeout(self._settings.wait_seconds):
                    await self._peers.wait_until(self._may_serve)
            except TimeoutError:
                raise error from None

    async def models(self) -> list[models_pb2.Model]:
        """Return the models that a service serves."""
        request = models_pb2.ListModelsRequest()
        link = self._require_link()
        try:
            return list((await link.completion.ListModels(request, **_context())).models)
        except grpc.aio.AioRpcError as error:
            raise link.public_error(ServiceError.from_rpc_error(error)) from None

    async def status(self) -> models_pb2.ModelStatus:
        """Return the counts of the services, added up, and the loads of their engines."""
        answers = await asyncio.gather(
            *(self._status(link) for link in self._peers.links), return_exceptions=True
        )
        statuses = [each for each in answers if isinstance(each, models_pb2.ModelStatus)]
        if not statuses:
            failures = [each for each in answers if isinstance(each, BaseException)]
            raise failures[0] if failures else no_service()
        return _sum(statuses)

    async def tokenizer(self, model: str) -> tokenizer_pb2.GetTokenizerResponse:
        """Return the description of a model's tokenizer."""
        request = tokenizer_pb2.GetTokenizerRequest(model=model)
        return await self._answer(lambda link: link.tokenizer.GetTokenizer(request, **_context()))

    async def encode(self, request: tokenizer_pb2.EncodeRequest) -> tokenizer_pb2.EncodeResponse:
        """Encode text to token ids."""
        return await self._answer(lambda link: link.tokenizer.Encode(request, **_context()))

    async def decode(self, request: tokenizer_pb2.DecodeRequest) -> tokenizer_pb2.DecodeResponse:
        """Decode token ids to text."""
        return await self._answer(lambda link: link.tokenizer.Decode(request, **_context()))

    async def render(
        self, request: tokenizer_pb2.RenderChatRequest, timeout: float | None = None
    ) -> tokenizer_pb2.RenderChatResponse:
        """Render messages to their prompt. timeout: in seconds; None = the one of all calls."""
        context = _context()
        if timeout is not None:
            context["timeout"] = min(timeout, _CALL_SECONDS)
        return await self._answer(lambda link: link.tokenizer.RenderChat(request, **context))

    async def embed(
        self,
        request: completion_pb2.EmbedRequest,
        tenant: str,
        priority: int,
        timeout: float | None,
    ) -> completion_pb2.EmbedResponse:
        """Embed texts."""
        context = _context_of(tenant, priority, timeout)
        return await self._answer(lambda link: link.completion.Embed(request, **context))

    async def score(
        self,
        request: completion_pb2.ScoreRequest,
        tenant: str,
        priority: int,
        timeout: float | None,
    ) -> completion_pb2.ScoreResponse:
        """Score pairs of texts."""
        context = _context_of(tenant, priority, timeout)
        return await self._answer(lambda link: link.completion.Score(request, **context))

    async def classify(
        self,
        request: completion_pb2.ClassifyRequest,
        tenant: str,
        priority: int,
        timeout: float | None,
    ) -> completion_pb2.ClassifyResponse:
        """Sort texts into classes."""
        context = _context_of(tenant, priority, timeout)
        return await self._answer(lambda link: link.completion.Classify(request, **context))

    async def load_adapter(self, request: models_pb2.LoadAdapterRequest) -> None:
        """Load a LoRA adapter on all engines of the model."""
        context = _context() | {"timeout": _ADAPTER_SECONDS}
        await self._answer(lambda link: link.completion.LoadAdapter(request, **context))

    async def unload_adapter(self, request: models_pb2.UnloadAdapterRequest) -> None:
        """Unload a LoRA adapter from all engines of the model."""
        await self._answer(lambda link: link.completion.UnloadAdapter(request, **_context()))

    async def is_ready(self) -> bool:
        """Return whether a service accepts completions."""
        asked = [asyncio.ensure_future(link.is_ready()) for link in self._peers.links]
        try:
            for answer in asyncio.as_completed(asked):
                if await answer:
                    return True
            return False
        finally:
            for each in asked:
                each.cancel()

    async def close(self) -> None:
        """End the Sessions and abort their requests."""
        await self._peers.close()

    async def _answer(self, call: Callable[[TokenizerLink], Awaitable[Answer]]) -> Answer:
        """Return the answer of an idempotent call, which is repeated if its service was lost."""
        losses = Losses()
        while True:
            link = await self._link()
            try:
                return await call(link)
            except grpc.aio.AioRpcError as failure:
                error = link.public_error(ServiceError.from_rpc_error(failure))
            if error.code is not grpc.StatusCode.UNAVAILABLE or not losses.count():
                raise error
            self.suspend(link)
            await self.wait_until_serving(error)

    async def _link(self) -> TokenizerLink:
        """Return the service for a call. Raises ServiceError."""
        return self._require_link()

    def _may_serve(self) -> bool:
        return any(link.peer.may_serve for link in self._peers.links)

    def _require_link(self) -> TokenizerLink:
        link = self.choose()
        if link is None:
            raise no_service()
        return link

    async def _status(self, link: TokenizerLink) -> models_pb2.ModelStatus:
        call = link.completion.GetStatus(models_pb2.GetStatusRequest(), **_context())
        try:
            return (await call).models[0]
        except grpc.aio.AioRpcError as error:
            raise link.public_error(ServiceError.from_rpc_error(error)) from None


def _sum(statuses: Sequence[models_pb2.ModelStatus]) -> models_pb2.ModelStatus:
    """Return the status of services that stand for each other; their engines occur once."""
    total = models_pb2.ModelStatus()
    total.CopyFrom(max(statuses, key=lambda each: each.first_token.count))
    total.uptime_seconds = min(each.uptime_seconds for each in statuses)
    total.running_requests = sum(each.running_requests for each in statuses)
    total.prompt_tokens = sum(each.prompt_tokens for each in statuses)
    total.cached_tokens = sum(each.cached_tokens for each in statuses)
    total.completion_tokens = sum(each.completion_tokens for each in statuses)
    outcomes: Counter[str] = Counter()
    engines: dict[str, models_pb2.EngineStatus] = {}
    for status in statuses:
        outcomes.update({each.outcome: each.requests for each in status.outcomes})
        for engine in status.engines:
            engines.setdefault(engine.target, engine)
    del total.outcomes[:], total.engines[:]
    for outcome, requests in outcomes.items():
        total.outcomes.add(outcome=outcome, requests=requests)
    total.engines.extend(engines.values())
    return total


def _context_of(tenant: str, priority: int, timeout: float | None) -> dict[str, Any]:
    """Return the context of a request that engines compute. timeout: in seconds; None = none."""
    context = _context(tenant)
    if priority:
        context["metadata"].append((PRIORITY_KEY, str(priority)))
    return context | {"timeout": timeout}


def _context(tenant: str | None = None) -> dict[str, Any]:
    """Return the context of a call for a tenant; None = the one that pays for it."""
    if tenant is None:
        payer = current_tenant.get()
        tenant = payer if payer.isascii() else ""  # as metadata must be
    entries = (
        ("x-request-id", request_id.get()),
        ("traceparent", traceparent.get()),
        (TENANT_KEY, tenant),
    )
    return {"timeout": _CALL_SECONDS, "metadata": [entry for entry in entries if entry[1]]}
