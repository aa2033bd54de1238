"""Operators on CPUs without the tiled kernels, with weights as they are stored."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from services.engine.model.architecture.activation import SWIGLU, Activation
from services.engine.model.checkpoint.quantized import QuantizedWeight
from services.engine.model.operators.float_products import FloatProjection
from services.engine.model.operators.grouped_products import GroupedProjection
from services.engine.model.operators.interface import ExpertWeights, Gate, Mixture, Projection
from services.engine.model.operators.looped_mixture import LoopedMixture
from services.engine.model.operators.native_gate import is_native
from services.engine.model.operators.native_operators import NativeOperators
from services.engine.model.operators.plain_mixture import plain_mixture
from services.engine.model.operators.recording import Recording
from services.engine.model.operators.stored_groups import has_kernel
from services.engine.model.operators.torch_operators import TorchGate, join_biases

__all__ = ["GroupedOperators"]


class GroupedOperators(NativeOperators):
    """NativeOperators that keep a checkpoint's weights as they are.

    Products with codes round their rows to 8 bits, with a scale for each 32 inputs. Those with
    weights in floating point are in float32, whatever the weights' type; those in float32 are
    rounded to the model's dtype. Where oneDNN has instructions for products of bfloat16, oneDNN
    computes them.
    """

    keeps_groups = True

    _widest = 0
    """Most inputs of a product with weights in floating point"""

    def projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        if self._dtype == torch.bfloat16 and self._prepacks:
            return super().projection(weight, bias)
        self._native.use_pool(torch.get_num_threads())
        self._widest = max(self._widest, weight.shape[1])
        stored = weight.to(self._dtype) if weight.dtype == torch.float32 else weight
        return FloatProjection(self._native, stored, bias, self.arena)

    def product_bytes(self, rows: int) -> int:
        """Return the bytes of the rows in float32, which the kernel keeps for its next call."""
        return rows * self._widest * torch.float32.itemsize

    def grouped_projection(
        self, weights: Sequence[QuantizedWeight], bias: Tensor | None
    ) -> Projection:
        if not all(map(has_kernel, weights)):
            return super().grouped_projection(weights, bias)
        # Torch multiplies little now, so its threads don't compete with the pool's.
        self._native.use_pool(torch.get_num_threads())
        return GroupedProjection(self._native, weights, bias, self.arena)

    def grouped_gate(
        self,
        gate: QuantizedWeight,
        up: QuantizedWeight | None,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        activation: Activation = SWIGLU,
    ) -> Gate:
        bias = join_biases(gate_bias, up_bias)
        product = self.grouped_projection([gate] if up is None else [gate, up], bias)
        if not is_native(activation):
            return TorchGate(product, 1 if up is None else 2, activation, self)
        return self._activated(product, activation)

    def mixture(
        self, experts: Iterable[ExpertWeights], count: int, per_row: int, activation: Activation
    ) -> Mixture:
        looped = LoopedMixture(experts, activation, self)
        return plain_mixture(self._native, looped, activation) if activation.gated else looped

    def recording(self, *, only_decodes: bool) -> Recording:
        return Recording(self._native, only_decodes=only_decodes)
