"""Images of a request: their bytes, apart from its text."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from services.common.contract import MAX_IMAGE_BYTES, MAX_IMAGES, MAX_IMAGES_BYTES
from tokenwire.errors import invalid
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["RequestImage", "has_images", "take_images", "take_message_images"]


@dataclass(frozen=True, slots=True)
class RequestImage:
    """An encoded image, and its place in the request."""

    field: str
    data: bytes
    digest: bytes = b""
    """Digest of the image, from `image_digest`; empty before the image is read"""


def has_images(
    request: completion_pb2.CompleteRequest | completion_pb2.ChatRequest, most_parts: int
) -> bool:
    """Return whether a completion, or one of the first `most_parts` parts of a chat, has images."""
    if isinstance(request, completion_pb2.CompleteRequest):
        return bool(request.images)
    parts = (part for message in request.messages for part in message.parts)
    return any(part.HasField("image") for part in islice(parts, most_parts))


def take_images(
    request: completion_pb2.CompleteRequest,
) -> tuple[completion_pb2.CompleteRequest, Sequence[RequestImage]]:
    """Return the request without its images, and these. The given request loses them.

    Raises INVALID_ARGUMENT for too many images, or too many bytes.
    """
    _check_count("images", len(request.images))
    images = [RequestImage(f"images[{index}]", data) for index, data in enumerate(request.images)]
    del request.images[:]
    small = completion_pb2.CompleteRequest()  # the given one keeps its memory
    small.CopyFrom(request)
    _check_bytes("images", images)
    return small, images


def take_message_images(messages: Sequence[completion_pb2.Message]) -> Sequence[RequestImage]:
    """Empty the image parts of messages, which stay in place; return the images.

    Raises as `take_images`. Takes long for many messages.
    """
    images: list[RequestImage] = []
    for place, message in enumerate(messages):
        for index, part in enumerate(message.parts):
            if part.HasField("image"):
                _check_count("messages", len(images) + 1)
                images.append(RequestImage(f"messages[{place}].parts[{index}].image", part.image))
                part.image = b""
    _check_bytes("messages", images)
    return images


def _check_count(field: str, count: int) -> None:
    if count > MAX_IMAGES:
        raise invalid(field, f"A request must have at most {MAX_IMAGES} images.")


def _check_bytes(field: str, images: Sequence[RequestImage]) -> None:
    for image in images:
        if len(image.data) > MAX_IMAGE_BYTES:
            raise invalid(
                image.field,
                f"An image must have at most {MAX_IMAGE_BYTES:,} bytes, got {len(image.data):,}.",
            )
    together = sum(len(image.data) for image in images)
    if together > MAX_IMAGES_BYTES:
        raise invalid(
            field,
            f"All images together must have at most {MAX_IMAGES_BYTES:,} bytes, got {together:,}.",
        )
