"""Reader of images: a bounded number of threads that decode them, and their expansions."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace

import grpc

from services.common.block_hash import image_digest
from services.common.images import ImageError, decode, size_of
from services.common.sharing.fair_executor import FairExecutor
from services.common.sharing.shares import Shares
from services.common.sharing.tenant import current_tenant
from services.tokenizer.images.held_images import HeldImages
from services.tokenizer.images.image_expander import ImageExpander
from services.tokenizer.images.image_family import ImageFamily, ImageSize
from services.tokenizer.images.request_images import RequestImage
from services.tokenizer.model_limits import ModelLimits
from services.tokenizer.text.vocabulary import Vocabulary
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.engine.v1 import engine_pb2

__all__ = ["ImageReader"]

_THREADS = 2  # each needs up to 250 MB for the largest image
_MAX_WAITING = 256  # requests


class ImageReader:
    """Images of one checkpoint's requests."""

    def __init__(self, family: ImageFamily | None, vocabulary: Vocabulary, model: str) -> None:
        """family: None = the checkpoint takes text alone."""
        self._family = family
        self._vocabulary = vocabulary
        self._model = model
        self._threads = FairExecutor(_THREADS, "image")
        self.held = HeldImages()
        self._waiting = Shares(_MAX_WAITING, reserve=_MAX_WAITING)
        """Number of requests whose images are decoded or wait for it"""

    def require(self, field: str, limits: ModelLimits | None = None) -> None:
        """Raise INVALID_ARGUMENT for `field` if the checkpoint, or the engine, takes text alone.

        limits: limits of the engine; None if no engine is needed.
        """
        if self._family is None or not (limits is None or _takes_images(limits)):
            raise invalid(field, f"{self._model} takes text alone: leave out images.")

    def refuse_stray_tokens(self, prompts: Iterable[Sequence[int]], limits: ModelLimits) -> None:
        """Raise INVALID_ARGUMENT if prompts without images have image tokens.

        The model has never learnt what such a token means by itself.
        """
        if self._family is None or not _takes_images(limits):
            return
        if any(self._family.placeholder_id in ids for ids in prompts):
            message = (
                f"The prompts have image tokens ({self._family.placeholder}), but the request has "
                "no images."
            )
            raise invalid("prompts.images", message)

    async def read(self, images: Sequence[RequestImage]) -> ImageExpander | None:
        """Decode images for a model that takes them; return their expander, None without images.

        Raises INVALID_ARGUMENT for an image that is damaged, or whose size the model refuses,
        RESOURCE_EXHAUSTED if too many requests wait.
        """
        if not images:
            return None
        assert self._family is not None, "require was not called"
        tenant = current_tenant.get()
        if not self._waiting.has_room(tenant, 1):
            raise ServiceError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "QUEUE_FULL",
                "Too many requests wait for their images to be decoded; try again.",
                retry_seconds=1,
            )
        loop = asyncio.get_running_loop()
        expansions, hashed = [], []
        self._waiting.add(tenant, 1)
        try:
            for image in images:  # one at a time: other requests take turns
                try:
                    size, digest = await loop.run_in_executor(self._threads, _read, image.data)
                    expansions.append(self._family.expand(size))
                    hashed.append(replace(image, digest=digest))
                except ImageError as error:
                    raise invalid(image.field, str(error)) from None
        finally:
            self._waiting.add(tenant, -1)
        return ImageExpander(self._family, self._vocabulary, hashed, expansions)

    def close(self) -> None:
        """End the threads after their current work."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _takes_images(limits: ModelLimits) -> bool:
    return engine_pb2.CAPABILITY_IMAGES in limits.capabilities


def _read(data: bytes) -> tuple[ImageSize, bytes]:
    """Return the size and the digest of an image that decodes. Raises ImageError."""
    width, height = size_of(data)
    decode(data).close()
    return ImageSize(width, height), image_digest(data)
