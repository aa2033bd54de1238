"""Client of the image encoder: batches, a cache by content, and restarts."""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import grpc

from services.common.background import keep_running
from services.common.block_hash import image_digest, tenant_salt
from services.common.contract import MAX_IMAGE_BYTES
from services.common.process import collector_paused
from services.common.settings import StartupError
from services.common.sharing.fair_queue import FairQueue
from services.common.sharing.shares import Shares
from services.common.sharing.tenant_cache import TenantCache
from services.engine.frontend import metrics
from services.engine.frontend.child_process import ChildProcess, spawn
from services.engine.frontend.preparations import queue_full
from services.engine.ranks.rank import Rank
from services.engine.settings import EngineSettings, parse_bytes
from services.engine.vision.messages import (
    EncodedImage,
    EncodeImages,
    EncoderFailed,
    EncoderReady,
    ImagesEncoded,
    UnreadableImage,
)
from services.engine.vision.support import (
    PROCESSORS,
    has_vision,
    lacks_image_settings,
    refused_images,
    unserved_vision,
)
from tokenwire.errors import ServiceError
from tokenwire.extras import install_command

__all__ = ["ClientImage", "ImageClient"]

_LOG = logging.getLogger("engine")
_MAX_WAITING = 256
"""Most images that wait for the encoder"""
_MAX_WAITING_BYTES = 256 << 20
_RESTART_SECONDS = 1.0
"""Seconds before a lost encoder starts again"""


@dataclass(frozen=True, slots=True)
class ClientImage:
    """An encoded image of a client."""

    digest: bytes
    """Digest of the file, from `image_digest`"""
    encoded: EncodedImage | UnreadableImage


@dataclass(slots=True, eq=False)
class _Waiting:
    """An image that waits for the encoder, for one request or several."""

    file: bytes
    tenant: str
    result: asyncio.Future[EncodedImage | UnreadableImage] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    requests: int = 0
    """Number of requests that wait for the image; at 0 it is not encoded"""


