"""Form in which a family of models writes images into its prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Expansion", "ImageFamily", "ImageSize"]


@dataclass(frozen=True, slots=True)
class ImageSize:
    """Size of an image in pixels."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Expansion:
    """Text that takes the place of one image's mark. Each of its placeholders stands for a run."""

    core: str
    """Text between control tokens, so that its ids do not depend on the text around it"""
    run: int
    """Number of placeholders in each run, at least 1"""
    before: str = ""
    """Text in front of the core, which the tokenizer may join to the prompt's text"""
    after: str = ""

    @property
    def text(self) -> str:
        """The whole text, with one placeholder for each run."""
        return self.before + self.core + self.after


@dataclass(frozen=True, slots=True)
class ImageFamily:
    """Marks and tokens of images in one checkpoint."""

    placeholder: str
    """Text of the token whose embedding a part of an image replaces"""
    placeholder_id: int
    mark: str
    """Text that the model's processor replaces by an image's tokens"""
    generic: str
    """Text that "<image>" stands for in completions. It contains `mark` once."""
    control_tokens: Sequence[str]
    """Texts of the tokens that only the expansion of an image may hold"""
    expand: Callable[[ImageSize], Expansion]
    """Function that returns the expansion for an image, or raises ImageError for its size"""
