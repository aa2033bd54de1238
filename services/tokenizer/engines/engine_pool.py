"""The engines of one model: their state, their common limits, and the choice of an engine."""

import asyncio
import hashlib
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import grpc

from services.common.contract import MAX_CHAT_LOGPROBS
from services.common.peers.peer import RETRY_SECONDS, ChannelSettings, Peer, PeerRefusedError
from services.common.peers.peer_pool import PeerPool
from services.common.peers.waiting_room import WaitingRoom
from services.common.settings import StartupError
from services.tokenizer import metrics
from services.tokenizer.engines.engine_link import ENGINES, EngineLink
from services.tokenizer.engines.engine_load import EngineLoad
from services.tokenizer.engines.known_blocks import KnownBlocks
from services.tokenizer.engines.placement import Need, Placement
from services.tokenizer.model_limits import ModelLimits
from services.tokenizer.text.vocabulary import Vocabulary
from tokenwire.channel_options import LOST_SECONDS
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import models_pb2
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.tls import ClientTls
from tokenwire.token_file import TokenFile

__all__ = ["EnginePool", "PoolSettings"]

_LEAVE_SECONDS = 0.25
_AGREED = (
    "weights_fingerprint",
    "dtype",
    "weights",
    "architecture",
    "vocabulary_size",
    "vector_width",
)
"""Fields of GetModelResponse in which the engines of a model agree"""
_SEQUENCE_TOKENS = 16
"""Prompt tokens that cost an engine about as much as one more sequence in its steps"""


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Addresses of the engines, and this service's own limits."""

    targets: Sequence[str]
    model: str
    max_logprobs: int
    max_stop_strings: int
    appends_suffix: bool
    wait_seconds: float
    """Seconds that requests wait for an engine that stops or was lost; its loading is excluded."""
    lost_seconds: float = LOST_SECONDS
    """Seconds of silence after which an engine is lost"""
    max_waiting: int = 1024
    """New requests that may wait for an engine"""
    tls: ClientTls | None = None
    """Certificates for the calls of engines; None = plaintext"""
    token: TokenFile | None = None
    """Token to show to engines; None = no token"""
    knows_blocks: bool = False
    """True if the pool keeps the token ids of the engines' KV blocks for subscribers"""


