"""Tokens of each sequence whose keys and values the pages of a draft model hold.

The draft model has pages of its own, one for each block of the first cache group, so that the block
table of a sequence serves both models. It computes tokens later than the model, or never. Each full
block of its pages is known by the hash of its content, so that sequences with a common prefix
compute this prefix once.

A draft head also needs hidden states of the model, which are kept for a while alone. A sequence for
which they are gone gets a shorter context: the head sees it from a later block on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.engine.scheduling.draft_plan import DraftPart
from services.engine.scheduling.sequence import TokenSequence

__all__ = ["DraftPages", "HeadPages", "SharedPages"]


@dataclass(slots=True, eq=False)
class _Progress:
    """Tokens of one running sequence that the draft model has computed."""

    count: int = 0
    """Number of computed tokens that belong to the sequence"""
    full: int = 0
    """Number of full blocks whose content is recorded"""
    guessed: Sequence[int] = ()
    """Draft tokens that were computed behind them"""
    first_block: int = 0
    """Number of blocks at the sequence's beginning that a head never sees"""


class DraftPages:
    """Owner of the knowledge about the draft model's pages."""

    _shift = 0
    """Number of tokens whose page is written by an earlier token's row: the first block is full
    once so many tokens more than its size are computed"""

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
        progress.count = max(progress.count, self._shift)
        if progress.first_block:
            return progress.count  # other sequences must not take these blocks for complete ones
        for index in range(progress.full, (progress.count - self._shift) // self._size):
            self._contents[blocks[index]] = sequence.block_hash(index)
            progress.full = index + 1
        while (progress.full + 1) * self._size + self._shift < sequence.length and (
            self._contents.get(blocks[progress.full]) == sequence.block_hash(progress.full)
        ):
            progress.full += 1
            progress.count = progress.full * self._size + self._shift
        return progress.count

    def first_block(self, sequence: TokenSequence) -> int:
        """Return the number of blocks at a sequence's beginning that are never seen."""
        return self._progress[sequence].first_block

    def can_continue(self, sequence: TokenSequence) -> bool:
        """Return whether the tokens of a sequence that the pages lack can be computed."""
        return True

    def write(self, part: DraftPart, guessed: Sequence[int]) -> None:
        """Note that a part's tokens, and these draft tokens behind them, are computed.

        A draft that ends early has fewer of them than passes, all of which have written a token.
        `count_computed` must have been called since the sequence's last token.
        """
        progress = self._progress[part.sequence]
        blocks = part.sequence.tables[0].blocks
        last = (part.end + max(part.length, 1) - 2) // self._size
        for block in blocks[max(progress.count - self._shift, 0) // self._size : last + 1]:
            self._contents.pop(block, None)
        progress.count, progress.guessed = part.end, guessed

    def leave(self, sequence: TokenSequence) -> None:
        """Note that a sequence gives its blocks back. Their contents stay known."""
        self._progress.pop(sequence, None)


class HeadPages(DraftPages):
    """Knowledge about a head's pages, and about the hidden states that are kept for it.

    The row of a token needs the next token, and layer k of several layers the k-th one behind. So
    the last rows of a block are those of the sequence which computed them first; sequences that
    continue the block differently share it all the same.
    """

    _shift = 1

    def __init__(self, block_size: int, layers: int = 1) -> None:
        """layers: number of layers that make a draft token each, as in `DraftLimits`."""
        super().__init__(block_size)
        self._layers = layers
        self._firsts: dict[TokenSequence, int] = {}
        """Index of the first token of each sequence whose hidden states are kept"""

    def note_states(self, firsts: Mapping[TokenSequence, int]) -> None:
        """Take the index of the first token whose hidden states are kept, by sequence."""
        self._firsts.update(firsts)

    def forget_states(self) -> None:
        """Note that hidden states are no longer kept."""
        self._firsts.clear()

    def count_computed(self, sequence: TokenSequence) -> int:
        """Return how many tokens the head has computed, and the first one that it never sees.

        Its context moves to a later block if hidden states in between are gone.
        """
        count = super().count_computed(sequence)
        first = self._firsts.get(sequence, sequence.length)
        if count - 1 >= first:
            return count
        progress = self._progress[sequence]
        block = -(-first // self._size)
        progress.first_block = progress.full = block
        progress.count = block * self._size + 1
        return progress.count

    def can_continue(self, sequence: TokenSequence) -> bool:
        return self.count_computed(sequence) < sequence.length

    def write(self, part: DraftPart, guessed: Sequence[int]) -> None:
        """Do the same as a draft model's pages, but the draft tokens are computed again.

        Their rows come from hidden states that the head has made itself. So are the last rows of
        several layers, which need tokens that are not known yet.
        """
        progress = self._progress[part.sequence]
        before = progress.count
        super().write(part, guessed)
        progress.count, progress.guessed = max(before, part.end - self._layers + 1), ()

    def leave(self, sequence: TokenSequence) -> None:
        super().leave(sequence)
        self._firsts.pop(sequence, None)


class SharedPages(HeadPages):
    """Knowledge about the hidden states for an assistant, which reads the model's own pages."""

    def count_computed(self, sequence: TokenSequence) -> int:
        """Return the number of the tokens before the newest one."""
        return sequence.length - 1

    def first_block(self, sequence: TokenSequence) -> int:
        return 0

    def can_continue(self, sequence: TokenSequence) -> bool:
        """Return whether the hidden states of the token before the newest one are kept."""
        return self._firsts.get(sequence, sequence.length) < sequence.length - 1

    def write(self, part: DraftPart, guessed: Sequence[int]) -> None:
        """Do nothing: an assistant writes no pages."""
