"""Prompt of a model that scores a pair of texts as an answer to a question (Qwen3-Reranker)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.tokenizer.text.vocabulary import Vocabulary

__all__ = ["PairTemplate"]

_NAME = "rerank"
"""llama.cpp's name of the template"""
_FIRST, _SECOND = "{query}", "{document}"


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """A text with places for both texts of a pair."""

    before: str
    between: str
    after: str

    @staticmethod
    def among(templates: Mapping[str, str]) -> "PairTemplate | None":
        """Return the template for pairs of a checkpoint; None if it has none."""
        before, first, rest = templates.get(_NAME, "").partition(_FIRST)
        between, second, after = rest.partition(_SECOND)
        return PairTemplate(before, between, after) if first and second else None

    def encode(self, vocabulary: Vocabulary, first: str, second: str, most: int) -> Sequence[int]:
        """Return the ids of a pair, at most `most`: the end of the second text is cut."""
        text = f"{self.before}{first}{self.between}{second}{self.after}"
        ids = vocabulary.encode(text, add_special_tokens=False)
        if len(ids) <= most:
            return ids
        end = vocabulary.encode(self.after, add_special_tokens=False)[:most]
        return [*ids[: most - len(end)], *end]

    def least(self, vocabulary: Vocabulary) -> int:
        """Return the number of ids of the template alone."""
        text = f"{self.before}{self.between}{self.after}"
        return len(vocabulary.encode(text, add_special_tokens=False))
