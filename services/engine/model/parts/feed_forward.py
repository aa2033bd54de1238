"""Feed-forward layers: dense, or a mixture of experts."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from services.engine.model.architecture.routing import Routing
from services.engine.model.operators.composed_projections import OutputNorm
from services.engine.model.operators.expert_choice import weigh_experts
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
    "BiasedOutput",
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

    @property
    def num_spares(self) -> int:
        """Number of `add_to`'s spares."""
        return 0

    @abstractmethod
    def add_to(self, rows: Tensor, out: Tensor, inner: Tensor, spares: Sequence[Tensor]) -> None:
        """Add the layer's output for the normed `rows` to the residual `out`.

        rows, out: [n, hidden_size]; the layer may overwrite `rows`. inner: scratch space
        [n, intermediate_size]; spares: more of it, at least `num_spares` of [n, hidden_size].
        """


class EmptyFeedForward(FeedForward):
    """The missing feed-forward half of a layer that is a mixer alone."""

    is_empty = True

    def add_to(self, rows: Tensor, out: Tensor, inner: Tensor, spares: Sequence[Tensor]) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Dense(FeedForward):
    """Two linear layers with an activation between them."""

    gate: Gate
    down: Projection
    norm: OutputNorm | None = None
    """Norm of the output; None: the output is not normed"""

    def add_to(self, rows: Tensor, out: Tensor, inner: Tensor, spares: Sequence[Tensor]) -> None:
        self.gate.into(rows, inner)
        if self.norm is None:
            self.down.add_to(inner, out)
        else:
            self.down.into(inner, rows)
            self.norm.add(rows, out)


@dataclass(frozen=True, slots=True)
class Experts(FeedForward):
    """A mixture of experts: a router picks a few per row (https://arxiv.org/abs/2101.03961)."""

    router: Projection
    mixture: Mixture
    count: int
    """Number of experts among which the router chooses"""
    routing: Routing
    bias: Tensor | None
    """float32 [count], added to the experts' weights for the choice alone"""
    operators: Operators
    shared: "SharedExpert | None" = None
    routed: RoutedMixture | None = None
    """The whole layer as one kernel; None: there is no such kernel"""
    by_token: TokenExperts | None = None
    """Experts that token ids choose; None: scores choose"""
    factors: Tensor | None = None
    """float32 [count], factor of each expert's output; None: there are none"""

    def add_to(self, rows: Tensor, out: Tensor, inner: Tensor, spares: Sequence[Tensor]) -> None:
        if self.routed is not None and not self.routed.is_adapted:
            self.routed.add_to(rows, out)
            return
        scores = torch.empty(len(rows), self.count, device=rows.device)
        self.router.into(rows, scores)
        if self.by_token is None:
            chosen, factors = self.operators.choose(scores, self.routing, self.bias)
        else:
            chosen = self.by_token.of_rows()
            factors = weigh_experts(self.routing, scores, chosen)
        if self.factors is not None:
            factors = factors * self.factors[chosen]
        if self.routing.scales_inputs:
            self._add_scaled(rows, chosen, factors, out)
        else:
            self.mixture.add_to(rows, chosen, factors, out)
        if self.shared is not None:
            self.shared.add_to(rows, out, inner, spares)

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
    routed: RoutedMixture | None
    """The layer without its norms as one kernel; None: there is no such kernel"""

    @property
    def num_spares(self) -> int:
        return 2

    def add_to(self, rows: Tensor, out: Tensor, inner: Tensor, spares: Sequence[Tensor]) -> None:
        routing_rows, normed, *_ = spares
        self.operators.rms_norm(rows, self.router_norm, self.epsilon, routing_rows)
        self.operators.rms_norm(rows, self.norm, self.epsilon, normed)
        if self.routed is not None and not self.routed.is_adapted:
            self.routed.add_to(normed, out, routing_rows)
            return
        scores = torch.empty(len(rows), len(self.factors), device=rows.device)
        self.router.into(routing_rows, scores)
        chosen, factors = self.operators.choose(scores, self.routing, None)
        self.mixture.add_to(normed, chosen, factors * self.factors[chosen], out)


@dataclass(frozen=True, slots=True)
class Beside(FeedForward):
    """A dense layer and experts side by side: the norm of the sum of their norms."""

    dense: Dense
    """Dense layer with a norm of its own"""
    experts: FeedForward
    """Experts that read the residual"""
    experts_norm: OutputNorm
    norm: OutputNorm
    operators: Operators

    @property
    def num_spares(self) -> int:
        return 2 + self.experts.num_spares

    def add_to(self, rows: Tensor, out: Tensor, inner: Tensor, spares: Sequence[Tensor]) -> None:
        total, sparse, *others = spares
        self.operators.clear(total)
        self.operators.clear(sparse)
        self.dense.add_to(rows, total, inner, others)
        self.experts.add_to(out, sparse, inner, others)
        self.experts_norm.add(sparse, total)
        self.norm.add(total, out)


@dataclass(frozen=True, slots=True)
class NormedOutput(FeedForward):
    """A layer whose output has a norm before it joins the residual."""

    content: FeedForward
    norm: OutputNorm
    operators: Operators

    @property
    def num_spares(self) -> int:
        return 1 + self.content.num_spares

    def add_to(self, rows: Tensor, out: Tensor, inner: Tensor, spares: Sequence[Tensor]) -> None:
        total, *others = spares
        self.operators.clear(total)
        self.content.add_to(rows, total, inner, others)
        self.norm.add(total, out)


@dataclass(frozen=True, slots=True)
class BiasedOutput(FeedForward):
    """A feed-forward layer with a bias of its output."""

    content: FeedForward
    bias: Tensor
    """[hidden_size]"""

    @property
    def num_spares(self) -> int:
        return self.content.num_spares

    def add_to(self, rows: Tensor, out: Tensor, inner: Tensor, spares: Sequence[Tensor]) -> None:
        self.content.add_to(rows, out, inner, spares)
        out += self.bias


@dataclass(frozen=True, slots=True)
class SharedExpert(FeedForward):
    """An expert that every row has, perhaps times a factor of the row."""

    expert: Dense
    router: Projection | None
    """Product that makes the logit of the factor; None: there is no factor"""
    operators: Operators

    @property
    def parts(self) -> SharedParts:
        return SharedParts(self.expert.gate, self.expert.down, self.router)

    def add_to(self, rows: Tensor, out: Tensor, inner: Tensor, spares: Sequence[Tensor]) -> None:
        product = self.operators.temporary(len(rows), out.shape[1])
        self.expert.gate.into(rows, inner)
        self.expert.down.into(inner, product)
        if self.router is None:
            out += product
            return
        logits = torch.empty(len(rows), 1, device=rows.device)
        self.router.into(rows, logits)
        out += product * logits.sigmoid()
