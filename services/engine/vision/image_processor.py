"""Image processor of a checkpoint, which makes the inputs of the vision tower from images."""

from pathlib import Path
from typing import Any, Self

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, PreTrainedConfig

from services.common.images import ImageError
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.vision.gemma4_unified import Gemma4UnifiedImageProcessorPil
from services.engine.vision.tower import described_in, reason_of

__all__ = ["ImageProcessor"]

_TENSORS = ("pixel_values", "image_sizes", "image_grid_thw", "image_position_ids")
"""Outputs that a tower reads. Idefics 3's mask is left out: one image has no padding"""
_PIXTRAL = "pixtral"
_SAMPLE = Image.new("RGB", (64, 48))


class ImageProcessor:
    """The PIL processor of transformers that the checkpoint's settings name, or ours."""

    def __init__(self, processor: Any, token_edge: int | None) -> None:
        """token_edge: pixels of a token's edge in Pixtral's tower; None for other towers."""
        self.token_edge = token_edge
        self._processor = processor
        self._options = {} if token_edge is None else {"patch_size": token_edge}

    @classmethod
    def load(cls, directory: Path, config: PreTrainedConfig) -> Self:
        """Load the processor of a checkpoint whose config.json is `config`.

        Raises CheckpointError, among others for settings with which it can't process an image.
        """
        try:
            processor = _processor(directory, config)
            processor.do_pan_and_scan = False  # like `Gemma3Processor`, for any file
            loaded = cls(processor, _token_edge(config))
            loaded.pixels(_SAMPLE)
        except Exception as error:  # transformers raises errors of many types
            raise CheckpointError(
                f"{described_in(directory)} describes no image processor: {reason_of(error)}"
            ) from None
        return loaded

    def pixels(self, image: Image.Image) -> dict[str, Tensor]:
        """Return the inputs of the tower for an RGB image. Raises ImageError."""
        try:
            output = self._processor(images=[image], return_tensors="pt", **self._options)
        except ValueError as error:  # for example, an aspect ratio above Qwen's 200
            reason = str(error).rstrip(".")
            raise ImageError(f"The model can't take the image: {reason}.") from None
        return {key: torch.as_tensor(output[key]) for key in _TENSORS if key in output}


def _processor(directory: Path, config: PreTrainedConfig) -> Any:
    if config.model_type == "gemma4_unified":
        return Gemma4UnifiedImageProcessorPil.from_pretrained(directory, local_files_only=True)
    return AutoImageProcessor.from_pretrained(  # type: ignore[no-untyped-call]
        directory, backend="pil", local_files_only=True, trust_remote_code=False
    )


def _token_edge(config: PreTrainedConfig) -> int | None:
    """Return the pixels of a token's edge in Pixtral's tower; None for other towers.

    Images are resized to multiples of it. The processor's own patch_size is that of a patch, of
    which Mistral 3 merges several into a token. Source: transformers' `PixtralProcessor`.
    """
    vision = config.vision_config
    if vision.model_type != _PIXTRAL:
        return None
    edge: int = vision.patch_size * getattr(config, "spatial_merge_size", 1)
    return edge
