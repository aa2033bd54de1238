"""Weights of the vocabulary's tokens from the hidden states of a text (SPLADE)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from services.engine.model.checkpoint.sentence_modules import LexicalPooling

__all__ = ["LexicalHead"]

_TOKENS_AT_ONCE = 128
"""Number of tokens whose logits are in memory at a time"""


@dataclass(frozen=True, slots=True)
class LexicalHead:
    """Head of a masked language model, and the pooling of its logits, in float32.

    Source: Formal et al., "SPLADE v2: Sparse Lexical and Expansion Model for Information
    Retrieval", 2021.
    """

    stages: tuple[Callable[[Tensor], Tensor], ...]
    weight: Tensor
    """[vocab_size, hidden_size]"""
    bias: Tensor | None
    """[vocab_size]"""
    pooling: LexicalPooling

    def pooled(self, states: Tensor) -> Tensor:
        """Return float32 [vocab_size] for the states of a text's tokens, [tokens, hidden_size]."""
        total = torch.zeros(len(self.weight), device=states.device)
        for start in range(0, len(states), _TOKENS_AT_ONCE):
            rows = states[start : start + _TOKENS_AT_ONCE]
            for stage in self.stages:
                rows = stage(rows)
            weights = linear(rows, self.weight, self.bias).relu_()
            for _ in range(self.pooling.num_logarithms):
                weights.log1p_()
            if self.pooling.adds:
                total += weights.sum(dim=0)
            else:
                torch.maximum(total, weights.amax(dim=0), out=total)
        return total