class EnginePool:
    """All engines of the model."""

    def __init__(
        self, settings: PoolSettings, vocabulary: Vocabulary, on_serving: Callable[[bool], None]
    ) -> None:
        """on_serving: called when the first engine begins to serve, and when the last one stops."""
        self._settings = settings
        self._vocabulary = vocabulary
        self._on_serving = on_serving
        self._on_leaving: Callable[[EngineLink], None] = lambda _: None
        self._was_serving = False
        self._limits: ModelLimits | None = None
        self._peers = PeerPool(
            settings.targets,
            ENGINES,
            ChannelSettings(settings.lost_seconds, settings.tls, settings.token),
            self._open_link,
            on_changed=self._on_changed,
            on_leaving=lambda link: self._on_leaving(link),
            leave_seconds=_LEAVE_SECONDS,
            gauge=metrics.ENGINES,
        )
        self._last_wait: asyncio.Task[bool] | None = None
        """Task that waits for an engine; all requests share it"""
        self.blocks = KnownBlocks(self._is_cached) if settings.knows_blocks else None
        """Blocks with known token ids; None = no subscriber can watch them"""
        self._waiting_room = WaitingRoom(settings.max_waiting, "the engine")
        self._follows_load = False

    @property
    def limits(self) -> ModelLimits:
        """Limits of requests. Raises UNAVAILABLE until an engine has answered once."""
        if self._limits is None:
            raise ServiceError(
                grpc.StatusCode.UNAVAILABLE,
                "ENGINE_UNREACHABLE",
                "The engine is not reachable yet.",
                retry_seconds=1,
            )
        return self._limits

    def limits_of(self, model: str) -> ModelLimits:
        """Return the limits of requests that name this model, which may be an adapter's name.

        The limits of an unknown name are those of the model. Raises the errors of `limits`.
        """
        limits, adapter = self.limits, self.adapters.get(model)
        return limits if adapter is None else replace(limits, model=model, adapter=adapter)

    @property
    def adapters(self) -> Mapping[str, str]:
        """Fingerprints of the engines' adapters by name."""
        return {
            name: fingerprint
            for link in self._peers.links
            for name, fingerprint in link.adapters.items()
        }

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter on all engines that serve. Raises ServiceError."""
        links = self._require_serving()
        await _all_or_first_error(link.load_adapter(name, path) for link in links)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter from the engines that have it. Raises NOT_FOUND if none has."""
        links = self._require_serving()
        having = [link for link in links if name in link.adapters]
        await _all_or_first_error(link.unload_adapter(name) for link in having or links)

    def _require_serving(self) -> Sequence[EngineLink]:
        serving = self.serving
        if not serving:
            code = grpc.StatusCode.UNAVAILABLE
            raise ServiceError(code, "NO_ENGINE", "No engine serves at present.", retry_seconds=1)
        return serving

    @property
    def is_known(self) -> bool:
        """True if an engine has answered once."""
        return self._limits is not None

    @property
    def is_serving(self) -> bool:
        """True if an engine serves this checkpoint."""
        return self._peers.is_serving

    @property
    def context_length(self) -> int:
        """Context length of the engines, in tokens; that of the checkpoint while it is unknown."""
        return self._limits.context_length if self._limits else self._vocabulary.context_length

    async def start(self, on_leaving: Callable[[EngineLink], None]) -> None:
        """Wait until an engine serves. Raises StartupError if all serve another checkpoint.

        on_leaving: called when an engine stops to serve while another one serves.
        """
        self._on_leaving = on_leaving
        self._peers.start()
        try:
            await self._peers.wait_for_first()
        except PeerRefusedError as error:
            raise StartupError(str(error)) from None

    async def close(self) -> None:
        """End the Sessions; the engines abort their requests."""
        if self._last_wait is not None:
            self._last_wait.cancel()
        await self._peers.close()

    @property
    def serving(self) -> Sequence[EngineLink]:
        """Engines that serve."""
        return self._peers.serving

    async def flush_caches(self) -> int:
        """Evict the cached prefixes that no running sequence holds; return the number of blocks.

        Raises UNAVAILABLE if an engine does not answer.
        """
        return sum(await asyncio.gather(*(link.flush_cache() for link in self.serving)))

    async def statuses(self) -> Sequence[models_pb2.EngineStatus]:
        """Return each engine with its current load."""
        return await asyncio.gather(*(link.status() for link in self._peers.links))

    def follow_load(self) -> None:
        """Follow the load of all engines, for `loads`. A single engine is followed only then."""
        self._follows_load = True
        for link in self._peers.links:
            link.follow_load()

    def loads(self) -> Sequence[EngineLoad]:
        """Return the load of each engine that serves, as last reported."""
        return [link.load for link in self.serving]

    # the choice

    def place(self, need: Need, avoided: Collection[EngineLink]) -> Placement:
        """Place a request on the cheapest engine that is not avoided.

        Raises UNAVAILABLE (NO_ENGINE) if there is none, and NOT_FOUND if none has the adapter.
        """
        able = [link for link in self._require_serving() if need.suits(link)]
        serving = [link for link in able if link not in avoided] or able
        if not serving:
            message = f"No engine has the adapter {need.model!r} any longer."
            code = grpc.StatusCode.NOT_FOUND
            raise ServiceError(code, "MODEL_NOT_FOUND", message, field="model")
        link = serving[0] if len(serving) == 1 else _cheapest(serving, need)
        metrics.PLACED.labels(link.target).inc()
        for ids in need.text_prompts:
            self.learn(need.tenant, ids)
        return Placement(link, need)

    def learn(
        self, tenant: str, prompt: Sequence[int], outputs: Iterable[Sequence[int]] = ()
    ) -> None:
        """Record the token ids of a prompt and its outputs, for watchers of the blocks.

        Watchers never get the ids of a tenant.
        """
        if self.blocks is not None and not tenant and (serving := self.serving):
            self.blocks.learn(prompt, serving[0].block_size, outputs)

    def has_other(self, links: Collection[EngineLink], need: Need) -> bool:
        """Return whether an engine besides these could take a request."""
        return any(link not in links and need.suits(link) for link in self.serving)

    def suspend(self, link: EngineLink) -> None:
        """Place no requests on an engine until it reports again that it serves."""
        link.peer.suspend()

    async def wait_until_serving(self, deadline: float | None, why: str, *, is_new: bool) -> None:
        """Wait for an engine if none serves, because they stop, were lost, or were never reached.

        deadline: loop time; None without a deadline. why: the reason that none serves.
        is_new: whether the request was never admitted. Only new requests are limited in number.
        Raises RESOURCE_EXHAUSTED if too many requests wait, DEADLINE_EXCEEDED, and UNAVAILABLE if
        no engine serves within `wait_seconds`. The time in which an engine loads does not count.
        """
        if self.is_serving:
            return
        with self._waiting_room.place() if is_new else nullcontext():
            try:
                async with asyncio.timeout_at(deadline):
                    serves = await self._serves_in_time()
            except TimeoutError:
                message = "The deadline passed while the engine was unavailable."
                code = grpc.StatusCode.DEADLINE_EXCEEDED
                raise ServiceError(code, "DEADLINE_EXCEEDED", message) from None
        if not serves:
            message = f"The engine is unreachable or does not serve: {why}"
            code = grpc.StatusCode.UNAVAILABLE
            raise ServiceError(code, "ENGINE_LOST", message, retry_seconds=1)

    async def _serves_in_time(self) -> bool:
        """Return whether an engine serves in time. All waiting requests share one wait."""
        if self._last_wait is None or self._last_wait.done():
            self._last_wait = asyncio.ensure_future(self._wait())
        return await asyncio.shield(self._last_wait)

    async def _wait(self) -> bool:
        serves = asyncio.ensure_future(self._peers.wait_until_serving())
        timeout = asyncio.ensure_future(self._time_out())
        try:
            await asyncio.wait({serves, timeout}, return_when=asyncio.FIRST_COMPLETED)
            return serves.done()
        finally:
            serves.cancel()
            timeout.cancel()

    async def _time_out(self) -> None:
        """Return after `wait_seconds` in which no engine has loaded its model."""
        loop, seconds = asyncio.get_running_loop(), self._settings.wait_seconds
        end = loop.time() + seconds
        while (left := end - loop.time()) > 0:
            if any(await asyncio.gather(*(link.is_loading(left) for link in self._peers.links))):
                end = loop.time() + seconds
            await asyncio.sleep(min(RETRY_SECONDS, max(0.0, end - loop.time())))

    # callbacks of the links

    def admit(self, link: EngineLink, model: engine_pb2.GetModelResponse) -> None:
        """Accept an engine that serves the same model as the others, with its limits."""
        expected = self._vocabulary.model_vocabulary_size
        if expected and model.vocabulary_size != expected:
            raise PeerRefusedError(
                f"The engine at {link.target} serves another checkpoint: its vocabulary "
                f"has {model.vocabulary_size:,} ids, this one's {expected:,}."
            )
        others = [each.model for each in self.serving if each is not link and each.model]
        if others and (difference := _difference(model, others[0])):
            raise PeerRefusedError(
                f"The engine at {link.target} serves another model than the others: {difference}."
            )
        self._limits = self._make_limits([model, *others])

    def on_cache_changed(
        self, link: EngineLink, group: int, stored: Collection[bytes], removed: Collection[bytes]
    ) -> None:
        """Pass on a change of an engine's cache for a group of layers."""
        if self.blocks is not None:
            self.blocks.on_changed(group, link.cached.groups[group], stored, removed)

    def _is_cached(self, group: int, block_hash: bytes) -> bool:
        return any(link.cached.has_reported(group, block_hash) for link in self._peers.links)

    def _open_link(self, peer: Peer) -> EngineLink:
        link = EngineLink(peer, self)
        if self._follows_load:
            link.follow_load()
        return link

    def _on_changed(self) -> None:
        """Follow the caches that the choice depends on; report whether an engine serves."""
        links, is_serving = self._peers.links, self.is_serving
        if len(links) > 1 or self.blocks is not None:
            for link in links:
                link.follow()
        if is_serving != self._was_serving:
            self._was_serving = is_serving
            self._on_serving(is_serving)

    def _make_limits(self, models: Sequence[engine_pb2.GetModelResponse]) -> ModelLimits:
        """Return the lowest limits of these engines, and the capabilities that all have."""
        model = models[0]
        identity = "\n".join(
            (
                model.model,
                model.architecture,
                model.dtype,
                model.version,
                model.weights_fingerprint,
                self._vocabulary.fingerprint,
                self._vocabulary.configuration_hash,
            )
        )
        max_logprobs = min(each.max_logprobs for each in models)
        return ModelLimits(
            model=self._settings.model,
            system_fingerprint=f"fp_{hashlib.sha256(identity.encode()).hexdigest()[:12]}",
            context_length=min(each.context_length for each in models),
            vocabulary_size=model.vocabulary_size,
            eos_ids=frozenset(model.eos_token_ids),
            capabilities=frozenset.intersection(*(frozenset(each.capabilities) for each in models)),
            max_logprobs=min(self._settings.max_logprobs, max_logprobs),
            max_chat_logprobs=min(MAX_CHAT_LOGPROBS, max_logprobs),
            max_sequences=min(each.max_sequences_per_request for each in models),
            max_stop_strings=self._settings.max_stop_strings,
            appends_suffix=self._settings.appends_suffix,
            vector_width=model.vector_width,
            model_code=model.model_code,
            token_width=model.token_width,
            vectors_are_scores=model.vectors_are_scores,
            vectors_are_normalized=model.vectors_are_normalized,
            takes_pairs=model.takes_pairs,
            hides_ends=model.hides_ends,
            weighs_tokens=model.weighs_tokens,
            only_embeds=model.only_embeds,
        )


async def _all_or_first_error(calls: Iterable[Awaitable[None]]) -> None:
    """Wait for all calls; raise the error of the first call that failed."""
    for answer in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(answer, BaseException):
            raise answer


def _cheapest(links: Sequence[EngineLink], need: Need) -> EngineLink:
    """Return the engine with the lowest cost; one of them at random if several are equal."""
    costs = {link: _cost(link, need) for link in links}
    least = min(costs.values())
    return random.choice([link for link, cost in costs.items() if cost <= least])


def _cost(link: EngineLink, need: Need) -> float:
    """Return the engine's work before the request's first token, in prompt tokens."""
    missing = link.missing_tokens(need)
    lacking = link.lacking_tokens(missing)
    return missing + lacking + link.waiting_tokens + _SEQUENCE_TOKENS * link.sequences


def _difference(model: engine_pb2.GetModelResponse, other: engine_pb2.GetModelResponse) -> str:
    """Return the difference between two engines' models as a phrase; empty if they agree."""
    for name in _AGREED:
        mine, theirs = getattr(model, name), getattr(other, name)
        if mine != theirs:
            return f"its {name} is {mine}, not {theirs}"
    return ""
