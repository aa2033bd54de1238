"""Image encoder: from image files to the embeddings that the decoder reads in their place."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor

from services.common.images import ImageError, decode
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.checkpoint.tensors import Checkpoint
from services.engine.vision.support import image_token_id
from services.engine.vision.tower import load_tower

__all__ = ["ImageEncoder", "ImageFeatures"]

_BATCH_ELEMENTS = 3 << 22
"""Elements of the pixels that the tower computes at once: 4 million pixels, or one image"""
_LISTED = ("pixel_values", "pixel_attention_mask", "image_sizes", "image_grid_thw")
"""What the tower reads of a processor's output"""


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """What the decoder reads of an image."""

    embeddings: Tensor
    """[layers, tokens, hidden size] on the CPU, in the decoder's dtype. The first layer replaces
    the embeddings of the image's tokens; the others (Qwen3-VL's deepstack) are added to the outputs
    of the first decoder layers"""
    grid: tuple[int, int] | None
    """Rows and columns of the tokens, for multimodal RoPE; None = they lie in a line"""


@dataclass(frozen=True, slots=True)
class _Pixels:
    """A processor's output for one image."""

    index: int
    tensors: dict[str, Tensor]

    @property
    def kind(self) -> object:
        """Images of one kind go through the tower together."""
        if "image_grid_thw" in self.tensors:  # patches in a line, whatever the size
            return None
        return tuple(self.tensors["pixel_values"].shape)


class ImageEncoder:
    """A checkpoint's image processor, vision tower and projector."""

    def __init__(self, tower: Any, processor: Any, image_token: int, dtype: torch.dtype) -> None:
        self._tower = tower
        self._processor = processor
        self._options = _options(tower)
        self._dtype = dtype
        self.image_token_id = image_token

    @classmethod
    def load(cls, directory: Path, dtype: torch.dtype, device: torch.device) -> Self:
        """Load the encoder of a checkpoint; `dtype` is the decoder's. Raises CheckpointError."""
        config = Checkpoint.config(directory)
        try:
            processor = AutoImageProcessor.from_pretrained(  # type: ignore[no-untyped-call]
                directory, backend="pil", local_files_only=True
            )
        except (OSError, ValueError, ImportError) as error:
            raise CheckpointError(f"{directory}: no image processor: {error}") from None
        if getattr(processor, "do_pan_and_scan", False):
            raise CheckpointError(
                f"{directory}: do_pan_and_scan is not supported; set it to false."
            )
        tower = load_tower(directory, dtype, device)
        return cls(tower, processor, image_token_id(config), dtype)

    @torch.inference_mode()
    def encode(self, files: Sequence[bytes]) -> list[ImageFeatures | ImageError]:
        """Return each image's features, or why it can't be read."""
        results: dict[int, ImageFeatures | ImageError] = {}
        readable: list[_Pixels] = []
        for index, file in enumerate(files):
            try:
                readable.append(_Pixels(index, self._pixels(decode(file))))
            except ImageError as error:
                results[index] = error
        for batch in _batches(readable):
            features = self._features([pixels.tensors for pixels in batch])
            results |= {pixels.index: each for pixels, each in zip(batch, features, strict=True)}
        return [results[index] for index in range(len(files))]

    def _pixels(self, image: Image.Image) -> dict[str, Tensor]:
        try:
            output = self._processor(images=[image], return_tensors="pt", **self._options)
        except ValueError as error:  # such as an aspect ratio beyond Qwen's 200
            raise ImageError(f"The model can't take the image: {error}.") from None
        return {key: torch.as_tensor(output[key]) for key in _LISTED if key in output}

    def _features(self, images: Sequence[dict[str, Tensor]]) -> Iterator[ImageFeatures]:
        computed = (*images, *images) if self._is_one_token(images) else images
        inputs = {key: torch.cat([image[key] for image in computed]) for key in images[0]}
        inputs["pixel_values"] = inputs["pixel_values"].to(self._dtype)
        device = self._tower.device
        output = self._tower.get_image_features(
            **{key: tensor.to(device) for key, tensor in inputs.items()}
        )
        layers = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        for index, image in enumerate(images):
            parts = [_part(layer, index, len(computed)) for layer in layers]
            embeddings = torch.stack(parts).to("cpu", self._dtype)
            yield ImageFeatures(embeddings, self._grid(image))

    def _is_one_token(self, images: Sequence[dict[str, Tensor]]) -> bool:
        """Return whether one token is all that Pixtral makes of the images.

        Mistral 3's model in transformers loses a dimension of it, but not of two such images.
        """
        side = self._options.get("patch_size", {}).get("height")
        return len(images) == 1 and images[0]["pixel_values"].shape[-2:] == (side, side)

    def _grid(self, image: dict[str, Tensor]) -> tuple[int, int] | None:
        if "image_grid_thw" not in image:
            return None
        _, rows, columns = image["image_grid_thw"][0].tolist()
        merge = self._tower.config.vision_config.spatial_merge_size
        return rows // merge, columns // merge


def _options(tower: Any) -> dict[str, dict[str, int]]:
    """Return what transformers' own processors pass to the image processor with each image."""
    vision = tower.config.vision_config
    if vision.model_type != "pixtral":
        return {}
    # a projector that merges patches needs whole squares of them
    side = vision.patch_size * getattr(tower.config, "spatial_merge_size", 1)
    return {"patch_size": {"height": side, "width": side}}


def _part(layer: Tensor | Sequence[Tensor], index: int, count: int) -> Tensor:
    """Return one image's [tokens, hidden size] of the features of `count` images."""
    if len(layer) == count:
        return layer[index].flatten(0, -2)
    tiles = len(layer) // count  # Idefics 3: features of all tiles of all images
    return torch.cat(tuple(layer[index * tiles : (index + 1) * tiles]))


def _batches(images: Iterable[_Pixels]) -> Iterator[list[_Pixels]]:
    """Group images that the tower can compute together."""
    batches: dict[object, list[_Pixels]] = {}
    for image in images:
        batch = batches.setdefault(image.kind, [])
        size = sum(each.tensors["pixel_values"].numel() for each in (*batch, image))
        if batch and size > _BATCH_ELEMENTS:
            yield batch
            batches[image.kind] = [image]
        else:
            batch.append(image)
    yield from batches.values()
