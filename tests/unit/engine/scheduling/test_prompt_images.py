"""Images of prompts: positions as in transformers, and prefixes that images tell apart."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

from services.common.block_hash import ImagePlaces, image_digest, prefix_hashes
from services.engine.checked_request import PlacedImage
from services.engine.scheduling.prompt_images import PromptImages
from services.engine.scheduling.token_ids import Prompt, TokenIds
from tests.unit.engine.checkpoints.configs import CONFIGS

IMAGE, BLOCK = 90, 8


@pytest.fixture(scope="module")
def qwen() -> Any:
    with torch.device("meta"):
        config: Any = CONFIGS["qwen2 vl"]
        return Qwen2VLModel(config)


@given(
    parts=st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4
    ),
    tail=st.integers(0, 9),
    generated=st.integers(0, 9),
)
def test_rotary_positions_equal_those_of_transformers(
    qwen: Any, parts: list[tuple[int, int, int]], tail: int, generated: int
) -> None:
    """parts: number of text tokens before an image, and the image's rows and columns."""
    ids: list[int] = []
    images: list[PlacedImage] = []
    for text, rows, columns in parts:
        ids += [5] * text
        places = range(len(ids), len(ids) + rows * columns)
        images.append(PlacedImage(b"", places, bytearray(), (rows, columns)))
        ids += [IMAGE] * len(places)
    ids += [5] * tail
    ours = PromptImages(images, len(ids))
    whole = torch.tensor([ids + [5] * generated])
    kinds = (whole == IMAGE).int()
    merge = qwen.config.vision_config.spatial_merge_size
    grids = torch.tensor([[1, rows * merge, columns * merge] for _, rows, columns in parts])
    expected, _ = qwen.get_rope_index(whole, kinds, image_grid_thw=grids)
    np.testing.assert_array_equal(ours.rotary_positions(0, whole.shape[1]), expected[:, 0])
    middle = whole.shape[1] // 2
    np.testing.assert_array_equal(
        ours.rotary_positions(middle, whole.shape[1]), expected[:, 0, middle:]
    )


def test_equal_ids_share_blocks_only_with_equal_images() -> None:
    """A conversation about one picture must not be continued from another one's cache."""
    ids = [1, 2, *[IMAGE] * 20, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
    cat, again, dog = (hashes(ids, digest) for digest in (b"cat", b"cat", b"dog"))
    assert cat == again
    assert len({*cat, *dog}) == 2 * len(cat)
    assert not {*cat} & {*hashes(ids, None)}


def test_text_before_an_image_is_shared() -> None:
    """A system prompt before the images is computed once."""
    ids = [*range(BLOCK), *[IMAGE] * BLOCK]
    cat, dog, text = (hashes(ids, digest, first=BLOCK) for digest in (b"cat", b"dog", None))
    assert cat[0] == dog[0] == text[0]
    assert len({cat[1], dog[1], text[1]}) == 3


def test_swapped_images_share_nothing_behind_the_first() -> None:
    ids = [IMAGE] * 4 * BLOCK
    halves = [range(2 * BLOCK), range(2 * BLOCK, 4 * BLOCK)]
    one, other = (
        [PlacedImage(name, places, bytearray()) for name, places in zip(names, halves, strict=True)]
        for names in ((b"cat", b"dog"), (b"dog", b"cat"))
    )
    assert not {*hashes_of(ids, one)} & {*hashes_of(ids, other)}


@given(
    st.lists(st.sampled_from([1, 2, IMAGE]), min_size=1, max_size=8 * BLOCK),
    st.integers(1, 4),
)
def test_those_who_choose_between_engines_compute_the_same_hashes(
    ids: list[int], count: int
) -> None:
    """Else prompts with images would not go where their prefix is."""
    places = [place for place, token in enumerate(ids) if token == IMAGE]
    parts = max(1, -(-len(places) // count))
    split = [places[i : i + parts] for i in range(0, len(places), parts)]
    images = [ImagePlaces(image_digest(b"%d" % i), part) for i, part in enumerate(split)]
    placed = [PlacedImage(image.digest, image.places, bytearray()) for image in images]
    assert prefix_hashes(ids, b"salt", BLOCK, images) == hashes_of(ids, placed)


def hashes(ids: list[int], digest: bytes | None, first: int = 2) -> list[bytes]:
    """Return the hashes of all full blocks with an image from index `first` on, or without one."""
    places = [place for place, token in enumerate(ids) if place >= first and token == IMAGE]
    return hashes_of(ids, [] if digest is None else [PlacedImage(digest, places, bytearray())])


def hashes_of(ids: list[int], images: list[PlacedImage]) -> list[bytes]:
    prompt = Prompt(ids, b"salt", BLOCK, PromptImages(images, len(ids)) if images else None)
    return TokenIds(prompt).block_hashes(len(ids))
