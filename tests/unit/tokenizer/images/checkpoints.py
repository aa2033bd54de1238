"""Tiny checkpoints of the vision-language families, without weights."""

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import Tokenizer

from services.tokenizer.images.families import image_tokens, read_image_family
from services.tokenizer.images.image_expander import ImageExpander
from services.tokenizer.images.image_family import ImageFamily, ImageSize
from services.tokenizer.images.processor_settings import read_processor_settings
from services.tokenizer.images.request_images import RequestImage
from services.tokenizer.text.vocabulary import Vocabulary
from tests.unit.tokenizer.checkpoints import byte_fallback, byte_level, write_checkpoint

__all__ = ["KINDS", "Kind", "Seeing", "png", "seeing", "write_kind"]

CONTEXT = 4_096
_LLAVA_TOKENS = ("<s>", "</s>", "<image>")
_GEMMA_TOKENS = ("<s>", "</s>", "<start_of_image>", "<end_of_image>", "<image_soft_token>")
_GEMMA4_TOKENS = ("<s>", "</s>", "<|image>", "<image|>", "<|image|>")
_TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
_IDEFICS_TOKENS = (*_LLAVA_TOKENS, "<fake_token_around_image>", "<global-img>", *_TILES)
_QWEN_TOKENS = ("<s>", "</s>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
_EXAONE_TOKENS = ("<s>", "</s>", "<vision>", "</vision>", "<|image_pad|>")
_GLM_TOKENS = ("<s>", "</s>", "<|begin_of_image|>", "<|end_of_image|>", "<|image|>")
_PIXTRAL_TOKENS = ("<s>", "</s>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "[INST]", "[/INST]")

_PARTS = """{%- for message in messages %}
{{- '<s>' + message.role + ': ' }}
{%- if message.content is string %}{{ message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{ 'MARK' }}{% else %}{{ part.text }}{% endif %}
{%- endfor %}
{%- endif %}
{{- '\\n' }}
{%- endfor %}"""


@dataclass(frozen=True)
class Kind:
    """A family, or a variant of its settings."""

    architecture: str
    tokens: tuple[str, ...]
    images: Mapping[str, Any]
    """preprocessor_config.json"""
    written: str = "<image>"
    """Text that the chat template writes for an image"""
    mark: str = "<image>"
    processor: Mapping[str, Any] = field(default_factory=dict)
    """processor_config.json"""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of config.json"""
    make: Callable[[tuple[str, ...]], Tokenizer] = byte_level


def _qwen(architecture: str, **images: Any) -> Kind:
    written = "<|vision_start|><|image_pad|><|vision_end|>"
    return Kind(architecture, _QWEN_TOKENS, images, written, "<|image_pad|>")


def _glm(architecture: str, **images: Any) -> Kind:
    written = "<|begin_of_image|><|image|><|end_of_image|>"
    return Kind(architecture, _GLM_TOKENS, images, written, "<|image|>")


_GLM_SIZE = {"shortest_edge": 6_272, "longest_edge": 37_632}
_SPLIT = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 8}}
_PIXTRAL = {"size": {"longest_edge": 48}, "patch_size": {"height": 4, "width": 4}}

KINDS: dict[str, Kind] = {
    "llava": Kind(
        "LlavaForConditionalGeneration",
        _LLAVA_TOKENS,
        {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}},
        processor={
            "patch_size": 8,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
        model={"vision_config": {"model_type": "clip_vision_model", "patch_size": 8}},
    ),
    "llava, all features": Kind(
        "LlavaForConditionalGeneration",
        _LLAVA_TOKENS,
        {"image_processor_type": "CLIPImageProcessor", "size": 24, "crop_size": 24},
        processor={
            "patch_size": 8,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "full",
        },
        model={"vision_config": {"model_type": "clip_vision_model"}},
    ),
    "llava, siglip": Kind(
        "LlavaForConditionalGeneration",
        _LLAVA_TOKENS,
        {"image_processor_type": "SiglipImageProcessor", "size": {"height": 16, "width": 24}},
        processor={"patch_size": 8, "vision_feature_select_strategy": "full"},
        model={"vision_config": {"model_type": "siglip_vision_model"}},
    ),
    "llava, pixtral": Kind(
        "LlavaForConditionalGeneration",
        _PIXTRAL_TOKENS,
        _PIXTRAL,
        "[IMG]",
        "[IMG]",
        processor={"patch_size": 4},
        model={"vision_config": {"model_type": "pixtral"}},
    ),
    "mistral3": Kind(
        "Mistral3ForConditionalGeneration",
        _PIXTRAL_TOKENS,
        _PIXTRAL,
        "[IMG]",
        "[IMG]",
        processor={"patch_size": 4, "spatial_merge_size": 2},
        model={"vision_config": {"model_type": "pixtral"}, "spatial_merge_size": 2},
    ),
    "gemma3": Kind(
        "Gemma3ForConditionalGeneration",
        _GEMMA_TOKENS,
        {"size": {"height": 8, "width": 8}, "do_pan_and_scan": None},
        "<start_of_image>",
        "<start_of_image>",
        processor={"image_seq_length": 4},
        model={"mm_tokens_per_image": 4},
    ),
    "gemma3n": Kind(
        "Gemma3nForConditionalGeneration",
        _GEMMA_TOKENS,
        {"image_processor_type": "SiglipImageProcessor", "size": {"height": 8, "width": 8}},
        "<image_soft_token>",
        "<image_soft_token>",
        processor={"image_seq_length": 4},
        model={"vision_soft_tokens_per_image": 4},
    ),
    "gemma4": Kind(
        "Gemma4ForConditionalGeneration",
        _GEMMA4_TOKENS,
        {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70},
        "<|image|>",
        "<|image|>",
    ),
    "gemma4 unified": Kind(
        "Gemma4UnifiedForConditionalGeneration",
        _GEMMA4_TOKENS,
        {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 140},
        "<|image|>",
        "<|image|>",
    ),
    "idefics3": Kind(
        "Idefics3ForConditionalGeneration",
        _IDEFICS_TOKENS,
        _SPLIT,
        processor={"image_seq_len": 3},
    ),
    "idefics3, whole": Kind(
        "Idefics3ForConditionalGeneration",
        _IDEFICS_TOKENS,
        {**_SPLIT, "do_image_splitting": False},
        processor={"image_seq_len": 3},
    ),
    "smolvlm": Kind(
        "SmolVLMForConditionalGeneration",
        _IDEFICS_TOKENS,
        {**_SPLIT, "size": {"longest_edge": 40}},
        processor={"image_seq_len": 2},
    ),
    "qwen2_vl": _qwen(
        "Qwen2VLForConditionalGeneration", min_pixels=64, max_pixels=1024, patch_size=4
    ),
    "qwen2_5_vl": _qwen(
        "Qwen2_5_VLForConditionalGeneration",
        size={"shortest_edge": 128, "longest_edge": 2048},
        patch_size=2,
        merge_size=4,
    ),
    "qwen3_vl": _qwen("Qwen3VLForConditionalGeneration", patch_size=16),
    "exaone4.5": Kind(
        "Exaone4_5_ForConditionalGeneration",
        _EXAONE_TOKENS,
        {"size": {"shortest_edge": 64, "longest_edge": 1024}, "patch_size": 4},
        "<vision><|image_pad|></vision>",
        "<|image_pad|>",
    ),
    "glm4v": _glm("Glm4vForConditionalGeneration", patch_size=14),
    "glm4v moe": _glm("Glm4vMoeForConditionalGeneration", size=_GLM_SIZE),
    "glm4.6v flash": _glm("Glm46VForConditionalGeneration", size=_GLM_SIZE, patch_size=4),
    "glm ocr": _glm("GlmOcrForConditionalGeneration", size=_GLM_SIZE, merge_size=4),
}
for _name in ("llava", "gemma3", "mistral3"):
    KINDS[f"{_name}, bytes"] = replace(KINDS[_name], make=byte_fallback)


@dataclass(frozen=True)
class Seeing:
    """A checkpoint as the service reads it."""

    directory: Path
    vocabulary: Vocabulary
    family: ImageFamily

    def expander(self, *sizes: tuple[int, int]) -> ImageExpander:
        """Return the expander of images with these widths and heights."""
        images = [RequestImage(f"images[{index}]", b"%d" % index) for index in range(len(sizes))]
        expansions = [self.family.expand(ImageSize(*size)) for size in sizes]
        return ImageExpander(self.family, self.vocabulary, images, expansions)


def write_kind(directory: Path, kind: Kind, template: str = _PARTS) -> Path:
    """Write a checkpoint of this kind; return its directory."""
    template = template.replace("MARK", kind.written)
    write_checkpoint(directory, kind.make(kind.tokens), chat_template=template)
    config = json.loads((directory / "config.json").read_text())
    config |= {
        "architectures": [kind.architecture],
        "max_position_embeddings": CONTEXT,
        **kind.model,
    }
    files = {
        "config.json": config,
        "processor_config.json": kind.processor,
        "preprocessor_config.json": kind.images,
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return directory


def seeing(directory: Path) -> Seeing:
    """Return a checkpoint that takes images, read as at a start of the service."""
    settings = read_processor_settings(directory)
    vocabulary = Vocabulary(directory, image_tokens(settings))
    family = read_image_family(settings, vocabulary)
    assert family is not None
    return Seeing(directory, vocabulary, family)


def png(width: int, height: int, colour: str = "red") -> bytes:
    """Return a PNG file of this size."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, "PNG")
    return file.getvalue()
