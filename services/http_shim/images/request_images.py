"""Images of one request: their bytes, decoded from data URLs, or the URLs to fetch them from."""

import binascii
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from services.common.contract import MAX_IMAGE_BYTES, MAX_IMAGES, MAX_IMAGES_BYTES
from tokenwire.errors import invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.tokenizer.v1 import tokenizer_pb2

__all__ = ["RemoteImage", "RequestImages", "decode_base64", "decode_data_url"]

_MEDIA_TYPES = frozenset({"image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif"})
_SHOWN = 64  # characters of a media type in an error
_WHITESPACE = b" \t\n\f\r"
_GROUPS = 1 << 20  # characters that are decoded at once, while no other thread can run


@dataclass(frozen=True, slots=True)
class RemoteImage:
    """An image that is not fetched yet."""

    url: str = field(repr=False)
    """http: or https: URL; it may hold a signature, so logs must not show it"""
    param: str
    """The client's name of its field"""


class RequestImages:
    """The images of one request, in order, outside of its message.

    A request lives as long as its answer. Images inside it would hold up to 48 MiB that long.
    """

    def __init__(self) -> None:
        self._items: list[bytes | RemoteImage] = []
        self.size = 0
        """Bytes of all images"""
        self.url_length = 0
        """Characters of the data URLs"""
        self._is_dropped = False

    def __len__(self) -> int:
        return len(self._items)

    def add(self, url: str, param: str) -> None:
        """Add the image of a URL. Raises INVALID_ARGUMENT with `param` as the field."""
        if len(self._items) == MAX_IMAGES:
            raise invalid(
                param, f"{param} is one image too many: a request may have at most {MAX_IMAGES}."
            )
        if url[:8].lower().startswith(("http://", "https://")):
            self._items.append(RemoteImage(url, param))
            return
        data = decode_data_url(url, param)
        self.grow(len(data), param)
        self.url_length += len(url)
        self._items.append(data)

    def grow(self, size: int, param: str) -> None:
        """Count further bytes of an image. Raises INVALID_ARGUMENT above the limit."""
        self.size += size
        if self.size > MAX_IMAGES_BYTES:
            raise invalid(
                param,
                f"The images of a request may have at most {MAX_IMAGES_BYTES:,} bytes together; "
                f"{param} exceeds them.",
            )

    def remote(self) -> list[tuple[int, RemoteImage]]:
        """Return the images that are not fetched yet, with their indices."""
        return [
            (index, item) for index, item in enumerate(self._items) if isinstance(item, RemoteImage)
        ]

    def replace(self, index: int, data: bytes) -> None:
        """Put the bytes of a fetched image, which `grow` has counted, in place of its URL."""
        self._items[index] = data

    @property
    def is_held(self) -> bool:
        """True unless the images were dropped."""
        return not self._is_dropped

    def drop(self) -> None:
        """Hold the images no longer."""
        self._items.clear()
        self._is_dropped = True

    def copy_into(
        self,
        request: completion_pb2.GenerateRequest | tokenizer_pb2.RenderChatRequest,
    ) -> None:
        """Fill the request's empty places for images."""
        images = [item for item in self._items if isinstance(item, bytes)]
        assert len(images) == len(self._items), "images must be fetched before the request is sent"
        if isinstance(request, completion_pb2.GenerateRequest) and request.HasField("prompts"):
            request.prompts.images[:] = images
            return
        for part, image in zip(_places(request.conversation.messages), images, strict=True):
            part.image = image


def _places(messages: Iterable[completion_pb2.Message]) -> Iterator[completion_pb2.ContentPart]:
    for message in messages:
        for part in message.parts:
            if part.WhichOneof("part") == "image":
                yield part


def decode_data_url(url: str, param: str) -> bytes:
    """Return the data of a data URL with an image in base64.

    Base64 is read as data URLs are by browsers (https://infra.spec.whatwg.org/#forgiving-base64):
    whitespace has no effect, and the padding may be absent. Raises INVALID_ARGUMENT.
    """
    head, comma, text = url.partition(",")
    if not comma or not head[:5].lower() == "data:":
        raise invalid(
            param,
            f"{param} must be a data URL: data:image/png;base64, followed by the image in base64.",
        )
    media_type, *parameters = (part.strip().lower() for part in head[5:].split(";"))
    if not parameters or parameters[-1] != "base64":
        raise invalid(
            param, f"{param} must be in base64: its head must end with ;base64 before the comma."
        )
    if media_type not in _MEDIA_TYPES:
        raise invalid(
            param,
            f"{param} has the media type {media_type[:_SHOWN]!r}; use image/png, image/jpeg, "
            "image/webp or image/gif.",
        )
    data = decode_base64(text, param)
    if not data:
        raise invalid(param, f"{param} has no data after the comma.")
    return data


def decode_base64(text: str, param: str, what: str = "an image") -> bytes:
    """Return the bytes of `what`, at most those of an image. Raises INVALID_ARGUMENT."""
    try:
        encoded = text.encode("ascii")
        if any(space in encoded for space in _WHITESPACE):
            encoded = encoded.translate(None, _WHITESPACE)
        bare = encoded.rstrip(b"=")
        if len(bare) * 3 // 4 > MAX_IMAGE_BYTES:
            raise invalid(
                param, f"{param} is too large: {what} may have at most {MAX_IMAGE_BYTES:,} bytes."
            )
        return _decode_groups(bare, padding=len(encoded) - len(bare))
    except (UnicodeEncodeError, binascii.Error):
        raise invalid(
            param,
            f"{param} is not valid base64, which has the characters A-Z, a-z, 0-9, + and /, with = "
            "at the end.",
        ) from None


def _decode_groups(bare: bytes, padding: int) -> bytes:
    """Decode base64 without its padding, which is complete or absent. Raises binascii.Error."""
    missing = -len(bare) % 4
    if padding not in (0, missing) or b"=" in bare:
        raise binascii.Error
    view, last = memoryview(bare), len(bare) // _GROUPS * _GROUPS
    parts = [
        binascii.a2b_base64(view[start : start + _GROUPS], strict_mode=True)
        for start in range(0, last, _GROUPS)
    ]
    parts.append(binascii.a2b_base64(bare[last:] + b"=" * missing, strict_mode=True))
    return b"".join(parts)
