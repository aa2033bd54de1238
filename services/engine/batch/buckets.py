"""Sizes to which steps on a GPU are padded.

Each size needs its own CUDA graphs, and a decode step its own compiled attention kernel, so there
are few sizes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

__all__ = [
    "MIXED_TOKENS",
    "MixedSize",
    "decode_sizes",
    "least_size",
    "mixed_sizes",
    "outweighs_graph",
    "row_bucket",
    "table_width",
]

MIXED_TOKENS = (16, 32, 64, 128, 256, 384, 512, 768, 1024)
"""Padded numbers of tokens of steps with chunks, ascending. Up to a few hundred tokens, padding
costs a GPU no time; a larger step takes longer than its launches, so it needs no graphs"""

_LONG_CHUNK = 512
"""Least tokens of a long chunk"""
_MOST_PAIRS = 1 << 23
"""Most product of a long chunk's tokens and its context in a graph. Beyond it, an attention kernel
for long chunks, which no graph holds, saves more time than the graph"""
_MIXED_ROWS = (32, 256)
"""Padded numbers of sequences of such steps, beside the largest. Attention's launches have programs
for all of them, and those of padding end at once"""
_LEAST_MIXED_WIDTH = 64
"""Number of columns of the narrowest block tables of such steps"""
_MOST_MIXED = 96
"""Most sizes of such steps: each takes a graph or two, some MB of a GPU's memory"""
_DENSE = 16
"""Number of rows above which there is one more size between two powers of two"""
_LEAST_WIDTH = 16
"""Number of columns of the narrowest block tables: 1,024 tokens in blocks of 64"""


def row_bucket(rows: int) -> int:
    """Return the least of 1, 2, 4, 8, 16, 24, 32, 48, 64, … that is at least `rows`."""
    power = 1 << (rows - 1).bit_length()
    between = power * 3 // 4
    return between if power > _DENSE and rows <= between else power


def table_width(blocks: int) -> int:
    """Return the columns of block tables whose longest row has `blocks`: 16, 64, 256, …"""
    width = _LEAST_WIDTH
    while width < blocks:
        width *= 4
    return width


def decode_sizes(most_rows: int, most_blocks: int, num_blocks: int) -> list[tuple[int, int]]:
    """Return rows and table widths of all padded decode steps that can occur, largest first.

    most_blocks: number of blocks of the longest sequence. num_blocks: number of blocks of the KV
    cache, which must hold the blocks of all rows.
    """
    widths = list(_up_to(table_width(most_blocks), lambda width: table_width(width + 1)))
    sizes = []
    rows_before = 0
    for rows in _up_to(row_bucket(most_rows), lambda rows: row_bucket(rows + 1)):
        for before, width in zip((0, *widths), widths, strict=False):
            # the smallest step of this size has one long row, and one block in each other row
            if before + 1 + rows_before <= num_blocks:
                sizes.append((rows, width))
        rows_before = rows
    return sorted(sizes, reverse=True)


@dataclass(frozen=True, slots=True, order=True)
class MixedSize:
    """Size to which a step with chunks is padded."""

    tokens: int
    sequences: int
    """Number of sequences, and of rows whose hidden states the step returns"""
    width: int
    """Columns of the block tables"""

    @property
    def most_chunks(self) -> int:
        """Most sequences that don't decode; others have two tokens or more, with few exceptions."""
        return min(self.sequences, self.tokens // 2)

    def holds(self, tokens: int, sequences: int, chunks: int, blocks: int) -> bool:
        """Return whether a step fits.

        sequences: number of sequences or of output rows, whichever is larger; chunks: number of
        sequences that don't decode; blocks: those of the longest sequence.
        """
        fits = tokens <= self.tokens and sequences <= self.sequences
        return fits and chunks <= self.most_chunks and blocks <= self.width


def mixed_sizes(most_tokens: int, most_rows: int, most_blocks: int) -> list[MixedSize]:
    """Return the sizes of padded steps with chunks, largest first.

    most_tokens: number of tokens of the largest step; most_rows: most sequences or output rows;
    most_blocks: number of blocks of the longest sequence. Of too many sizes, those with the widest
    tables are left out.
    """
    first, last = _LEAST_MIXED_WIDTH, max(table_width(most_blocks), _LEAST_MIXED_WIDTH)
    widths = _up_to(last, lambda width: max(table_width(width + 1), first))
    sizes = [
        MixedSize(tokens, sequences, width)
        for width in widths
        for tokens in MIXED_TOKENS
        if tokens <= most_tokens
        for sequences in sorted({min(each, tokens, most_rows) for each in (*_MIXED_ROWS, tokens)})
    ]
    return sorted(sizes[:_MOST_MIXED], reverse=True)


def least_size(
    sizes: Sequence[MixedSize], tokens: int, sequences: int, chunks: int, blocks: int
) -> MixedSize | None:
    """Return the least size that holds a step; None if none does.

    sizes: largest first. The others are parameters of `MixedSize.holds`.
    """
    fitting = (each for each in reversed(sizes) if each.holds(tokens, sequences, chunks, blocks))
    return next(fitting, None)


def outweighs_graph(tokens: int, context: int) -> bool:
    """Return whether the attention of a chunk of `tokens` tokens has faster kernels than a graph's.

    context: number of the sequence's tokens up to the chunk's last.
    """
    return tokens >= _LONG_CHUNK and tokens * context > _MOST_PAIRS


def _up_to(last: int, following: Callable[[int], int]) -> Iterator[int]:
    size = following(0)
    while size < last:
        yield size
        size = following(size)
    yield last
