"""Idefics 3 and SmolVLM: one run for each tile of an image, and one for the whole image.

Source: transformers' `Idefics3Processor`, `SmolVLMProcessor` and `Idefics3ImageProcessor`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from services.common.json_values import Json
from services.tokenizer.images.image_family import Expansion, ImageFamily, ImageSize
from services.tokenizer.images.image_tokens import ImageTokens
from services.tokenizer.images.processor_settings import ProcessorSettings
from services.tokenizer.text.section import SettingsError

__all__ = ["read_idefics3"]

_RUN = 169
_TILE: Mapping[str, Json] = {"longest_edge": 364}
_SIZE: Mapping[str, Json] = {"longest_edge": 4 * 364}
_MOST = 4096
"""Longest edge of any resized image in pixels, whatever the settings are"""
_WHOLE = "<global-img>"


@dataclass(frozen=True, slots=True)
class _Tiling:
    """Division of images into square tiles."""

    is_split: bool
    is_resized: bool
    tile: int
    longest: int | None
    """Longest edge of a resized image in pixels; None = images get the size `fixed`"""
    fixed: ImageSize | None

    def rows_and_columns(self, size: ImageSize) -> tuple[int, int]:
        """Return the rows and columns of tiles; 0 and 0 for an image that is not divided."""
        if not self.is_split:
            return 0, 0
        resized = _to_whole_tiles(self._resized(size), self.tile)
        if resized.width <= self.tile and resized.height <= self.tile:
            return 0, 0
        return resized.height // self.tile, resized.width // self.tile

    def _resized(self, size: ImageSize) -> ImageSize:
        if not self.is_resized:
            return size
        if self.longest is not None:
            return _at_most(_with_longest_edge(size, self.longest), _MOST)
        assert self.fixed is not None
        return self.fixed


def read_idefics3(settings: ProcessorSettings, tokens: ImageTokens) -> ImageFamily:
    """Return the family of an Idefics 3 or SmolVLM checkpoint. Raises SettingsError."""
    image = tokens.text("<image>", "image_token_id", "image_token_index")
    around = tokens.text("<fake_token_around_image>")
    run = settings.processor.count("image_seq_len") or _run(settings)
    tiling = _read_tiling(settings)

    def expand(size: ImageSize) -> Expansion:
        rows, columns = tiling.rows_and_columns(size)
        lines = [
            "".join(f"{around}<row_{row}_col_{column}>{image}" for column in range(1, columns + 1))
            for row in range(1, rows + 1)
        ]
        if lines:
            lines.append("")
        return Expansion("\n".join([*lines, f"{around}{_WHOLE}{image}{around}"]), run)

    return ImageFamily(image, tokens.id(image), image, image, (image, around), expand)


def _run(settings: ProcessorSettings) -> int:
    """Return the tokens of a tile from config.json, or else transformers' default."""
    edge, patch = settings.vision.count("image_size"), settings.vision.count("patch_size")
    scale = settings.model.count("scale_factor")
    if edge is None or patch is None or scale is None:
        return _RUN
    return (edge // patch) ** 2 // scale**2


def _read_tiling(settings: ProcessorSettings) -> _Tiling:
    images = settings.images
    size = images.size("size", number_means="square", default=_SIZE)
    tile = images.size("max_image_size", number_means="longest_edge", default=_TILE)
    edge, longest = tile.count("longest_edge"), size.count("longest_edge")
    height, width = size.count("height"), size.count("width")
    fixed = ImageSize(width, height) if width is not None and height is not None else None
    if edge is None or (longest is None and fixed is None):
        raise SettingsError(f"{images.file}: size or max_image_size has no longest_edge.")
    return _Tiling(
        is_split=images.flag("do_image_splitting", True),
        is_resized=images.flag("do_resize", True),
        tile=edge,
        longest=longest,
        fixed=fixed,
    )


def _with_longest_edge(size: ImageSize, longest: int) -> ImageSize:
    """Return the size scaled to this longest edge; the other edge becomes even.

    Source: `_resize_output_size_rescale_to_max_len`, which enlarges small images too.
    """
    ratio = size.width / size.height
    if size.width >= size.height:
        height = int(longest / ratio)
        return ImageSize(longest, max(1, height + height % 2))
    width = int(longest * ratio)
    return ImageSize(max(1, width + width % 2), longest)


def _at_most(size: ImageSize, longest: int) -> ImageSize:
    """Return the size, lowered to this longest edge.

    Source: `_resize_output_size_scale_below_upper_bound`.
    """
    ratio = size.width / size.height
    if size.width >= size.height and size.width > longest:
        return ImageSize(longest, max(1, int(longest / ratio)))
    if size.height > size.width and size.height > longest:
        return ImageSize(max(1, int(longest * ratio)), longest)
    return size


def _to_whole_tiles(size: ImageSize, tile: int) -> ImageSize:
    """Return the size with edges raised to multiples of the tile's edge.

    Source: `resize_for_vision_encoder`.
    """
    ratio = size.width / size.height
    if size.width >= size.height:
        width = math.ceil(size.width / tile) * tile
        return ImageSize(width, math.ceil(int(width / ratio) / tile) * tile)
    height = math.ceil(size.height / tile) * tile
    return ImageSize(math.ceil(int(height * ratio) / tile) * tile, height)
