"""Placement of encoded images on the image tokens of their prompts."""

from collections.abc import Iterator, Sequence
from itertools import islice

from services.engine.checked_request import PlacedImage
from services.engine.frontend.image_client import ClientImage
from services.engine.vision.messages import UnreadableImage
from tokenwire.errors import invalid
from tokenwire.pb.engine.v1.engine_pb2 import PromptImage

__all__ = ["place_images"]


def place_images(
    prompts: Sequence[Sequence[int]],
    requested: Sequence[PromptImage],
    images: Sequence[ClientImage],
    image_token_id: int,
    *,
    consecutive: bool,
) -> dict[int, list[PlacedImage]]:
    """Return each prompt's images, by prompt index.

    images: encoded images of `requested`. A prompt's image tokens stand for its images in order.
    consecutive: whether the tokens of an image must have no other tokens between them.
    Raises ServiceError for unreadable images, and for a wrong number of image tokens.
    """
    placed: dict[int, list[PlacedImage]] = {}
    left = {index: _places(prompts[index], image_token_id) for index in _prompts(requested)}
    missing = dict.fromkeys(left, 0)
    for i, (each, image) in enumerate(zip(requested, images, strict=True)):
        encoded = image.encoded
        if isinstance(encoded, UnreadableImage):
            raise invalid(f"images[{i}].data", encoded.message)
        places = list(islice(left[each.prompt], encoded.num_tokens))
        missing[each.prompt] += encoded.num_tokens - len(places)
        if consecutive and places and places[-1] - places[0] >= len(places):
            message = "The tokens of an image must have no others between them."
            raise invalid(f"prompts[{each.prompt}].ids", message)
        placed.setdefault(each.prompt, []).append(
            PlacedImage(image.digest, places, encoded.embeddings, encoded.grid)
        )
    for index, places_left in left.items():
        _require_none_left(index, missing[index], sum(1 for _ in places_left), image_token_id)
    return placed


def _prompts(requested: Sequence[PromptImage]) -> set[int]:
    return {each.prompt for each in requested}


def _places(ids: Sequence[int], image_token_id: int) -> Iterator[int]:
    return (place for place, token in enumerate(ids) if token == image_token_id)


def _require_none_left(prompt: int, missing: int, surplus: int, image_token_id: int) -> None:
    if missing or surplus:
        problem = f"{missing} too few" if missing else f"{surplus} too many"
        raise invalid(
            f"prompts[{prompt}].ids",
            f"Prompt {prompt} has {problem} image tokens (id {image_token_id}) for its images.",
        )
