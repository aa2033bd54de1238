"""Shape of multi-head latent attention (MLA, https://arxiv.org/abs/2405.04434)."""

from collections.abc import Set
from dataclasses import dataclass, replace

from services.engine.model.architecture.index_spec import IndexSpec
from services.engine.model.architecture.rotary import RotarySpec

__all__ = ["LatentSpec"]


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Attention whose heads make their keys and values of one latent vector of each token.

    A head's key has a part of its own, made of the latent, and a part that all heads share, which
    alone may rotate. The cache holds the latent and the shared part.
    """

    num_heads: int
    query_width: int
    """Width of the vector that queries are made of; 0: they are made of the residual"""
    latent_width: int
    key_width: int
    """Width of a key's own part"""
    shared_width: int
    """Width of the part that the keys of all heads share"""
    value_width: int
    scale: float
    """Factor on query-key products"""
    rotary: RotarySpec | None
    """RoPE of the shared part and its counterpart in queries; None: there is none"""
    is_interleaved: bool
    """True if the two rows of a RoPE pair are stored side by side rather than half the width
    apart"""
    has_bias: bool
    """True if query vectors, latents and the output have biases"""
    norm_epsilon: float
    """Epsilon of the norms of query vectors and latents"""
    attended_tokens: int = 0
    """Most tokens that a query attends to; 0 = all"""
    query_factor: float = 1.0
    """Factor on normed query vectors"""
    latent_factor: float = 1.0
    """Factor on normed latents"""
    has_output_gate: bool = False
    """True if a sigmoid gate, a product of its own, multiplies each head's output"""
    index: IndexSpec | None = None
    """Indexer that chooses the attended tokens; None: the last layer with an indexer chose them"""

    @property
    def page_width(self) -> int:
        """Count of a token's cached numbers, which serve all heads; an index key comes last."""
        return self.absorbed_width + (0 if self.index is None else self.index.width)

    @property
    def absorbed_width(self) -> int:
        """Count of a token's cached numbers that queries are multiplied with."""
        return self.latent_width + self.shared_width

    @property
    def head_width(self) -> int:
        """Width of a head's query and of its key."""
        return self.key_width + self.shared_width

    @property
    def widths(self) -> Set[int]:
        """Widths of the activations."""
        return {self.query_width, self.latent_width, self.num_heads * self.value_width}

    def expands(self, queries: int) -> bool:
        """Return whether so many queries of a sequence cost less with the keys of each head.

        Products of queries with latents are wider than those with keys, but keys and values must
        be computed from the latents first. The comparison counts multiplications for each head and
        cached token; values are padded to the width of keys, and latents serve as values.
        """
        expansion = self.latent_width * (self.key_width + self.value_width)
        return queries * 2 * self.absorbed_width > queries * 2 * self.head_width + expansion

    def part(self, count: int) -> "LatentSpec":
        """Return the shape of one of `count` equal parts. Raises ValueError if there are none."""
        if self.num_heads % count:
            raise ValueError(f"num_attention_heads ({self.num_heads}) is not a multiple of {count}")
        return replace(self, num_heads=self.num_heads // count)
