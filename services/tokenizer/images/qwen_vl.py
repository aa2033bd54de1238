"""Qwen 2-VL to 3-VL, EXAONE 4.5, GLM-4V: one run for each image, by its resized area.

Source: transformers' `Qwen2VLProcessor`, `Qwen3VLProcessor`, `Glm4vProcessor` and `smart_resize` of
both.
"""

import math
from dataclasses import dataclass, replace

from services.common.images import ImageError
from services.tokenizer.images.image_family import Expansion, ImageFamily, ImageSize
from services.tokenizer.images.image_tokens import ImageTokens
from services.tokenizer.images.processor_settings import ProcessorSettings

__all__ = ["read_exaone", "read_glm4v", "read_qwen_vl"]

_LEAST_PIXELS = 56 * 56
_MOST_PIXELS = 28 * 28 * 1280
_GLM_LEAST_PIXELS = 112 * 112
_GLM_MOST_PIXELS = 28 * 28 * 15_000
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
    frames: int = 1
    """Frames that an image counts as, in the bounds of its pixels"""
    is_enlarged: bool = False
    """True if an image below the edge of a token is enlarged first"""

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
        if self.is_enlarged and min(height, width) < edge:
            scale = max(edge / height, edge / width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) / min(height, width) > _MOST_RATIO:
            raise ImageError(
                f"The image has {size.width} x {size.height} pixels; one side may be at most "
                f"{_MOST_RATIO} times the other."
            )
        rows, columns = round(height / edge) * edge, round(width / edge) * edge
        if self.frames * rows * columns > self.most_pixels:
            scale = math.sqrt((self.frames * height * width) / self.most_pixels)
            rows = max(edge, math.floor(height / scale / edge) * edge)
            columns = max(edge, math.floor(width / scale / edge) * edge)
        elif self.frames * rows * columns < self.least_pixels:
            scale = math.sqrt(self.least_pixels / (self.frames * height * width))
            rows = math.ceil(height * scale / edge) * edge
            columns = math.ceil(width * scale / edge) * edge
        return rows, columns


def read_qwen_vl(settings: ProcessorSettings, tokens: ImageTokens) -> ImageFamily:
    """Return the family of a Qwen VL checkpoint. Raises SettingsError."""
    pad = tokens.text("<|image_pad|>", "image_token_id")
    begin = tokens.text("<|vision_start|>", "vision_start_token_id")
    end = tokens.text("<|vision_end|>", "vision_end_token_id")
    return _family(tokens, (begin, pad, end), _read_grid(settings))


def read_exaone(settings: ProcessorSettings, tokens: ImageTokens) -> ImageFamily:
    """Return the family of an EXAONE 4.5 checkpoint. Raises SettingsError."""
    pad = tokens.text("<|image_pad|>", "image_token_id")
    begin = tokens.text("<vision>", "vision_start_token_id")
    end = tokens.text("</vision>", "vision_end_token_id")
    return _family(tokens, (begin, pad, end), _read_grid(settings))


def read_glm4v(settings: ProcessorSettings, tokens: ImageTokens) -> ImageFamily:
    """Return the family of a GLM-4V checkpoint. Raises SettingsError."""
    image = tokens.text("<|image|>", "image_token_id")
    begin = tokens.text("<|begin_of_image|>", "image_start_token_id")
    end = tokens.text("<|end_of_image|>", "image_end_token_id")
    grid = replace(
        _read_grid(settings, _GLM_LEAST_PIXELS, _GLM_MOST_PIXELS),
        frames=settings.images.count("temporal_patch_size") or 2,
        is_enlarged=True,
    )
    return _family(tokens, (begin, image, end), grid)


def _family(tokens: ImageTokens, texts: tuple[str, str, str], grid: _Grid) -> ImageFamily:
    """Return a family. texts: tokens that begin an image, take its places and end it."""
    begin, image, end = texts
    return ImageFamily(
        image,
        tokens.id(image),
        image,
        f"{begin}{image}{end}",
        (image, begin, end),
        lambda size: Expansion(image, grid.tokens(size)),
    )


def _read_grid(
    settings: ProcessorSettings,
    least_pixels: int = _LEAST_PIXELS,
    most_pixels: int = _MOST_PIXELS,
) -> _Grid:
    images = settings.images
    # older files have min_pixels and max_pixels, newer ones call them edges of `size`
    size = images.size(
        "size",
        number_means="shortest_edge",
        default={"shortest_edge": least_pixels, "longest_edge": most_pixels},
    )
    least = images.count("min_pixels") or size.count("shortest_edge") or size.count("min_pixels")
    most = images.count("max_pixels") or size.count("longest_edge") or size.count("max_pixels")
    return _Grid(
        patch=images.count("patch_size") or settings.vision.count("patch_size") or 14,
        merged=images.count("merge_size") or settings.vision.count("spatial_merge_size") or 2,
        least_pixels=least or least_pixels,
        most_pixels=most or most_pixels,
        is_resized=images.flag("do_resize", True),
    )
