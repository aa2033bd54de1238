"""Processors of transformers for tiny checkpoints: the reference for expansions.

Some refuse to be constructed, or imported, without torchvision, which their texts do not need.
"""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from PIL import Image
from transformers import PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.exaone4_5.processing_exaone4_5 import Exaone4_5_Processor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma3n.processing_gemma3n import Gemma3nProcessor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.pixtral import image_processing_pil_pixtral
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor

from tests.unit.tokenizer.images.checkpoints import Kind, Seeing

__all__ = ["reference_ids"]

_Images = Sequence[Image.Image]
_PIXTRAL = "transformers.models.pixtral."
_IMAGE_PROCESSORS: Mapping[str, Any] = {
    "CLIPImageProcessor": CLIPImageProcessorPil,
    "SiglipImageProcessor": SiglipImageProcessorPil,
}


def reference_ids(kind: Kind, checkpoint: Seeing, text: str, images: _Images) -> list[int]:
    """Return the ids of a text with images by the processor of this kind."""
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_file=str(checkpoint.directory / "tokenizer.json"), bos_token="<s>"
    )
    if kind.model.get("vision_config", {}).get("model_type") == "pixtral":
        return _pixtral(kind, tokenizer, text, images)
    ids: list[int] = _PROCESSORS[kind.architecture](kind, tokenizer, text, images)
    return ids


def _llava(kind: Kind, tokenizer: Any, text: str, images: _Images) -> Any:
    name = kind.images.get("image_processor_type", "")
    image_processor = _IMAGE_PROCESSORS.get(name, LlavaImageProcessorPil)(**kind.images)
    processor: Any = LlavaProcessor
    return processor(image_processor, tokenizer, **kind.processor)(images=list(images), text=text)[
        "input_ids"
    ][0]


def _gemma3(kind: Kind, tokenizer: Any, text: str, images: _Images) -> Any:
    for name, token in {
        "boi": "<start_of_image>",
        "eoi": "<end_of_image>",
        "image": "<image_soft_token>",
    }.items():
        setattr(tokenizer, f"{name}_token", token)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
    processor = Gemma3Processor(Gemma3ImageProcessorPil(**kind.images), tokenizer, **kind.processor)
    return processor(images=list(images), text=text)["input_ids"][0]


def _gemma3n(kind: Kind, tokenizer: Any, text: str, images: _Images) -> list[int]:
    processor: Any = object.__new__(Gemma3nProcessor)
    processor.image_token = "<image_soft_token>"
    run = processor.image_token * kind.processor["image_seq_length"]
    processor.full_image_sequence = f"\n\n<start_of_image>{run}<end_of_image>\n\n"
    return _replaced(processor, {}, tokenizer, text, images)


def _gemma4(kind: Kind, tokenizer: Any, text: str, images: _Images) -> list[int]:
    processor: Any = object.__new__(Gemma4Processor)
    processor.image_token = "<|image|>"
    processor.boi_token = "<|image>"
    processor.eoi_token = "<image|>"
    inputs = Gemma4ImageProcessorPil(**kind.images)(list(images))
    return _replaced(processor, inputs, tokenizer, text, images)


def _idefics3(kind: Kind, tokenizer: Any, text: str, images: _Images) -> Any:
    processor = Idefics3Processor(
        Idefics3ImageProcessorPil(**kind.images), tokenizer, **kind.processor
    )
    return processor(images=list(images), text=text)["input_ids"][0]


def _smolvlm(kind: Kind, tokenizer: Any, text: str, images: _Images) -> list[int]:
    processor: Any = object.__new__(SmolVLMProcessor)
    processor.image_token = "<image>"
    processor.fake_image_token = "<fake_token_around_image>"
    processor.global_image_token = "<global-img>"
    processor.image_seq_len = kind.processor["image_seq_len"]
    image_processor: Any = SmolVLMImageProcessorPil(**kind.images)
    inputs = image_processor([list(images)], return_row_col_info=True)
    return _replaced(processor, inputs, tokenizer, text, images)


def _qwen(processor_class: type) -> Callable[[Kind, Any, str, _Images], list[int]]:
    def process(kind: Kind, tokenizer: Any, text: str, images: _Images) -> list[int]:
        processor: Any = object.__new__(processor_class)
        processor.image_token = "<|image_pad|>"
        processor.image_processor = Qwen2VLImageProcessorPil(**kind.images)
        inputs = processor.image_processor(list(images))
        return _replaced(processor, inputs, tokenizer, text, images)

    return process


def _glm(kind: Kind, tokenizer: Any, text: str, images: _Images) -> list[int]:
    processor: Any = object.__new__(Glm4vProcessor)
    processor.image_token = "<|image|>"
    processor.image_processor = Glm46VImageProcessorPil(**kind.images)
    inputs = processor.image_processor(list(images))
    return _replaced(processor, inputs, tokenizer, text, images)


def _pixtral(kind: Kind, tokenizer: Any, text: str, images: _Images) -> list[int]:
    sys.modules.setdefault(_PIXTRAL + "image_processing_pixtral", image_processing_pil_pixtral)
    module = importlib.import_module(_PIXTRAL + "processing_pixtral")
    processor: Any = object.__new__(module.PixtralProcessor)
    processor.image_token = "[IMG]"
    processor.image_break_token = "[IMG_BREAK]"
    processor.image_end_token = "[IMG_END]"
    processor.patch_size = kind.processor["patch_size"]
    processor.spatial_merge_size = kind.processor.get("spatial_merge_size", 1)
    image_processor: Any = image_processing_pil_pixtral.PixtralImageProcessorPil(**kind.images)
    edge = processor.patch_size * processor.spatial_merge_size
    inputs = image_processor(list(images), patch_size=edge)
    return _replaced(processor, inputs, tokenizer, text, images)


def _replaced(processor: Any, inputs: Any, tokenizer: Any, text: str, images: _Images) -> list[int]:
    replacements = [processor.replace_image_token(inputs, index) for index in range(len(images))]
    texts, _ = processor.get_text_with_replacements([text], replacements)
    ids: list[int] = tokenizer(texts[0])["input_ids"]
    return ids


_PROCESSORS: Mapping[str, Callable[[Kind, Any, str, _Images], Any]] = {
    "LlavaForConditionalGeneration": _llava,
    "Gemma3ForConditionalGeneration": _gemma3,
    "Exaone4_5_ForConditionalGeneration": _qwen(Exaone4_5_Processor),
    "Gemma3nForConditionalGeneration": _gemma3n,
    "Gemma4ForConditionalGeneration": _gemma4,
    "Gemma4UnifiedForConditionalGeneration": _gemma4,
    "Glm46VForConditionalGeneration": _glm,
    "Glm4vForConditionalGeneration": _glm,
    "Glm4vMoeForConditionalGeneration": _glm,
    "GlmOcrForConditionalGeneration": _glm,
    "Idefics3ForConditionalGeneration": _idefics3,
    "SmolVLMForConditionalGeneration": _smolvlm,
    "Qwen2VLForConditionalGeneration": _qwen(Qwen2VLProcessor),
    "Qwen2_5_VLForConditionalGeneration": _qwen(Qwen2_5_VLProcessor),
    "Qwen3VLForConditionalGeneration": _qwen(Qwen3VLProcessor),
    "Qwen3_5ForConditionalGeneration": _qwen(Qwen3VLProcessor),
    "Qwen3_5MoeForConditionalGeneration": _qwen(Qwen3VLProcessor),
}
