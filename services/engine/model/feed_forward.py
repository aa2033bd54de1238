"""The half of a decoder layer behind attention: one feed-forward layer, or a mixture of experts."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.model.operators.interface import Gate, Operators, Projection

__all__ = ["Dense", "Experts", "FeedForward"]


class FeedForward(ABC):
    """Adds to the residual what it makes of the normed rows."""

    @abstractmethod
    def add_to(self, rows: Tensor, out: Tensor, inner: Tensor) -> None:
        """rows, out: [n, hidden_size]; `inner`, [n, intermediate_size], may be written."""


@dataclass(frozen=True, slots=True)
class Dense(FeedForward):
    """Two linear layers with an activation between them."""

    gate: Gate
    down: Projection

    def add_to(self, rows: Tensor, out: Tensor, inner: Tensor) -> None:
        self.gate.into(rows, inner)
        self.down.add_to(inner, out)


@dataclass(frozen=True, slots=True)
class Experts(FeedForward):
    """A router sends each row to a few of many (https://arxiv.org/abs/2101.03961)."""

    router: Projection
    experts: tuple[Dense, ...]
    per_token: int
    normalized: bool
    """The weights of a row's experts add up to 1"""
    width: int
    """Intermediate size of each expert"""
    operators: Operators

    def add_to(self, rows: Tensor, out: Tensor, inner: Tensor) -> None:
        scores = torch.empty(len(rows), len(self.experts), device=rows.device)
        self.router.into(rows, scores)
        weights, chosen = scores.softmax(dim=1).topk(self.per_token, dim=1)
        if self.normalized:
            weights /= weights.sum(dim=1, keepdim=True)
        total = torch.zeros(out.shape, device=out.device)
        # In the order of their numbers, so that a row's sum does not depend on its neighbours.
        for number in sorted(set(chosen.flatten().tolist())):
            index, place = torch.where(chosen == number)
            expert = self.experts[number]
            hidden = self.operators.temporary(len(index), self.width)
            made = self.operators.temporary(len(index), out.shape[1])
            everyone = len(index) == len(rows)
            expert.gate.into(rows if everyone else self.operators.gather(rows, index), hidden)
            expert.down.into(hidden, made)
            total[index] += made * weights[index, place, None]
        out += total
