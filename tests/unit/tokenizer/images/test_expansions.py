"""Tokens of images: equal to those of transformers' processors for every family and size."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from services.common.images import ImageError
from services.tokenizer.images.image_family import ImageSize
from tests.unit.tokenizer.images.checkpoints import KINDS, Seeing, seeing, write_kind
from tests.unit.tokenizer.images.processors import reference_ids
from tokenwire.pb.completion.v1 import completion_pb2 as completion

# transformers fails for edges below 2 pixels, which some processors shrink to none
_SIZES = st.lists(st.tuples(st.integers(2, 90), st.integers(2, 90)), min_size=1, max_size=3)
_TEXTS = st.sampled_from(["", "a", "a\n", "\n\na", " ", "é "])


def _ids(checkpoint: Seeing, text: str, sizes: list[tuple[int, int]]) -> list[int]:
    [placed] = checkpoint.expander(*sizes).place([completion.Prompt(text=text)])
    return placed.lengthen(checkpoint.vocabulary.encode(placed.text))[0]


@pytest.mark.parametrize("name", KINDS)
@given(sizes=_SIZES, between=_TEXTS, end=_TEXTS)
@settings(max_examples=60)
def test_ids_of_a_text_with_images_equal_those_of_the_processor(
    checkpoints: dict[str, Seeing], name: str, sizes: list[tuple[int, int]], between: str, end: str
) -> None:
    """The model sees images only in the form in which it was trained."""
    kind, checkpoint = KINDS[name], checkpoints[name]
    images = [Image.new("RGB", size) for size in sizes]
    text = between.join([kind.written] * len(sizes)) + end
    expected = reference_ids(kind, checkpoint, text, images)
    assert _ids(checkpoint, text, sizes) == expected
    generic = between.join(["<image>"] * len(sizes)) + end
    assert _ids(checkpoint, generic, sizes) == expected


# settings of published checkpoints
_PUBLISHED = {
    "llava": replace(
        KINDS["llava"],
        images={"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
        processor={**KINDS["llava"].processor, "patch_size": 14},
    ),
    "mistral3": replace(
        KINDS["mistral3"],
        images={"size": {"longest_edge": 1540}, "patch_size": {"height": 14, "width": 14}},
        processor={"patch_size": 14, "spatial_merge_size": 2},
    ),
    "gemma4": replace(KINDS["gemma4"], images={}),
    "idefics3": replace(KINDS["idefics3"], images={}),
    "smolvlm": replace(
        KINDS["smolvlm"],
        images={"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}},
    ),
    "qwen2_vl": replace(
        KINDS["qwen2_vl"], images={"min_pixels": 3136, "max_pixels": 12_845_056, "patch_size": 14}
    ),
    "qwen3_vl": replace(
        KINDS["qwen3_vl"],
        images={"size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}, "patch_size": 16},
    ),
}


@pytest.mark.parametrize("name", _PUBLISHED)
def test_ids_equal_those_of_the_processor_for_photos(tmp_path: Path, name: str) -> None:
    """Rounding differs at large sizes, and limits of pixels apply only there."""
    kind = replace(_PUBLISHED[name], images={"do_resize": True, **_PUBLISHED[name].images})
    checkpoint = seeing(write_kind(tmp_path, kind))
    for size in [(640, 480), (1920, 1081), (333, 1999), (31, 27), (2600, 90)]:
        expected = reference_ids(kind, checkpoint, kind.mark, [Image.new("RGB", size)])
        assert _ids(checkpoint, kind.mark, [size]) == expected


@pytest.mark.parametrize(
    ("name", "size"),
    [("qwen2_vl", (201, 1)), ("mistral3", (100, 1)), ("llava", (1, 200_000))],
)
def test_image_that_is_too_narrow_is_refused(
    checkpoints: dict[str, Seeing], name: str, size: tuple[int, int]
) -> None:
    """The processors fail, or fill the memory, and the request would with them."""
    with pytest.raises(ImageError, match="pixels"):
        checkpoints[name].family.expand(ImageSize(*size))
