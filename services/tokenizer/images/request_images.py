"""Images of a request: their bytes, apart from its text."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from services.common.contract import MAX_IMAGES, MAX_IMAGES_BYTES
from tokenwire.errors import invalid
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["RequestImage", "has_images", "take_images", "take_message_images"]

_IMAGES = "prompts.images"  # paths in a request
_MESSAGES = "conversation.messages"


@dataclass(frozen=True, slots=True)
class RequestImage:
    """An encoded image, and its place in the request."""

    field: str
    data: bytes
    digest: bytes = b""
    """Digest of the image, from `image_digest`; empty before the image is read"""


def has_images(request: completion_pb2.GenerateRequest, most_parts: int) -> bool:
    """Return whether prompts, or the first `most_parts` parts of a conversation, have images."""
    if not request.HasField("conversation"):
        return bool(request.prompts.images)
    parts = (part for message in request.conversation.messages for part in message.parts)
    return any(part.HasField("image") for part in islice(parts, most_parts))


def take_images(
    request: completion_pb2.GenerateRequest,
) -> tuple[completion_pb2.GenerateRequest, Sequence[RequestImage]]:
    """Return the request without its images, and the images. The given request loses them, too.

    The request's fields are within their bounds. Raises INVALID_ARGUMENT for too many images or
    bytes in all.
    """
    if request.HasField("conversation"):
        images = take_message_images(request.conversation.messages)
    else:
        images = _take_prompt_images(request.prompts)
    if not images:
        return request, images
    small = completion_pb2.GenerateRequest()  # the given request keeps its memory
    small.CopyFrom(request)
    return small, images


def take_message_images(messages: Sequence[completion_pb2.Message]) -> Sequence[RequestImage]:
    """Empty the image parts of messages, which stay in place; return the images.

    Raises the errors of `take_images`. Takes long for many messages.
    """
    images: list[RequestImage] = []
    for place, message in enumerate(messages):
        for index, part in enumerate(message.parts):
            if part.HasField("image"):
                if len(images) == MAX_IMAGES:
                    most = f"A conversation must have at most {MAX_IMAGES} images."
                    raise invalid(_MESSAGES, most)
                field = f"{_MESSAGES}[{place}].parts[{index}].image"
                images.append(RequestImage(field, part.image))
                part.image = b""
    _check_bytes(_MESSAGES, images)
    return images


def _take_prompt_images(prompts: completion_pb2.Prompts) -> Sequence[RequestImage]:
    images = [RequestImage(f"{_IMAGES}[{i}]", data) for i, data in enumerate(prompts.images)]
    del prompts.images[:]
    _check_bytes(_IMAGES, images)
    return images


def _check_bytes(field: str, images: Sequence[RequestImage]) -> None:
    together = sum(len(image.data) for image in images)
    if together > MAX_IMAGES_BYTES:
        raise invalid(
            field,
            f"All images together must have at most {MAX_IMAGES_BYTES:,} bytes, got {together:,}.",
        )
