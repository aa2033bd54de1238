"""Tokens of each sequence whose keys and values the pages of a draft model hold.

The draft model has pages of its own, one for each block of the first cache group, so that the block
table of a sequence serves both models. It computes tokens later than the model, or never. Each full
block of its pages is known by the hash of its content, so that sequences with a common prefix
compute this prefix once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.engine.scheduling.sequence import TokenSequence

__all__ = ["DraftPages"]


@dataclass(slots=True, eq=False)
class _Progress:
    """Tokens of one running sequence that the draft model has computed."""

    count: int = 0
    """Number of computed tokens that belong to the sequence"""
    full: int = 0
    """Number of full blocks whose content is recorded"""
    guessed: Sequence[int] = ()
    """Draft tokens that were computed behind them"""


class DraftPages:
    """Owner of the knowledge about the draft model's pages."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._contents: dict[int, bytes] = {}
        """Hash of the tokens of each full block that the pages hold"""
        self._progress: dict[TokenSequence, _Progress] = {}

    def count_computed(self, sequence: TokenSequence) -> int:
        """Return how many tokens of a running sequence the pages hold, the newest never among them.

        The newest token is always computed again, for the logits behind it.
        """
        progress = self._progress.setdefault(sequence, _Progress())
        drawn = sequence.tokens[progress.count : -1].tolist()
        for guessed, token in zip(progress.guessed, drawn, strict=False):
            if guessed != token:
                break
            progress.count += 1
        progress.guessed = ()
        blocks = sequence.tables[0].blocks
        for index in range(progress.full, progress.count // self._size):
            self._contents[blocks[index]] = sequence.block_hash(index)
            progress.full = index + 1
        while (progress.full + 1) * self._size < sequence.length and self._contents.get(
            blocks[progress.full]
        ) == sequence.block_hash(progress.full):
            progress.full += 1
            progress.count = progress.full * self._size
        return progress.count

    def write(self, sequence: TokenSequence, end: int, guessed: Sequence[int]) -> None:
        """Note that tokens up to the one before `end`, and these draft tokens behind, are computed.

        `count_computed` must have been called since the sequence's last token.
        """
        progress = self._progress[sequence]
        blocks = sequence.tables[0].blocks
        last = (end + len(guessed) - 1) // self._size
        for block in blocks[progress.count // self._size : last + 1]:
            self._contents.pop(block, None)
        progress.count, progress.guessed = end, guessed

    def leave(self, sequence: TokenSequence) -> None:
        """Note that a sequence gives its blocks back. Their contents stay known."""
        self._progress.pop(sequence, None)
