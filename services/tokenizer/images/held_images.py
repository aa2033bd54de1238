"""Memory of images that requests hold until they end, so that a lost engine gets them again."""

from collections.abc import Sequence

import grpc

from services.tokenizer.images.request_images import RequestImage
from tokenwire.errors import ServiceError

__all__ = ["HeldImages"]

_MOST_BYTES = 1 << 30


class HeldImages:
    """Encoded images of all running requests."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0

    def hold(self, images: Sequence[RequestImage]) -> int:
        """Count a request's images; return their bytes, for `release`. Raises QUEUE_FULL."""
        size = sum(len(image.data) for image in images)
        if size and self._bytes and self._bytes + size > self._most_bytes:
            raise ServiceError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "QUEUE_FULL",
                f"Running requests hold {self._bytes:,} bytes of images; try again.",
                retry_seconds=1,
            )
        self._bytes += size
        return size

    def release(self, size: int) -> None:
        """Subtract the images of a request that has ended."""
        self._bytes -= size
