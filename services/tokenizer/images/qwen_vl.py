"""Qwen 2-VL, 2.5-VL and 3-VL: one run for each image, in proportion to its resized area.

Source: transformers' `Qwen2VLProcessor`, `Qwen3VLProcessor` and `smart_resize`.
"""

import math
from dataclasses import dataclass

from services.common.images import ImageError
from services.tokenizer.images.image_family import Expansion, ImageFamily, ImageSize
from services.tokenizer.images.image_tokens import ImageTokens
from services.tokenizer.images.processor_settings import ProcessorSettings

__all__ = ["read_qwen_vl"]

_LEAST_PIXELS = 56 * 56
_MOST_PIXELS = 28 * 28 * 1280
_MOST_RATIO = 200


@dataclass(frozen=True, slots=True)
class _Grid:
    """Resizing of images to whole patches."""

    patch: int
    """Edge of a patch in pixels"""
    merged: int
    """Edge in patches of the square that becomes one token"""
    least_pixels: int
    most_pixels: int
    is_resized: bool

    def tokens(self, size: ImageSize) -> int:
        """Return the number of an image's tokens. Raises ImageError."""
        height, width = self._resized(size)
        return (height // self.patch) * (width // self.patch) // self.merged**2

    def _resized(self, size: ImageSize) -> tuple[int, int]:
        """Return height and width as multiples of a token's edge. Source: `smart_resize`."""
        height, width, edge = size.height, size.width, self.patch * self.merged
        if not self.is_resized:
            if height % edge or width % edge:
                raise ImageError(f"The image's width and height must be multiples of {edge}.")
            return height, width
        if max(height, width) / min(height, width) > _MOST_RATIO:
            raise ImageError(
                f"The image has {width} x {height} pixels; one side may be at most {_MOST_RATIO} "
                "times the other."
            )
        rows, columns = round(height / edge) * edge, round(width / edge) * edge
        if rows * columns > self.most_pixels:
            scale = math.sqrt((height * width) / self.most_pixels)
            rows = max(edge, math.floor(height / scale / edge) * edge)
            columns = max(edge, math.floor(width / scale / edge) * edge)
        elif rows * columns < self.least_pixels:
            scale = math.sqrt(self.least_pixels / (height * width))
            rows = math.ceil(height * scale / edge) * edge
            columns = math.ceil(width * scale / edge) * edge
        return rows, columns


def read_qwen_vl(settings: ProcessorSettings, tokens: ImageTokens) -> ImageFamily:
    """Return the family of a Qwen VL checkpoint. Raises SettingsError."""
    pad = tokens.text("<|image_pad|>", "image_token_id")
    begin = tokens.text("<|vision_start|>", "vision_start_token_id")
    end = tokens.text("<|vision_end|>", "vision_end_token_id")
    grid = _read_grid(settings)
    return ImageFamily(
        pad,
        tokens.id(pad),
        pad,
        f"{begin}{pad}{end}",
        (pad, begin, end),
        lambda size: Expansion(pad, grid.tokens(size)),
    )


def _read_grid(settings: ProcessorSettings) -> _Grid:
    images = settings.images
    # older files have min_pixels and max_pixels, newer ones call them edges of `size`
    size = images.size(
        "size",
        number_means="shortest_edge",
        default={"shortest_edge": _LEAST_PIXELS, "longest_edge": _MOST_PIXELS},
    )
    least = images.count("min_pixels") or size.count("shortest_edge") or size.count("min_pixels")
    most = images.count("max_pixels") or size.count("longest_edge") or size.count("max_pixels")
    return _Grid(
        patch=images.count("patch_size") or settings.vision.count("patch_size") or 14,
        merged=images.count("merge_size") or settings.vision.count("spatial_merge_size") or 2,
        least_pixels=least or _LEAST_PIXELS,
        most_pixels=most or _MOST_PIXELS,
        is_resized=images.flag("do_resize", True),
    )