class ImageClient:
    """Client of the encoder's process, which it starts, and starts again after a loss."""

    def __init__(self, settings: EngineSettings, on_work: Callable[[bool], None]) -> None:
        """on_work: called with True when the encoder begins to work, with False at the end."""
        self._settings = settings
        self._on_work = on_work
        self._process: ChildProcess | None = None
        self._restart: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._cache = _EncodedImages(parse_bytes(settings.image_memory))
        self._waiting: dict[bytes, _Waiting] = {}
        """Waiting images by tenant and digest"""
        self._order: FairQueue[bytes] = FairQueue()
        """Keys of waiting images in order; some belong to images whose requests have left"""
        self._places = Shares(_MAX_WAITING, reserve=_MAX_WAITING)
        self._bytes = Shares(_MAX_WAITING_BYTES, least=MAX_IMAGE_BYTES)
        self._batch: dict[bytes, _Waiting] = {}
        """Images that the encoder works on"""
        self._batch_size = 1
        self.image_token_id = -1

    @classmethod
    async def start_for(
        cls, settings: EngineSettings, on_work: Callable[[bool], None]
    ) -> "ImageClient | None":
        """Return a started client, or None if the engine takes no images. Raises StartupError."""
        if settings.vision == "off":
            return None
        if not has_vision(settings.model):
            if architecture := unserved_vision(settings.model):
                _LOG.warning("images are refused: the tower of %s is not supported", architecture)
            elif lacks_image_settings(settings.model):
                _LOG.warning("images are refused: the model has no %s", " or ".join(PROCESSORS))
            elif why := refused_images(settings.model):
                _LOG.warning("images are refused: %s", why)
            return None
        reason = ""
        if not Rank.from_environment().is_alone:
            reason = "several ranks take text only"
        elif not all(map(find_spec, ("PIL", "transformers"))):
            reason = f"`{install_command('vision')}` installs what reads them"
        if reason:
            _LOG.warning("images are refused: %s", reason)
            return None
        client = cls(settings, on_work)
        await client.start()
        return client

    async def start(self) -> None:
        """Start the process and wait until its weights are loaded. Raises StartupError."""
        process = ChildProcess("The image encoder", self._on_encoded, self._on_death)
        child = spawn("tokenwire-engine-images", _run, self._settings)
        first: Any = await process.start(child)
        if isinstance(first, EncoderFailed):
            await process.stop()
            raise StartupError(first.message)
        if process.has_ended:
            raise StartupError("The image encoder died as soon as it had started.")
        ready: EncoderReady = first
        self.image_token_id = ready.image_token_id
        self._batch_size = ready.batch_size
        self._process = process
        self._send()

    async def stop(self) -> None:
        """End the process. Waiting images fail."""
        self._is_stopping = True
        if self._restart is not None:
            self._restart.cancel()
        self._fail_all("The engine stops.")
        if self._process is not None:
            await self._process.stop()

    async def encode(self, files: Sequence[bytes], tenant: str = "") -> list[ClientImage]:
        """Return a tenant's images in order. Equal images are encoded once. Raises ServiceError.

        Tenants share no encoded images, because the time would reveal what another tenant sent.
        """
        digests = await asyncio.to_thread(lambda: [image_digest(file) for file in files])
        salt = tenant_salt(tenant)
        wanted: dict[bytes, _Waiting] = {}
        results: dict[bytes, EncodedImage | UnreadableImage] = {}
        try:
            for digest, file in zip(digests, files, strict=True):
                if digest in wanted or digest in results:
                    continue
                if (encoded := self._cache.get(salt + digest)) is not None:
                    results[digest] = encoded
                else:
                    wanted[digest] = self._wait_for(salt + digest, file, tenant)
            metrics.IMAGES.labels("cached").inc(len(results))
            self._send()
            for digest, waiting in wanted.items():
                # shielded: other requests may wait for the same image
                results[digest] = await asyncio.shield(waiting.result)
        finally:
            for digest, waiting in wanted.items():
                self._leave(salt + digest, waiting)
        return [ClientImage(digest, results[digest]) for digest in digests]

    def _wait_for(self, key: bytes, file: bytes, tenant: str) -> _Waiting:
        waiting = self._batch.get(key) or self._waiting.get(key)
        if waiting is None:
            if self._process is None:
                raise _encoder_lost("The image encoder starts again; try again.")
            self._require_room(len(file), tenant)
            waiting = self._waiting[key] = _Waiting(file, tenant)
            self._order.put(tenant, key)
            self._count(waiting, 1)
        waiting.requests += 1
        return waiting

    def _require_room(self, size: int, tenant: str) -> None:
        if not (self._places.has_room(tenant, 1) and self._bytes.has_room(tenant, size)):
            raise queue_full(f"{len(self._waiting)} images wait for the encoder; try again.")

    def _leave(self, key: bytes, waiting: _Waiting) -> None:
        waiting.requests -= 1
        if not waiting.requests and self._waiting.get(key) is waiting:
            del self._waiting[key]
            waiting.result.cancel()
            self._count(waiting, -1)

    def _count(self, waiting: _Waiting, images: int) -> None:
        """Add to the counts of waiting images: 1 if the image begins to wait, -1 if it stops."""
        self._places.add(waiting.tenant, images)
        self._bytes.add(waiting.tenant, images * len(waiting.file))
        metrics.WAITING_IMAGES.set(len(self._waiting))

    def _send(self) -> None:
        """Send the encoder its next batch, unless it works on a batch."""
        if self._process is None or self._batch or not self._waiting:
            return
        while self._waiting and len(self._batch) < self._batch_size:
            key = self._order.take()
            if (waiting := self._waiting.pop(key, None)) is not None:
                self._batch[key] = waiting
                self._count(waiting, -1)
        self._process.send(EncodeImages([waiting.file for waiting in self._batch.values()]))
        self._on_work(True)

    def _on_encoded(self, answer: ImagesEncoded) -> None:
        batch, self._batch = self._batch, {}
        self._on_work(False)
        for (key, waiting), encoded in zip(batch.items(), answer.images, strict=True):
            if isinstance(encoded, EncodedImage):
                self._cache.put(waiting.tenant, key, encoded)
            outcome = "encoded" if isinstance(encoded, EncodedImage) else "unreadable"
            metrics.IMAGES.labels(outcome).inc()
            if not waiting.result.done():
                waiting.result.set_result(encoded)
        metrics.IMAGE_CACHE_BYTES.set(self._cache.size)
        self._send()

    def _on_death(self, why: str) -> None:
        if self._process is None or self._is_stopping:  # `start` or `stop` deals with it
            return
        self._process = None
        self._on_work(False)
        _LOG.error("%s It starts again; text requests go on.", why)
        self._fail_all(why)
        self._restart = keep_running("image_encoder", self._start_again)

    async def _start_again(self) -> None:
        while self._process is None:
            await asyncio.sleep(_RESTART_SECONDS)
            self._on_work(True)  # otherwise the loop would leave it no time to load
            try:
                await self.start()
            except (StartupError, OSError) as error:
                _LOG.error("the image encoder does not start: %s", error)
            if not self._batch:
                self._on_work(False)

    def _fail_all(self, why: str) -> None:
        waits = [*self._waiting.values()]
        failed = [*self._batch.values(), *waits]
        self._batch = {}
        self._waiting.clear()
        for waiting in waits:
            self._count(waiting, -1)
        for waiting in failed:
            if not waiting.result.done():
                waiting.result.set_exception(_encoder_lost(why))
                waiting.result.exception()  # a request that waits for several images reads only one


class _EncodedImages:
    """Cache of encoded images by tenant and digest. A full cache evicts from the largest tenant."""

    def __init__(self, limit: int) -> None:
        """limit: most bytes of embeddings."""
        self._limit = limit
        self._images: TenantCache[bytes, EncodedImage] = TenantCache(limit)

    @property
    def size(self) -> int:
        """Bytes of all embeddings."""
        return self._images.size

    def get(self, key: bytes) -> EncodedImage | None:
        return self._images.get(key)

    def put(self, tenant: str, key: bytes, image: EncodedImage) -> None:
        if len(image.embeddings) <= self._limit:
            self._images.put(tenant, key, image, len(image.embeddings))


def _encoder_lost(message: str) -> ServiceError:
    code = grpc.StatusCode.UNAVAILABLE
    return ServiceError(code, "IMAGE_ENCODER_LOST", message, retry_seconds=1)


def _run(settings: EngineSettings, link: socket.socket) -> None:
    # imported only in the encoder's process, because the gRPC process must stay free of torch
    with collector_paused():
        from services.engine.vision.encoder_process import run

    run(settings, link)
