"""Scan of states that decay and take up outer products, by matrix products of chunks of tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.model.mixers.decays import decayed_products

__all__ = ["ScanTokens", "scan"]

_CHUNK = 64
"""Number of tokens that one set of matrix products computes"""


@dataclass(frozen=True, slots=True)
class ScanTokens:
    """Operands by head: float32 [..., length, width]."""

    values: Tensor
    """[..., length, head_dim]"""
    decays: Tensor
    """[..., length, 1], logarithms of the decays"""
    opened: Tensor
    """[..., length, state_width], factors of the values"""
    closed: Tensor
    """[..., length, state_width], factors of the outputs"""

    def chunk(self, first: int) -> "ScanTokens":
        parts = (self.values, self.decays, self.opened, self.closed)
        return ScanTokens(*(part[..., first : first + _CHUNK, :] for part in parts))


def scan(state: Tensor, tokens: ScanTokens) -> tuple[Tensor, Tensor]:
    """Return the states after the tokens, and their outputs. May overwrite `state`.

    The state S of a head becomes exp(decay) * S + opened values^T; the output is S^T closed.

    state: float32 [..., state_width, head_dim]. Outputs: float32 [..., length, head_dim].
    """
    length, advanced = tokens.values.shape[-2], []
    for first in range(0, length, _CHUNK):
        state, out = (_step if length == 1 else _advance)(state, tokens.chunk(first))
        advanced.append(out)
    return state, torch.cat(advanced, -2)


def _step(state: Tensor, tokens: ScanTokens) -> tuple[Tensor, Tensor]:
    """Advance states by one token each, in place because they are a step's largest data."""
    state *= tokens.decays.exp()
    state.addcmul_(tokens.opened.transpose(-1, -2), tokens.values)
    return state, tokens.closed @ state


def _advance(state: Tensor, tokens: ScanTokens) -> tuple[Tensor, Tensor]:
    """Advance states by several tokens."""
    sums = tokens.decays.cumsum(-2)
    out = (tokens.closed @ state) * sums.exp()
    out = out + decayed_products(tokens.closed, tokens.opened, sums) @ tokens.values
    last = sums[..., -1:, :]
    added = tokens.opened.transpose(-1, -2) @ (tokens.values * (last - sums).exp())
    return torch.addcmul(added, state, last.exp()), out
