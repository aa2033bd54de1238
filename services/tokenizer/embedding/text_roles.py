"""Encoding of queries and documents for models with vectors of tokens (late interaction)."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.tokenizer.text.vocabulary import FramedText
from tokenwire.pb.engine.v1 import engine_pb2

__all__ = ["PLAIN", "Expansion", "TextRole"]


@dataclass(frozen=True, slots=True)
class Expansion:
    """Tokens behind a short query that take part in its score."""

    token: int
    length: int
    """Tokens that an expanded query has"""
    is_attended: bool
    """True if the tokens of the query attend to the tokens of the expansion"""


@dataclass(frozen=True, slots=True)
class TextRole:
    """Encoding of one side of a pair of texts."""

    prefix: str = ""
    """Text before each text"""
    marker: int | None = None
    """Id before the text and the prefix, behind the tokenizer's special tokens; None = no id"""
    most: int | None = None
    """Tokens to keep of each text; None = longer texts than the context are refused"""
    expansion: Expansion | None = None
    skipped: frozenset[int] = frozenset()
    """Ids whose vectors take no part in scores"""

    @property
    def num_added(self) -> int:
        """Tokens that `arranged` adds to each text."""
        return int(self.marker is not None)

    def arranged(
        self, framed: FramedText, ids: Sequence[int], context_length: int
    ) -> engine_pb2.EmbeddedPrompt:
        """Return the prompt of a text. ids: its ids, which have been cut already."""
        arranged = list(ids)
        if self.marker is not None:
            begin = next((at for at, part in enumerate(framed.parts) if part is not None), 0)
            arranged.insert(min(begin, len(ids)), self.marker)
        expansion = self.expansion
        if expansion is None:
            return engine_pb2.EmbeddedPrompt(ids=arranged)
        added = max(0, min(expansion.length, context_length) - len(arranged))
        hidden = 0 if expansion.is_attended else added
        arranged += [expansion.token] * added
        return engine_pb2.EmbeddedPrompt(ids=arranged, unattended_length=hidden)

    def keeps(self, ids: Sequence[int]) -> list[bool]:
        """Return for each id whether its vector takes part in scores."""
        return [token not in self.skipped for token in ids]


PLAIN = TextRole()
"""Encoding of texts as they are"""
