"""A chunk of one sequence's prompt, as the kernels for long prompts read it."""

from dataclasses import dataclass

from torch import Tensor

__all__ = ["PromptChunk"]


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """The newest tokens of a sequence, each of which sees the keys up to its own."""

    queries: Tensor
    """[n, heads, head_dim], where only rows may have gaps"""
    keys: Tensor | None
    """Keys of these tokens, [n, kv_heads, head_dim], where only rows may have gaps; None: only the
    pages hold them"""
    values: Tensor | None
    """[n, kv_heads, value_dim], like the keys"""
    key_pages: Tensor
    """Contiguous [pages, page, kv_heads, head_dim], or in FP8 as of `fp8_pages.numbers_of`"""
    value_pages: Tensor
    """[pages, page, kv_heads, value_dim], like those of keys"""
    table: Tensor
    """int32 [columns], the sequence's pages in order"""
    context: int
    """Number of the sequence's tokens, those of the chunk included"""
    sinks: Tensor | None
    """float32 [heads], one more logit in each head's softmax; None: there are none"""
    out: Tensor
    """Contiguous [n, heads, value_dim], filled with the result"""

    @property
    def prefix(self) -> int:
        """Number of the tokens before the chunk."""
        return self.context - len(self.queries)
