"""GGUF file of a text model with the mmproj file of its vision tower and projector."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from services.common.gguf.gguf_config import MARK
from services.common.gguf.gguf_file import GgufError, GgufFile
from services.common.json_values import Json

__all__ = ["VISION", "ImageModel", "ImagePair"]

VISION = "clip.vision"
"""Beginning of the tower's keys"""
_MATRIX = 2  # dimensions
_COLOURS = 3


@dataclass(frozen=True, slots=True)
class ImageModel:
    """A vision-language model, as the files of a checkpoint in Hugging Face form describe it."""

    config: dict[str, Json]
    """Content of config.json"""
    images: dict[str, Json]
    """Content of preprocessor_config.json"""
    processor: dict[str, Json]
    """Content of processor_config.json"""
    text: GgufFile
    """The text model's file, in which the tokens of an image are special tokens"""
    mmproj: Path


@dataclass(frozen=True, slots=True)
class ImagePair:
    """The files of a model."""

    text: GgufFile
    mmproj: GgufFile
    values: Mapping[str, Json]
    """Content of the text model's config.json"""
    architecture: str
    ids: Mapping[str, Json]
    """Ids of the tokens of an image by their keys in config.json"""

    def model(
        self,
        kind: str,
        text_kind: str,
        vision: dict[str, Json],
        images: dict[str, Json],
        processor: dict[str, Json],
        **further: Json,
    ) -> ImageModel:
        """Return the model. kind, text_kind: model_type of the whole and of its text part."""
        inner = {key: value for key, value in self.values.items() if key != MARK}
        mark = self.values[MARK]
        assert isinstance(mark, dict)
        names = inner.pop("architectures")
        assert isinstance(names, list)
        if "rope_parameters" in inner:  # transformers prefers the older key, and the engine this
            inner.pop("rope_scaling", None)
        config: dict[str, Json] = {
            "architectures": [self.architecture],
            "model_type": kind,
            "text_config": {**inner, "model_type": text_kind},
            "vision_config": vision,
            "tie_word_embeddings": inner.get("tie_word_embeddings", False),
            **self.ids,
            **further,
            MARK: {**mark, "decoder": names[0]},
        }
        normal: dict[str, Json] = {
            "image_mean": [*self._three("image_mean")],
            "image_std": [*self._three("image_std")],
        }
        mmproj = self.mmproj.path
        return ImageModel(config, {**images, **normal}, processor, self.text, mmproj)

    @property
    def width(self) -> int:
        """Width of the text model."""
        return self.text.count(self.text.own("embedding_length"))

    def with_sections(self) -> "ImagePair":
        """Return the pair with the sections of multimodal RoPE in the text model's config.json."""
        key = self.text.own("rope.dimension_sections")
        sections = [each for each in self.text.integers(key, 3) if each]
        scaling = self.values["rope_scaling"]
        assert isinstance(scaling, dict)
        scaled: dict[str, Json] = {**scaling, "mrope_section": [*sections]}
        return replace(self, values={**self.values, "rope_scaling": scaled})

    def count(
        self, key: str, default: int | None = None, *, least: int = 1, most: int | None = None
    ) -> int:
        """Return a number of the tower from `least` to `most`. Raises GgufError."""
        return self.mmproj.count(f"{VISION}.{key}", default, least=least, most=most)

    def tower(self) -> dict[str, Json]:
        """Return the sizes that all towers have.

        Raises GgufError if they are not those of the file's tensors. The modules of a tower would
        otherwise take hours or all memory before the shapes are compared.
        """
        width, patch = self.count("embedding_length"), self.count("patch_size")
        heads = self.count("attention.head_count", most=width)
        if width % heads:
            raise GgufError(
                f"{self.mmproj.path}: {VISION}.embedding_length is {width}, which is not divisible "
                f"by {VISION}.attention.head_count, {heads}."
            )
        name, wanted = "v.patch_embd.weight", (width, _COLOURS, patch, patch)
        shape = self.shape(name, len(wanted))
        if shape != wanted:
            raise GgufError(
                f"{self.mmproj.path} is damaged: {name} has the shape {list(shape)}, but its keys "
                f"ask for {list(wanted)}."
            )
        return {
            "hidden_size": width,
            "num_attention_heads": heads,
            "num_hidden_layers": self.count("block_count", most=len(self.mmproj.tensors)),
            "intermediate_size": self.feed_forward(width),
            "patch_size": patch,
        }

    def feed_forward(self, width: int) -> int:
        """Return the width of a feed-forward layer, which the key of Qwen 2-VL's files is not."""
        shape = self.shape("v.blk.0.ffn_up.weight", _MATRIX)
        return shape[1] if shape[0] == width else shape[0]  # old files have up and down exchanged

    def shape(self, name: str, dimensions: int) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises GgufError if it is missing or has another form."""
        if name not in self.mmproj.tensors:
            raise GgufError(f"{self.mmproj.path} is damaged: it has no {name}.")
        shape = self.mmproj.tensors[name].shape
        if len(shape) != dimensions or 0 in shape:
            raise GgufError(
                f"{self.mmproj.path} is damaged: {name} must have {dimensions} dimensions, and its "
                f"shape is {list(shape)}."
            )
        return shape

    def _three(self, key: str) -> list[float]:
        numbers = self.mmproj.numbers(f"{VISION}.{key}")
        if len(numbers) != 3 or (key == "image_std" and min(numbers) <= 0):
            raise GgufError(f"{self.mmproj.path}: {VISION}.{key} must be 3 numbers.")
        return numbers
