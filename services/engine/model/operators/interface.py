"""Interface of a decoder layer's operators besides attention."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from services.engine.model.architecture.activation import SWIGLU, Activation, GateFunction
from services.engine.model.architecture.routing import Routing
from services.engine.model.checkpoint.quantized import QuantizedWeight, Weight
from services.engine.model.operators.activations import gate_factors
from services.engine.model.operators.deltas import Delta, ExpertDeltas
from services.engine.model.operators.expert_choice import choose_experts
from services.engine.model.operators.low_rank import (
    LowRankProduct,
    TorchLowRankProduct,
)
from services.engine.model.operators.recording import Recording
from services.engine.model.operators.rotation import Rotation, UnrotatedHeads

__all__ = [
    "ExpertWeights",
    "Gate",
    "HeadNorms",
    "LayerNorm",
    "Mixture",
    "Operators",
    "Projection",
    "RoutedMixture",
    "SharedParts",
]


class Projection(ABC):
    """A linear layer that owns its weight, in a layout of its own."""

    has_argmax = False
    """True if `argmax` is supported"""
    weight_bytes: int
    """Bytes of weights that a product reads, in the stored layout"""

    @property
    def is_adapted(self) -> bool:
        """True if adapters add to the products of the present step."""
        return False

    @abstractmethod
    def into(self, rows: Tensor, out: Tensor) -> None:
        """Compute out [n, outputs] = rows [n, inputs] @ weight.T + bias; both contiguous.

        `out` has the model's dtype or float32.
        """

    @abstractmethod
    def add_to(self, rows: Tensor, out: Tensor) -> None:
        """Compute out += rows @ weight.T + bias."""

    def argmax(self, rows: Tensor, out: Tensor) -> None:
        """Write each row's largest output to `out` (int64 [n]), the first of equals.

        It is -1 for a row without an output above minus infinity.
        """
        raise NotImplementedError


class Gate(ABC):
    """First half of a feed-forward layer: one or two products and the activation."""

    weight_bytes: int
    """Bytes of weights that its products read, in the stored layout"""

    @property
    def is_adapted(self) -> bool:
        """True if adapters add to the products of the present step."""
        return False

    @abstractmethod
    def adapt(self, delta: Delta) -> None:
        """Have `delta` add to the products, gate and up side by side, before the activation."""

    @abstractmethod
    def into(self, rows: Tensor, out: Tensor) -> None:
        """Compute out [n, outputs] = activation(rows @ gate.T + bias) * (rows @ up.T + bias).

        Without `up` there is no second factor.
        """


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert's weights [outputs, inputs] and biases [outputs], of any floating dtype.

    Either both `gate` and `up` are MXFP4, or both are quantized, or neither is.
    """

    gate: Weight
    up: Weight | None
    """Weight of the second product; None: the activation is not gated"""
    down: Weight
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Weight and bias of a LayerNorm (https://arxiv.org/abs/1607.06450), [width] each."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of queries and keys, apart from the rotation."""

    queries: Tensor
    """Weight [heads, head_dim], or [head_dim] for all; [heads * head_dim] of one norm over all"""
    keys: Tensor
    centers: bool
    """True if the norms are LayerNorms without a bias rather than RMSNorms"""


class SharedParts(NamedTuple):
    """An expert that every row has."""

    gate: Gate
    down: Projection
    router: Projection | None
    """Product that makes the logit of a factor on the output; None: there is no factor"""


class RoutedMixture(ABC):
    """A mixture, its router and perhaps a shared expert, computed by one kernel."""

    @property
    @abstractmethod
    def is_adapted(self) -> bool:
        """True if adapters add to the products of the present step, which the kernel can't do."""

    @abstractmethod
    def add_to(self, rows: Tensor, out: Tensor, router_rows: Tensor | None = None) -> None:
        """Add the outputs of all experts of `rows` [n, inputs] to `out` [n, outputs].

        router_rows: [n, inputs], inputs of the router; None: it reads `rows`.
        """


class Mixture(ABC):
    """The experts of a layer, among which a router has chosen."""

    weight_bytes: int
    """Bytes of weights that a product with all experts reads, in the stored layout"""
    returns_rows = False
    """True if rows may have experts without weights, which return the row"""

    @abstractmethod
    def adapt(self, deltas: ExpertDeltas) -> None:
        """Have `deltas` add to the experts' products, before the activation and after it."""

    @abstractmethod
    def add_to(self, rows: Tensor, chosen: Tensor, factors: Tensor, out: Tensor) -> None:
        """Add to `out` each row's sum of its experts' outputs, times their factors.

        rows: [n, inputs]; chosen: int64 [n, k], numbers of experts, all different in a row, where
        experts without weights have the largest numbers; factors: float32 [n, k]; out: [n, outputs]
        in the model's dtype or float32. A row's sum is independent of the other rows.
        """

    def routed(
        self,
        router: Projection,
        routing: Routing,
        bias: Tensor | None,
        shared: SharedParts | None,
        factors: Tensor | None = None,
    ) -> RoutedMixture | None:
        """Join this mixture with its router and a shared expert; None if no kernel computes that.

        bias: as for `Routing.choose`; factors: float32 [count], factor of each expert's output.
        """
        return None


class Operators(ABC):
    """Implementation of all operators for one dtype and device."""

    rows_at_once = 32
    """Number of rows up to which a product takes as long as for one row"""
    groups_experts = False
    """True if a mixture of gated experts never waits for the host, so that CUDA graphs work"""
    finds_adapters = False
    """True if low-rank products find the adapters of rows on the device, as graphs need it"""
    rotates_into_pages = False
    """True if `rotate_into_pages` is supported"""
    keeps_groups = False
    """True if a QuantizedWeight stays as it is in memory"""

    def product_bytes(self, rows: int) -> int:
        """Return the most bytes that a product of so many rows takes beside its operands."""
        return 0

    @abstractmethod
    def empty(self, rows: int, width: int) -> Tensor:
        """Allocate an uninitialised contiguous activation [rows, width] in the model's dtype."""

    @abstractmethod
    def temporary(self, rows: int, width: int) -> Tensor:
        """Allocate a short-lived activation: cheaper to allocate than `empty`, slower to use."""

    @abstractmethod
    def projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        """Make a projection of `weight` [outputs, inputs], of any floating dtype; it is copied."""

    def exact_projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        """Make a projection whose weight is never rounded, such as a router's."""
        return self.projection(weight, bias)

    def grouped_projection(
        self, weights: Sequence[QuantizedWeight], bias: Tensor | None
    ) -> Projection:
        """Make a projection of the outputs of quantized weights, one after the other."""
        return self.projection(torch.cat([weight.decode() for weight in weights]), bias)

    def for_logits(self) -> "Operators":
        """Return operators for the product that computes the logits."""
        return self.without_fp8()

    def without_fp8(self) -> "Operators":
        """Return operators for weights that stay in the model's dtype while others are FP8.

        These are the output projection, and weights that an FP8 checkpoint does not quantize.
        """
        return self

    def choose_kernels(self) -> None:  # noqa: B027
        """Measure kernels that compute the same on a GPU, and use the fastest from here on.

        It must be called after all weights are loaded, and before a CUDA graph is captured.
        """

    @abstractmethod
    def gate(
        self,
        gate: Tensor,
        up: Tensor | None,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        activation: Activation = SWIGLU,
    ) -> Gate:
        """Make a gate of `gate` and, if `activation` is gated, `up`: [outputs, inputs], copied."""

    def grouped_gate(
        self,
        gate: QuantizedWeight,
        up: QuantizedWeight | None,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        activation: Activation = SWIGLU,
    ) -> Gate:
        """Make a gate of quantized weights, as `gate`."""
        second = None if up is None else up.decode()
        return self.gate(gate.decode(), second, gate_bias, up_bias, activation)

    @abstractmethod
    def mixture(
        self, experts: Iterable[ExpertWeights], count: int, per_row: int, activation: Activation
    ) -> Mixture:
        """Make a mixture of `count` experts with weights; each row has up to `per_row` of them.

        Their weights are copied, one expert at a time.
        """

    def choose(
        self, scores: Tensor, routing: Routing, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return each row's experts and their factors, as `choose_experts` does."""
        return choose_experts(routing, scores, bias)

    def recording(self, *, only_decodes: bool) -> Recording | None:
        """Return a recording for a decoder's layers; None: these operators can't be recorded.

        only_decodes: torch attends for prompt chunks, so that steps with them can't be recorded.
        """
        return None

    @abstractmethod
    def arrange(self, rows: Tensor, out: Tensor) -> None:
        """Copy rows to `out` in the layout that products read; both [n, width]."""

    @abstractmethod
    def rms_norm(self, rows: Tensor, weight: Tensor, epsilon: float, out: Tensor) -> None:
        """Write each row's RMSNorm (https://arxiv.org/abs/1910.07467) in the layout of products."""

    @abstractmethod
    def add_rms_norm(self, rows: Tensor, weight: Tensor, epsilon: float, out: Tensor) -> None:
        """Add the RMSNorm of each row to `out`. May overwrite `rows`, which are a product."""

    def layer_norm(
        self, rows: Tensor, norm: LayerNorm, epsilon: float, out: Tensor, *, replaces: bool = False
    ) -> None:
        """Write each row's LayerNorm in the layout of products.

        replaces: write the result to `rows` too, row by row.
        """
        normed = torch.nn.functional.layer_norm(
            rows, rows.shape[1:], norm.weight, norm.bias, epsilon
        )
        if replaces:
            rows.copy_(normed)
        self.arrange(normed, out)

    @abstractmethod
    def gather(self, rows: Tensor, index: Tensor) -> Tensor:
        """Copy rows `index` (int64 [n]) of a product's input to a temporary."""

    def low_rank(self, parts: int, widest: int) -> LowRankProduct:
        """Make the product of the low-rank parts that adapters add to one product.

        parts: most parts of an adapter; widest: most outputs of a part.
        """
        return TorchLowRankProduct(self.gather)

    def clear(self, rows: Tensor) -> None:
        """Fill rows [n, width] with zeros."""
        rows.zero_()

    def add(self, rows: Tensor, out: Tensor) -> None:
        """Add rows to `out`; both [n, width], row by row."""
        out += rows

    def scale(self, rows: Tensor, factor: float) -> None:
        """Multiply rows [n, width] by a factor other than 0."""
        rows *= factor

    def clip(self, rows: Tensor, limit: float) -> None:
        """Replace numbers beyond ±limit in rows [n, width] by these bounds."""
        rows.clamp_(-limit, limit)

    def plain(self, rows: Tensor) -> Tensor:
        """Return rows of a product's input row by row; a view where they lie so."""
        return rows

    def multiply(self, factors: Tensor, out: Tensor) -> None:
        """Multiply `out`, in the layout of products, by `factors`; both [n, width].

        The first dimension of `factors` may have gaps.
        """
        out *= factors

    def multiply_by_gates(self, gates: Tensor, function: GateFunction, out: Tensor) -> None:
        """Multiply `out`, in the layout of products, by the function of `gates`.

        gates: [n, width / k], one for each k neighbouring columns of `out` [n, width]; its first
        dimension may have gaps. With tiles, k must be 1 or a multiple of 32.
        """
        columns = out.view(*gates.shape, out.shape[1] // gates.shape[1])
        columns *= gate_factors(function, gates)[..., None]

    def keep(self, rows: Tensor, kept: Tensor | None) -> None:
        """Move the rows `kept` to the front, over the others; None keeps all.

        rows: [n, ...], its first dimension may have gaps; kept: int64, ascending.
        """
        if kept is not None:
            rows[: len(kept)] = rows[kept]

    @abstractmethod
    def rotate(
        self,
        heads: Tensor,
        num_queries: int,
        rotation: Rotation,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        epsilon: float,
    ) -> None:
        """Apply RoPE to queries and keys in place, after their RMSNorms if given.

        heads: [tokens, heads, head_dim], first `num_queries` query heads, then key heads; its first
        dimension may have gaps. Norms: [head_dim] over each head, or [heads * head_dim] over all
        query or key heads of a token.
        """

    def rotate_into_pages(
        self, heads: UnrotatedHeads, keys: Tensor, values: Tensor, slots: Tensor
    ) -> None:
        """Norm and rotate queries and keys in place, and write keys and values to the cache.

        The result is that of `rotate` and of a write after it. keys, values: result of
        `AttentionBackend.pages`; slots: int64 [tokens].
        """
        raise NotImplementedError

    def norm_heads(self, heads: Tensor, num_queries: int, norms: HeadNorms, epsilon: float) -> None:
        """Norm queries and keys in place. heads: as in `rotate`."""
        queries, keys = heads[:, :num_queries], heads[:, num_queries:]
        parts = (queries, norms.queries), (keys, norms.keys)
        for heads, weight in parts:
            over_all = weight.ndim == 1 and len(weight) > heads.shape[2]
            part = heads.flatten(1) if over_all else heads
            exact = part.float()
            if norms.centers:
                exact = exact - exact.mean(dim=-1, keepdim=True)
            scale = torch.rsqrt(exact.square().mean(dim=-1, keepdim=True) + epsilon)
            heads.copy_(((exact * scale).to(part.dtype) * weight).view(heads.shape))
