"""Image encoder: embeddings of image files, which the decoder reads in place of the images."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from services.common.images import ImageError, decode
from services.engine.model.checkpoint.tensors import Checkpoint
from services.engine.vision.image_processor import ImageProcessor
from services.engine.vision.support import image_token_id
from services.engine.vision.tower import load_tower

__all__ = ["ImageEncoder", "ImageFeatures"]

_LOG = logging.getLogger("encoder")
_BATCH_ELEMENTS = 3 << 22
"""Most elements that the tower computes at once: those of 4 million pixels, or of one image"""


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """Features of an image for the decoder."""

    embeddings: Tensor
    """[layers, tokens, hidden size] on the CPU, in the decoder's dtype. The first layer replaces
    the embeddings of the image's tokens; the others (Qwen3-VL's deepstack) are added to the outputs
    of the first decoder layers"""
    grid: tuple[int, int] | None
    """Rows and columns of the tokens for multimodal RoPE; None = the tokens lie in a line"""


@dataclass(frozen=True, slots=True)
class _Pixels:
    """A processor's output for one image."""

    index: int
    tensors: dict[str, Tensor]

    @property
    def kind(self) -> object:
        """Key of the images that can go through the tower together."""
        if "image_grid_thw" in self.tensors:  # patches in a line, whatever the size
            return None
        if "image_sizes" in self.tensors:  # alone: Pixtral's time is quadratic in all patches
            return self.index
        return tuple(self.tensors["pixel_values"].shape)


class ImageEncoder:
    """A checkpoint's image processor, vision tower and projector."""

    def __init__(
        self, tower: Any, processor: ImageProcessor, image_token: int, dtype: torch.dtype
    ) -> None:
        self._tower = tower
        self._processor = processor
        self._dtype = dtype
        self.image_token_id = image_token
        self.device: torch.device = tower.device

    @classmethod
    def load(cls, directory: Path, dtype: torch.dtype, device: torch.device) -> Self:
        """Load the encoder of a checkpoint; `dtype` is the decoder's. Raises CheckpointError."""
        image_token = image_token_id(Checkpoint.config(directory))
        tower = load_tower(directory, dtype, device)
        return cls(tower, ImageProcessor.load(directory, tower.config), image_token, dtype)

    @torch.inference_mode()
    def encode(self, files: Sequence[bytes]) -> list[ImageFeatures | ImageError]:
        """Return each image's features, or the error if it can't be read."""
        results: dict[int, ImageFeatures | ImageError] = {}
        readable: list[_Pixels] = []
        for index, file in enumerate(files):
            try:
                readable.append(_Pixels(index, self._processor.pixels(decode(file))))
            except ImageError as error:
                results[index] = error
        for batch in _batches(readable):
            encoded = self._encoded([pixels.tensors for pixels in batch])
            results |= {pixels.index: each for pixels, each in zip(batch, encoded, strict=True)}
        return [results[index] for index in range(len(files))]

    def _encoded(self, images: Sequence[dict[str, Tensor]]) -> list[ImageFeatures | ImageError]:
        """Return each image's features, or an error if the tower fails on it."""
        # transformers' Mistral 3 fails on a lone token, so such an image is computed twice
        copies = 2 if self._is_one_token(images) else 1
        try:
            return [*islice(self._features([*images] * copies), len(images))]
        except torch.AcceleratorError:
            raise  # the device is lost, and no image is the cause
        except Exception as error:
            if is_full := isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
            if len(images) > 1:  # the other images belong to other requests
                return [result for image in images for result in self._encoded([image])]
            _LOG.exception("the vision tower failed on an image")
            why = "the memory left is too small" if is_full else "it failed on it"
            return [ImageError(f"The model can't take the image: {why}.")]

    def _is_one_token(self, images: Sequence[dict[str, Tensor]]) -> bool:
        edge = self._processor.token_edge
        return edge is not None and int(images[0]["image_sizes"].max()) <= edge

    def _features(self, images: Sequence[dict[str, Tensor]]) -> Iterator[ImageFeatures]:
        inputs = {key: torch.cat([image[key] for image in images]) for key in images[0]}
        inputs["pixel_values"] = inputs["pixel_values"].to(self._dtype)
        device = self._tower.device
        output = self._tower.get_image_features(
            **{key: tensor.to(device) for key, tensor in inputs.items()}
        )
        layers = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        for index, image in enumerate(images):
            parts = [_part(layer, index, len(images)) for layer in layers]
            embeddings = torch.stack(parts).to("cpu", self._dtype)
            yield ImageFeatures(embeddings, self._grid(image))

    def _grid(self, image: dict[str, Tensor]) -> tuple[int, int] | None:
        if "image_grid_thw" not in image:
            return None
        _, rows, columns = image["image_grid_thw"][0].tolist()
        merge = self._tower.config.vision_config.spatial_merge_size
        return rows // merge, columns // merge


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
