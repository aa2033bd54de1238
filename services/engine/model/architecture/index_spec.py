"""Shape of the indexer of sparse attention (DSA, https://arxiv.org/abs/2512.02556)."""

from dataclasses import dataclass

__all__ = ["IndexSpec"]


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """Indexer: small attention without values, whose scores choose the tokens a layer attends to.

    All its heads share one key of each token, which the cache holds beside the latent.
    """

    num_heads: int
    width: int
    """Width of a head's query and of the key; the first numbers rotate, as many as in a latent"""
    is_interleaved: bool
    """True if the two rows of a RoPE pair are stored side by side rather than half the width
    apart"""
