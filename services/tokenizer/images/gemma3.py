"""Gemma 3 and 3n: a fixed number of tokens between marks, with blank lines around them.

Sources: transformers' `Gemma3Processor`, which never crops ("pan and scan") by itself, and
`Gemma3nProcessor`.
"""

from services.tokenizer.images.image_family import Expansion, ImageFamily
from services.tokenizer.images.image_tokens import ImageTokens
from services.tokenizer.images.processor_settings import ProcessorSettings

__all__ = ["read_gemma3", "read_gemma3n"]

_RUN = 256
_BLANK_LINE = "\n\n"


def read_gemma3(settings: ProcessorSettings, tokens: ImageTokens) -> ImageFamily:
    """Return the family of a Gemma 3 checkpoint. Raises SettingsError."""
    begin = tokens.text("<start_of_image>", "boi_token_id", "boi_token_index")
    return _read(settings, tokens, begin, begin, "mm_tokens_per_image")


def read_gemma3n(settings: ProcessorSettings, tokens: ImageTokens) -> ImageFamily:
    """Return the family of a Gemma 3n checkpoint. Raises SettingsError."""
    begin = tokens.text("<start_of_image>", "boi_token_id")
    return _read(settings, tokens, begin, _soft(tokens), "vision_soft_tokens_per_image")


def _read(
    settings: ProcessorSettings, tokens: ImageTokens, begin: str, mark: str, run_key: str
) -> ImageFamily:
    """Return a family. run_key: key of config.json with the number of an image's tokens."""
    soft = _soft(tokens)
    end = tokens.text("<end_of_image>", "eoi_token_id", "eoi_token_index")
    run = settings.processor.count("image_seq_length") or settings.model.count(run_key)
    expansion = Expansion(f"{begin}{soft}{end}", run or _RUN, _BLANK_LINE, _BLANK_LINE)
    return ImageFamily(
        soft, tokens.id(soft), mark, mark, (soft, begin, end), lambda size: expansion
    )


def _soft(tokens: ImageTokens) -> str:
    return tokens.text("<image_soft_token>", "image_token_id", "image_token_index")
