"""Feed-forward layers: dense, or a mixture of experts."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from services.engine.model.architecture.routing import Routing
from services.engine.model.operators.interface import (
    Gate,
    Mixture,
    Operators,
    Projection,
    RoutedMixture,
    SharedParts,
)

__all__ = [
    "Beside",
    "Dense",
    "EmptyFeedForward",
    "Experts",
    "FeedForward",
    "NormedExperts",
    "NormedOutput",
    "SharedExpert",
    "TokenExperts",
    "TokenIds",
]


class TokenIds:
    """Ids of the tokens whose rows a step computes, which all layers share."""

    def __init__(self) -> None:
        self.ids = torch.empty(0, dtype=torch.int64)
        """int64 [n]"""


@dataclass(frozen=True, slots=True)
class TokenExperts:
    """The experts of each token id."""

    table: Tensor
    """int64 [vocab_size, per_token]"""
    tokens: TokenIds

    def of_rows(self) -> Tensor:
        """Return the experts of the step's rows, int64 [n, per_token]."""
        return self.table[self.tokens.ids]


class FeedForward(ABC):
    """The second half of a decoder layer."""

    is_empty: ClassVar[bool] = False
    """True if the layer has no such half, so that the residual need not be normed"""

    @abstractmethod
    def add_to(self, rows: Tensor, out: Tensor, inner: Tensor) -> None:
        """Add the layer's output for the normed `rows` to the residual `out`.

        rows, out: [n, hidden_size]; inner: scratch space [n, intermediate_size].
        """


class EmptyFeedForward(FeedForward):
    """The half of a layer that is a mixer alone."""

    is_empty = True

    def add_to(self, rows: Tensor, out: Tensor, inner: Tensor) -> None:
        pass


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
    """A mixture of experts: a router picks a few per row (https://arxiv.org/abs/2101.03961)."""

    router: Projection
    mixture: Mixture
    count: int
    """Experts among which the router chooses"""
    routing: Routing
    bias: Tensor | None
    """float32 [count], added to the experts' weights for the choice alone"""
    operators: Operators
    shared: "SharedExpert | None" = None
    routed: RoutedMixture | None = None
    """All of the layer as one kernel; None: there is no such kernel"""
    by_token: TokenExperts | None = None
    """Experts that are not chosen by scores; None: all are"""

    def add_to(self, rows: Tensor, out: Tensor, inner: Tensor) -> None:
        if self.routed is not None and not self.routed.is_adapted:
            self.routed.add_to(rows, out)
            return
        scores = torch.empty(len(rows), self.count, device=rows.device)
        self.router.into(rows, scores)
        if self.by_token is None:
            chosen, factors = self.operators.choose(scores, self.routing, self.bias)
        else:
            chosen = self.by_token.of_rows()
            factors = self.routing.weigh(scores, chosen)
        if self.routing.scales_inputs:
            self._add_scaled(rows, chosen, factors, out)
        else:
            self.mixture.add_to(rows, chosen, factors, out)
        if self.shared is not None:
            self.shared.add_to(rows, out, inner)

    def _add_scaled(self, rows: Tensor, chosen: Tensor, factors: Tensor, out: Tensor) -> None:
        """Add the outputs of experts that read the rows times their factors."""
        plain, ones = self.operators.plain(rows), torch.ones_like(factors[:, :1])
        scaled = self.operators.temporary(*rows.shape)
        for number in range(self.routing.per_token):
            column = slice(number, number + 1)
            self.operators.arrange((plain * factors[:, column]).to(plain.dtype), scaled)
            self.mixture.add_to(scaled, chosen[:, column], ones, out)


@dataclass(frozen=True, slots=True)
class NormedExperts(FeedForward):
    """Experts that read the residual, they and their router through norms of their own."""

    router_norm: Tensor
    router: Projection
    norm: Tensor
    mixture: Mixture
    routing: Routing
    factors: Tensor
    """float32 [count], factor of each expert's output"""
    epsilon: float
    operators: Operators

    def add_to(self, rows: Tensor, out: Tensor, inner: Tensor) -> None:
        normed = self.operators.temporary(*rows.shape)
        self.operators.rms_norm(rows, self.router_norm, self.epsilon, normed)
        scores = torch.empty(len(rows), len(self.factors), device=rows.device)
        self.router.into(normed, scores)
        chosen, factors = self.operators.choose(scores, self.routing, None)
        self.operators.rms_norm(rows, self.norm, self.epsilon, normed)
        self.mixture.add_to(normed, chosen, factors * self.factors[chosen], out)


@dataclass(frozen=True, slots=True)
class Beside(FeedForward):
    """A dense layer and experts side by side: the norm of the sum of their norms."""

    dense: Dense
    """Dense layer whose down projection ends with an RMSNorm"""
    experts: FeedForward
    """Reads the residual"""
    experts_norm: Tensor
    norm: Tensor
    epsilon: float
    operators: Operators

    def add_to(self, rows: Tensor, out: Tensor, inner: Tensor) -> None:
        total, sparse = (self.operators.temporary(*out.shape).zero_() for _ in range(2))
        self.dense.add_to(rows, total, inner)
        self.experts.add_to(out, sparse, inner)
        self.operators.add_rms_norm(sparse, self.experts_norm, self.epsilon, total)
        self.operators.add_rms_norm(total, self.norm, self.epsilon, out)


@dataclass(frozen=True, slots=True)
class NormedOutput(FeedForward):
    """A layer whose output has a norm before it joins the residual."""

    content: FeedForward
    norm: Tensor
    epsilon: float
    operators: Operators

    def add_to(self, rows: Tensor, out: Tensor, inner: Tensor) -> None:
        total = self.operators.temporary(*out.shape).zero_()
        self.content.add_to(rows, total, inner)
        self.operators.add_rms_norm(total, self.norm, self.epsilon, out)


@dataclass(frozen=True, slots=True)
class SharedExpert(FeedForward):
    """An expert that every row has, perhaps times a factor of the row."""

    expert: Dense
    router: Projection | None
    """To the logit of the factor; None: there is no factor"""
    operators: Operators

    @property
    def parts(self) -> SharedParts:
        return SharedParts(self.expert.gate, self.expert.down, self.router)

    def add_to(self, rows: Tensor, out: Tensor, inner: Tensor) -> None:
        product = self.operators.temporary(len(rows), out.shape[1])
        self.expert.gate.into(rows, inner)
        self.expert.down.into(inner, product)
        if self.router is None:
            out += product
            return
        logits = torch.empty(len(rows), 1, device=rows.device)
        self.router.into(rows, logits)
        out += product * logits.sigmoid()
