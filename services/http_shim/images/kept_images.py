"""Images of running requests, kept in case that their tokenizer service is lost."""

from services.http_shim.images.request_images import RequestImages

__all__ = ["KeptImages"]


class KeptImages:
    """Images up to a number of bytes; the oldest ones go first."""

    def __init__(self, max_bytes: int = 0) -> None:
        self._max_bytes = max_bytes
        self._size = 0
        self._images: dict[RequestImages, None] = {}
        """In the order in which they were added"""

    def keep(self, images: RequestImages) -> None:
        """Keep the images of a request until `drop`, or until newer ones need their place."""
        self._images[images] = None
        self._size += images.size
        while self._size > self._max_bytes:
            self.drop(next(iter(self._images)))

    def drop(self, images: RequestImages) -> None:
        """Hold these images no longer. A second call has no effect."""
        if images in self._images:
            del self._images[images]
            self._size -= images.size
        images.drop()
