"""Gemma 3: a fixed number of tokens between marks, with blank lines around them.

Source: transformers' `Gemma3Processor`, which never crops ("pan and scan") by itself.
"""

from services.tokenizer.images.image_family import Expansion, ImageFamily
from services.tokenizer.images.image_tokens import ImageTokens
from services.tokenizer.images.processor_settings import ProcessorSettings

__all__ = ["read_gemma3"]

_RUN = 256
_BLANK_LINE = "\n\n"


def read_gemma3(settings: ProcessorSettings, tokens: ImageTokens) -> ImageFamily:
    """Return the family of a Gemma 3 checkpoint. Raises SettingsError."""
    soft = tokens.text("<image_soft_token>", "image_token_id", "image_token_index")
    begin = tokens.text("<start_of_image>", "boi_token_id", "boi_token_index")
    end = tokens.text("<end_of_image>", "eoi_token_id", "eoi_token_index")
    run = settings.processor.count("image_seq_length") or settings.model.count(
        "mm_tokens_per_image"
    )
    expansion = Expansion(f"{begin}{soft}{end}", run or _RUN, _BLANK_LINE, _BLANK_LINE)
    return ImageFamily(
        soft, tokens.id(soft), begin, begin, (soft, begin, end), lambda size: expansion
    )
