"""Image processor of Gemma 4 Unified, which transformers has for torchvision alone."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

__all__ = ["Gemma4UnifiedImageProcessorPil"]


class Gemma4UnifiedImageProcessorPil(Gemma4ImageProcessorPil):
    """Gemma 4's processor, whose output has one row for each token.

    Source: transformers' `Gemma4UnifiedImageProcessor`.
    """

    def preprocess(self, images: Any, **options: Any) -> Any:
        """Return pixel_values [images, max_soft_tokens, pixels of a token] and their places."""
        output = super().preprocess(images, **options)
        tokens = [
            _merged(torch.as_tensor(patches), torch.as_tensor(places), self.pooling_kernel_size)
            for patches, places in zip(
                output["pixel_values"], output["image_position_ids"], strict=True
            )
        ]
        output["pixel_values"] = torch.stack([pixels for pixels, _ in tokens])
        output["image_position_ids"] = torch.stack([places for _, places in tokens])
        return output


def _merged(patches: Tensor, places: Tensor, edge: int) -> tuple[Tensor, Tensor]:
    """Join squares of patches to tokens; return the tokens' pixels and places.

    patches: [patches, pixels]. places: [patches, 2], column and row, -1 for padding. edge: patches
    along a token's edge.
    """
    columns, rows = (int(last) + 1 for last in places.amax(0))
    side = math.isqrt(patches.shape[1] // 3)
    height, width = rows // edge, columns // edge
    grid = patches[: rows * columns].view(height, edge, width, edge, side, side, 3)
    tokens = grid.permute(0, 2, 1, 4, 3, 5, 6).reshape(height * width, -1)
    found = places[: rows * columns].view(rows, columns, 2)[::edge, ::edge].reshape(-1, 2) // edge
    padding = (0, 0, 0, len(patches) // edge**2 - len(tokens))
    return pad(tokens, padding), pad(found, padding, value=-1)
