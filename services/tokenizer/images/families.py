"""Vision-language architectures, and the form in which each writes images."""

import logging
from collections.abc import Callable, Mapping

from services.tokenizer.images.gemma3 import read_gemma3, read_gemma3n
from services.tokenizer.images.gemma4 import read_gemma4
from services.tokenizer.images.idefics3 import read_idefics3
from services.tokenizer.images.image_family import ImageFamily
from services.tokenizer.images.image_tokens import ImageTokens
from services.tokenizer.images.llava import read_llava
from services.tokenizer.images.pixtral import read_pixtral
from services.tokenizer.images.processor_settings import ProcessorSettings
from services.tokenizer.images.qwen_vl import read_exaone, read_glm4v, read_qwen_vl
from services.tokenizer.text.section import SettingsError
from services.tokenizer.text.vocabulary import Vocabulary

__all__ = ["image_tokens", "read_image_family"]

_LOG = logging.getLogger("images")
_Reader = Callable[[ProcessorSettings, ImageTokens], ImageFamily]


def _read_llava_or_pixtral(settings: ProcessorSettings, tokens: ImageTokens) -> ImageFamily:
    is_pixtral = settings.vision.text("model_type", "") == "pixtral"
    return (read_pixtral if is_pixtral else read_llava)(settings, tokens)


_READERS: Mapping[str, _Reader] = {
    "Exaone4_5_ForConditionalGeneration": read_exaone,
    "Gemma3ForConditionalGeneration": read_gemma3,
    "Gemma3nForConditionalGeneration": read_gemma3n,
    "Gemma4ForConditionalGeneration": read_gemma4,
    "Gemma4UnifiedForConditionalGeneration": read_gemma4,
    "Glm46VForConditionalGeneration": read_glm4v,
    "Glm4vForConditionalGeneration": read_glm4v,
    "Glm4vMoeForConditionalGeneration": read_glm4v,
    "GlmOcrForConditionalGeneration": read_glm4v,
    "Idefics3ForConditionalGeneration": read_idefics3,
    "LlavaForConditionalGeneration": _read_llava_or_pixtral,
    "Mistral3ForConditionalGeneration": read_pixtral,
    "Qwen2VLForConditionalGeneration": read_qwen_vl,
    "Qwen2_5_VLForConditionalGeneration": read_qwen_vl,
    "Qwen3VLForConditionalGeneration": read_qwen_vl,
    "Qwen3VLMoeForConditionalGeneration": read_qwen_vl,
    "Qwen3_5ForConditionalGeneration": read_qwen_vl,
    "Qwen3_5MoeForConditionalGeneration": read_qwen_vl,
    "SmolVLMForConditionalGeneration": read_idefics3,
}
"""Readers by architecture, as in config.json"""


_TOKENS = frozenset({
    "<image>", "<image_soft_token>", "<start_of_image>", "<end_of_image>",
    "<fake_token_around_image>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "[IMG]",
    "[IMG_BREAK]", "[IMG_END]", "<|image|>", "<|image>", "<image|>",
    "<|begin_of_image|>", "<|end_of_image|>", "<vision>", "</vision>",
})  # fmt: skip


def image_tokens(settings: ProcessorSettings) -> frozenset[str]:
    """Return texts of tokens that no user's message may hold if the checkpoint takes images."""
    return _TOKENS if settings.architecture in _READERS else frozenset()


def read_image_family(settings: ProcessorSettings, vocabulary: Vocabulary) -> ImageFamily | None:
    """Return the form of images in a checkpoint; None if it takes text alone.

    If the files of a vision-language checkpoint do not say how it writes images, this is logged and
    the checkpoint serves text.
    """
    reader = _READERS.get(settings.architecture)
    if reader is None:
        return None
    try:
        if not settings.images.values:
            raise SettingsError("the checkpoint has no preprocessor_config.json.")
        family = reader(settings, ImageTokens(settings.model, vocabulary.ids))
        _check_tokens(family, vocabulary)
        return family
    except SettingsError as error:
        _LOG.warning("requests with images are refused: %s", error)
        return None


def _check_tokens(family: ImageFamily, vocabulary: Vocabulary) -> None:
    """Raise SettingsError if messages could contain an image's tokens, or the engine lacks them."""
    for token in family.control_tokens:
        if token not in vocabulary.control_tokens:
            raise SettingsError(f"the tokenizer's {token} is not a special token.")
    if family.placeholder_id >= vocabulary.model_vocabulary_size > 0:
        raise SettingsError(f"the embedding has no row for {family.placeholder}.")
