"""Operators on CPUs without the tiled kernels, with weights in groups of codes."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from services.engine.kernels.library import Native
from services.engine.kernels.memory import Arena
from services.engine.model.architecture.activation import SWIGLU, Activation
from services.engine.model.checkpoint.quantized import QuantizedWeight
from services.engine.model.operators.grouped_mixture import grouped_mixture
from services.engine.model.operators.grouped_products import GroupedGate, GroupedProjection
from services.engine.model.operators.interface import ExpertWeights, Gate, Mixture, Projection
from services.engine.model.operators.looped_mixture import LoopedMixture
from services.engine.model.operators.native_gate import NativeGate, is_native
from services.engine.model.operators.native_operators import NativeOperators
from services.engine.model.operators.recording import Recording
from services.engine.model.operators.stored_groups import has_kernel
from services.engine.model.operators.torch_operators import TorchGate, join_biases

__all__ = ["GroupedOperators"]


class GroupedOperators(NativeOperators):
    """NativeOperators that keep a quantized checkpoint's codes in memory.

    Products round their rows to 8 bits, with a scale for each 32 inputs. Other weights are those of
    NativeOperators.
    """

    keeps_groups = True

    def __init__(self, native: Native, dtype: torch.dtype) -> None:
        super().__init__(native, dtype)
        self._arena = Arena()

    def grouped_projection(
        self, weights: Sequence[QuantizedWeight], bias: Tensor | None
    ) -> Projection:
        if not all(map(has_kernel, weights)):
            return super().grouped_projection(weights, bias)
        # Torch multiplies little now, so its threads don't compete with the pool's.
        self._native.use_pool(torch.get_num_threads())
        return GroupedProjection(self._native, weights, bias, self._arena)

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
        if isinstance(product, GroupedProjection):
            return GroupedGate(self._native, product, activation, self._code)
        return NativeGate(self._native, product, activation, self._code)

    def mixture(
        self, experts: Iterable[ExpertWeights], count: int, per_row: int, activation: Activation
    ) -> Mixture:
        looped = LoopedMixture(experts, activation, self)
        return grouped_mixture(self._native, looped, activation) if activation.gated else looped

    def recording(self) -> Recording:
        return Recording(self._native)
