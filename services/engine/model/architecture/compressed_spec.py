"""Shape of attention to a window and compressed entries (DeepSeek V4's sliding, CSA and HCA)."""

from collections.abc import Set
from dataclasses import dataclass, replace

from services.engine.model.architecture.index_spec import IndexSpec
from services.engine.model.architecture.rotary import RotarySpec

__all__ = ["CompressedSpec", "CompressionSpec"]


@dataclass(frozen=True, slots=True)
class CompressionSpec:
    """Compression of each `rate` tokens to one entry."""

    rate: int
    overlaps: bool
    """True if an entry is made of the `rate` tokens before its own, too"""
    index: IndexSpec | None
    """Indexer that chooses the attended entries; None = all are attended"""
    attended_entries: int = 0
    """Most entries that an indexer chooses"""

    @property
    def series(self) -> int:
        """Number of vectors of a token: one for its own entry, one for the next if they overlap."""
        return 2 if self.overlaps else 1

    @property
    def tokens(self) -> int:
        """Number of tokens that an entry is made of."""
        return self.series * self.rate


@dataclass(frozen=True, slots=True)
class CompressedSpec:
    """Attention to the last tokens and to entries that stand for earlier ones.

    All heads share one vector of each token or entry, which is key and value. Its last numbers
    rotate, and those of the output rotate back.
    """

    num_heads: int
    head_dim: int
    query_width: int
    """Width of the vector that queries are made of"""
    window: int
    """Number of tokens that a token sees, itself included"""
    kept_tokens: int
    """Number of last tokens whose pages are kept, equal in all layers so that they share blocks"""
    scale: float
    """Factor on query-key products"""
    rotary: RotarySpec
    rotary_width: int
    groups: int
    """Number of groups of heads; the outputs of each are first multiplied apart"""
    group_width: int
    """Width of the product of a group's outputs"""
    norm_epsilon: float
    compression: CompressionSpec | None
    """Compression of earlier tokens; None = there are no entries"""

    @property
    def compressed_width(self) -> int:
        """Count of a token's numbers that entries' vectors are made of: vectors, then scores."""
        return 0 if self.compression is None else 2 * self.compression.series * self.head_dim

    @property
    def index_width(self) -> int:
        """Count of a token's numbers that entries' index keys are made of: keys, then scores."""
        if self.compression is None or self.compression.index is None:
            return 0
        return 2 * self.compression.series * self.compression.index.width

    @property
    def page_width(self) -> int:
        """Count of numbers that the cache holds of a token."""
        return self.head_dim + self.compressed_width + self.index_width

    @property
    def entry_width(self) -> int:
        """Count of numbers that the cache holds of an entry: an index key comes last."""
        if self.compression is None:
            return 0
        index = self.compression.index
        return self.head_dim + (0 if index is None else index.width)

    def entries_in(self, block_size: int) -> int:
        """Return how many entries a block of so many tokens has room for.

        An entry lies in the block of its last token.
        """
        return 0 if self.compression is None else -(-block_size // self.compression.rate)

    @property
    def widths(self) -> Set[int]:
        """Widths of the activations."""
        return {self.query_width, self.groups * self.group_width}

    def part(self, count: int) -> "CompressedSpec":
        """Return the shape of one of `count` equal parts. Raises ValueError if there are none."""
        if self.groups % count:
            raise ValueError(f"o_groups ({self.groups}) is not a multiple of {count}")
        return replace(self, num_heads=self.num_heads // count, groups=self.groups // count)
