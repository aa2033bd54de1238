"""Images of running requests, kept in case that their tokenizer service is lost."""

from services.common.sharing.tenant_cache import TenantCache
from services.http_shim.images.request_images import RequestImages

__all__ = ["KeptImages"]


class KeptImages:
    """Images up to a number of bytes; the oldest ones of the tenant that has most go first."""

    def __init__(self, max_bytes: int = 0) -> None:
        self._max_bytes = max_bytes
        self._images: TenantCache[RequestImages, RequestImages] = TenantCache(max_bytes)

    def keep(self, images: RequestImages, tenant: str) -> None:
        """Keep the images of a request until `drop`, or until newer ones need their place."""
        if images.size > self._max_bytes:
            images.drop()
            return
        for displaced in self._images.put(tenant, images, images, images.size):
            displaced.drop()

    def drop(self, images: RequestImages) -> None:
        """Hold these images no longer. A second call has no effect."""
        self._images.drop(images)
        images.drop()
