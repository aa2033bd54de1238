"""Memory of images, which requests hold until they end: another engine may need them."""

from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from services.common.sharing.shares import Shares
from services.common.sharing.tenant import current_tenant
from services.tokenizer.images.request_images import RequestImage
from tokenwire.errors import ServiceError

__all__ = ["NO_IMAGES", "HeldBytes", "HeldImages"]

_MOST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """Bytes of one request's images."""

    tenant: str
    size: int


NO_IMAGES = HeldBytes("", 0)


class HeldImages:
    """Encoded images of all running requests."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._shares = Shares(most_bytes)

    def hold(self, images: Sequence[RequestImage]) -> HeldBytes:
        """Count a request's images; return them for `release`. Raises QUEUE_FULL."""
        held = HeldBytes(current_tenant.get(), sum(len(image.data) for image in images))
        all_bytes = self._shares.held
        if held.size and all_bytes and not self._shares.has_room(held.tenant, held.size):
            raise ServiceError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "QUEUE_FULL",
                f"Running requests hold {all_bytes:,} bytes of images; try again.",
                retry_seconds=1,
            )
        self._shares.add(held.tenant, held.size)
        return held

    def release(self, held: HeldBytes) -> None:
        """Subtract the images of a request that has ended."""
        self._shares.add(held.tenant, -held.size)
