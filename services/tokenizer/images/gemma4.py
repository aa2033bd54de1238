"""Gemma 4: a run between marks for each image, in proportion to its resized area.

Source: transformers' `Gemma4Processor` and `get_aspect_ratio_preserving_size`.
"""

import math
from dataclasses import dataclass

from services.tokenizer.images.image_family import Expansion, ImageFamily, ImageSize
from services.tokenizer.images.image_tokens import ImageTokens
from services.tokenizer.images.processor_settings import ProcessorSettings
from services.tokenizer.text.section import SettingsError

__all__ = ["read_gemma4"]

_MOST_TOKENS = (70, 140, 280, 560, 1120)
"""Values of max_soft_tokens that the processor takes"""


@dataclass(frozen=True, slots=True)
class _Grid:
    """Resizing of images to whole tokens."""

    edge: int
    """Edge of a token in pixels"""
    most_tokens: int

    def tokens(self, size: ImageSize) -> int:
        """Return the number of an image's tokens."""
        area = self.most_tokens * self.edge**2
        scale = math.sqrt(area / (size.height * size.width))
        rows = math.floor(scale * size.height / self.edge)
        columns = math.floor(scale * size.width / self.edge)
        if not rows:
            rows, columns = 1, min(size.width // size.height, self.most_tokens)
        elif not columns:
            rows, columns = min(size.height // size.width, self.most_tokens), 1
        return rows * columns


def read_gemma4(settings: ProcessorSettings, tokens: ImageTokens) -> ImageFamily:
    """Return the family of a Gemma 4 checkpoint. Raises SettingsError."""
    image = tokens.text("<|image|>", "image_token_id")
    begin = tokens.text("<|image>", "boi_token_id")
    end = tokens.text("<image|>", "eoi_token_id")
    grid = _read_grid(settings)
    return ImageFamily(
        image,
        tokens.id(image),
        image,
        image,
        (image, begin, end),
        lambda size: Expansion(f"{begin}{image}{end}", grid.tokens(size)),
    )


def _read_grid(settings: ProcessorSettings) -> _Grid:
    images = settings.images
    if not images.flag("do_resize", True):
        raise SettingsError(f"{images.file}: do_resize is false, which is not supported.")
    most = images.count("max_soft_tokens") or 280
    if most not in _MOST_TOKENS:
        known = ", ".join(map(str, _MOST_TOKENS))
        raise SettingsError(f"{images.file}: max_soft_tokens must be one of {known}, got {most}.")
    patch, pooled = images.count("patch_size"), images.count("pooling_kernel_size")
    return _Grid(edge=(patch or 16) * (pooled or 3), most_tokens=most)
