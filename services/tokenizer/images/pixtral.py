"""Pixtral and Mistral 3: one run for each row of an image, with breaks between rows.

Source: transformers' `PixtralProcessor` and `PixtralImageProcessor`.
"""

import math
from collections.abc import Mapping

from services.common.images import ImageError
from services.common.json_values import Json
from services.tokenizer.images.image_family import Expansion, ImageFamily, ImageSize
from services.tokenizer.images.image_tokens import ImageTokens
from services.tokenizer.images.processor_settings import ProcessorSettings
from services.tokenizer.text.section import SettingsError

__all__ = ["read_pixtral"]

_PATCH = 16
_SIZE: Mapping[str, Json] = {"longest_edge": 1024}


def read_pixtral(settings: ProcessorSettings, tokens: ImageTokens) -> ImageFamily:
    """Return the family of a checkpoint with Pixtral's vision tower. Raises SettingsError."""
    processor = settings.processor
    image = tokens.text("[IMG]", "image_token_id", "image_token_index")
    row_end = tokens.text(processor.text("image_break_token", "[IMG_BREAK]"))
    end = tokens.text(processor.text("image_end_token", "[IMG_END]"))
    # the vision tower's value first: converted checkpoints may have an older processor
    patch = settings.vision.count("patch_size") or processor.count("patch_size") or _PATCH
    merged = settings.model.count("spatial_merge_size") or processor.count("spatial_merge_size")
    edge = patch * (merged or 1)
    most = _most(settings)

    def expand(size: ImageSize) -> Expansion:
        rows, columns = _rows_and_columns(size, edge, most)
        return Expansion(row_end.join([image] * rows) + end, columns)

    return ImageFamily(image, tokens.id(image), image, image, (image, row_end, end), expand)


def _most(settings: ProcessorSettings) -> ImageSize | None:
    """Return the largest size of an image; None if images are not resized."""
    images = settings.images
    if not images.flag("do_resize", True):
        return None
    size = images.size("size", number_means="square", default=_SIZE)
    longest = size.count("longest_edge")
    height, width = longest or size.count("height"), longest or size.count("width")
    if height is None or width is None:
        raise SettingsError(f"{images.file}: size has no longest_edge.")
    return ImageSize(width, height)


def _rows_and_columns(size: ImageSize, edge: int, most: ImageSize | None) -> tuple[int, int]:
    """Return the tokens' rows and columns. Source: `get_resize_output_image_size`."""
    height, width = size.height, size.width
    if most is None:
        return _checked(height // edge, width // edge, size)
    ratio = max(height / most.height, width / most.width)
    if ratio > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    return _checked((height - 1) // edge + 1, (width - 1) // edge + 1, size)


def _checked(rows: int, columns: int, size: ImageSize) -> tuple[int, int]:
    if not rows or not columns:
        raise ImageError(
            f"The image has {size.width} x {size.height} pixels, which is too narrow: cut it."
        )
    return rows, columns
