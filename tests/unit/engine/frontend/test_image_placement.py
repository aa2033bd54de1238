"""Placement of images: a wrong number of image tokens is an error, never a wrong picture."""

import pytest

from services.engine.checked_request import PlacedImage
from services.engine.frontend.image_client import ClientImage
from services.engine.frontend.image_placement import place_images
from services.engine.vision.messages import EncodedImage, UnreadableImage
from tokenwire.errors import ServiceError
from tokenwire.pb.engine.v1.engine_pb2 import PromptImage

IMAGE = 7


def image(digest: bytes, tokens: int) -> ClientImage:
    return ClientImage(digest, EncodedImage(bytearray(tokens), tokens, None))


def place(
    prompts: list[list[int]],
    images: list[tuple[int, ClientImage]],
    *,
    consecutive: bool = False,
) -> dict[int, list[PlacedImage]]:
    requested = [PromptImage(prompt=prompt) for prompt, _ in images]
    encoded = [each for _, each in images]
    return place_images(prompts, requested, encoded, IMAGE, consecutive=consecutive)


def test_images_get_their_prompts_image_tokens_in_order() -> None:
    prompts = [[1, IMAGE, IMAGE, 2, IMAGE], [IMAGE, 3], [4]]
    placed = place(prompts, [(0, image(b"a", 2)), (1, image(b"b", 1)), (0, image(b"c", 1))])
    assert [(each.digest, list(each.places)) for each in placed[0]] == [(b"a", [1, 2]), (b"c", [4])]
    assert [(each.digest, list(each.places)) for each in placed[1]] == [(b"b", [0])]


@pytest.mark.parametrize(
    ("ids", "message"), [([IMAGE], "1 too few"), ([IMAGE] * 4, "2 too many"), ([1], "2 too few")]
)
def test_wrong_numbers_of_image_tokens_are_refused(ids: list[int], message: str) -> None:
    with pytest.raises(ServiceError, match=message) as refused:
        place([[1], ids], [(1, image(b"a", 2))])
    assert refused.value.field == "prompts[1].ids"


def test_text_within_an_image_is_refused_where_its_place_counts() -> None:
    """Positions in two dimensions, and images that see ahead, know no text within."""
    ids = [IMAGE, 1, IMAGE]
    with pytest.raises(ServiceError, match="no others between"):
        place([ids], [(0, image(b"a", 2))], consecutive=True)
    assert list(place([ids], [(0, image(b"a", 2))])[0][0].places) == [0, 2]


def test_unreadable_image_is_refused_by_its_index() -> None:
    broken = ClientImage(b"b", UnreadableImage("The image is truncated."))
    with pytest.raises(ServiceError, match=r"The image is truncated\.") as refused:
        place([[IMAGE]], [(0, image(b"a", 1)), (0, broken)])
    assert refused.value.field == "images[1].data"
