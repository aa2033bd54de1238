"""Operators of torch on a GPU, with fused kernels between the matrix products."""

from torch import Tensor

from services.engine.model.architecture.activation import SWIGLU, Activation
from services.engine.model.architecture.routing import Routing
from services.engine.model.operators.composed_projections import AdaptedProjection
from services.engine.model.operators.deltas import Delta
from services.engine.model.operators.expert_kernels import choose_experts
from services.engine.model.operators.fused_kernels import (
    activate,
    has_kernel,
    norm_rows,
    rotate_heads,
)
from services.engine.model.operators.interface import Gate, Projection
from services.engine.model.operators.low_rank import LowRankProduct
from services.engine.model.operators.rotated_write import write_rotated
from services.engine.model.operators.rotation import Rotation, UnrotatedHeads
from services.engine.model.operators.torch_operators import TorchGate, TorchOperators, join
from services.engine.model.operators.triton_low_rank import TritonLowRankProduct

__all__ = ["TritonOperators"]


class TritonOperators(TorchOperators):
    """Operators with one launch for each norm, rotation, activation and choice of experts."""

    finds_adapters = True
    rotates_into_pages = True

    def gate(
        self,
        gate: Tensor,
        up: Tensor | None,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        activation: Activation = SWIGLU,
    ) -> Gate:
        return self.activated(self.projection(*join(gate, up, gate_bias, up_bias)), activation)

    def activated(self, product: Projection, activation: Activation) -> Gate:
        """Make a gate of a product, which has the columns of both factors if there are two."""
        if has_kernel(activation):
            return _TritonGate(product, activation, self)
        return TorchGate(product, 2 if activation.gated else 1, activation, self)

    def low_rank(self, parts: int, widest: int) -> LowRankProduct:
        return TritonLowRankProduct(parts, widest, self._device)

    def rms_norm(self, rows: Tensor, weight: Tensor, epsilon: float, out: Tensor) -> None:
        norm_rows(rows, weight, epsilon, out)

    def activate(self, product: Tensor, activation: Activation, out: Tensor) -> None:
        """Write the activation of a gate's product, as `fused_kernels.activate`."""
        activate(product, activation, out)

    def add_rms_norm(self, rows: Tensor, weight: Tensor, epsilon: float, out: Tensor) -> None:
        norm_rows(rows, weight, epsilon, out, adds=True)

    def choose(
        self, scores: Tensor, routing: Routing, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if not routing.is_plain:
            return super().choose(scores, routing, bias)
        return choose_experts(scores, routing.per_token, normalized=routing.normalized)

    def rotate(
        self,
        heads: Tensor,
        num_queries: int,
        rotation: Rotation,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        epsilon: float,
    ) -> None:
        if query_norm is not None and key_norm is not None and len(query_norm) > heads.shape[2]:
            parts = heads[:, :num_queries].flatten(1), heads[:, num_queries:].flatten(1)
            for part, norm in zip(parts, (query_norm, key_norm), strict=True):
                norm_rows(part, norm, epsilon, part)
            query_norm = key_norm = None
        rotate_heads(heads, num_queries, rotation, query_norm, key_norm, epsilon)

    def rotate_into_pages(
        self, heads: UnrotatedHeads, keys: Tensor, values: Tensor, slots: Tensor
    ) -> None:
        write_rotated(heads, keys, values, slots)


class _TritonGate(Gate):
    def __init__(
        self, product: Projection, activation: Activation, operators: TritonOperators
    ) -> None:
        self._product = product
        self._activation = activation
        self._operators = operators
        self.weight_bytes = product.weight_bytes

    def adapt(self, delta: Delta) -> None:
        self._product = AdaptedProjection(self._product, delta)

    def into(self, rows: Tensor, out: Tensor) -> None:
        width = out.shape[1] * (2 if self._activation.gated else 1)
        product = self._operators.temporary(rows.shape[0], width)
        self._product.into(rows, product)
        self._operators.activate(product, self._activation, out)
