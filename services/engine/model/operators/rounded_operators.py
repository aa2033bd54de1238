"""Operators that round a checkpoint's weights while they are loaded."""

import copy
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from services.engine.kernels.library import Format, Native
from services.engine.model.architecture.activation import SWIGLU, Activation
from services.engine.model.checkpoint.quantized import GroupNumbers, QuantizedWeight, rounded
from services.engine.model.operators.grouped_operators import GroupedOperators
from services.engine.model.operators.interface import Gate, Projection
from services.engine.model.operators.native_operators import NativeOperators
from services.engine.model.operators.tiled_operators import TiledOperators, pack_each
from services.engine.model.operators.tiled_products import (
    PANEL_OUTPUTS,
    TILE_OUTPUTS,
    Packed,
    epilogue_of,
    round_up,
)
from services.engine.model.operators.torch_operators import TorchGate, join_biases

__all__ = ["ByteOperators", "Int8Operators", "RoundedOperators", "RoundedTiledOperators"]

_GROUP = 32
"""Number of inputs that share a scale of a rounded weight"""
_BYTE_INPUTS = 64
"""Number of inputs of a tile of int8"""


class _GroupRounding(NativeOperators):
    """Operators that round every weight except a router's to groups of codes."""

    bits = 4
    """Number of bits of a code: 4 or 8. With 4, the product that computes the logits has 8"""

    def projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        if weight.shape[1] % _GROUP:
            return super().projection(weight, bias)
        return self.grouped_projection([rounded(weight, self.bits, _GROUP)], bias)

    def gate(
        self,
        gate: Tensor,
        up: Tensor | None,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        activation: Activation = SWIGLU,
    ) -> Gate:
        if gate.shape[1] % _GROUP:
            return super().gate(gate, up, gate_bias, up_bias, activation)
        first = rounded(gate, self.bits, _GROUP)
        second = None if up is None else rounded(up, self.bits, _GROUP)
        return self.grouped_gate(first, second, gate_bias, up_bias, activation)

    def exact_projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        return super().projection(weight, bias)

    def for_logits(self) -> Self:
        finer = copy.copy(self)
        finer.bits = 8
        return finer


class RoundedOperators(_GroupRounding, GroupedOperators):
    """GroupedOperators that round every weight except a router's to codes."""

    def __init__(self, native: Native, dtype: torch.dtype, bits: int) -> None:
        super().__init__(native, dtype)
        self.bits = bits


class RoundedTiledOperators(_GroupRounding, TiledOperators):
    """TiledOperators that round every weight except a router's to codes of 4 bits."""


class Int8Operators(TiledOperators):
    """TiledOperators with weights rounded to int8, with a scale per output: half the bytes to read.

    The kernels widen weights to bfloat16, which holds every int8, so activations and sums are as
    exact as with bfloat16 weights.
    """

    def pack(self, weights: tuple[Tensor, ...]) -> Packed:
        elements = self.packed_elements(weights)
        what = f"int8 {[(*weight.shape, weight.dtype) for weight in weights]}"
        both = self.arena.packed(what, lambda: self._pack_int8(weights))
        return Packed(Format.INT8, both[:elements], both[elements:].view(torch.float32))

    def _pack_int8(self, weights: tuple[Tensor, ...]) -> Tensor:
        """Return the tiles and, in the bytes behind them, the scales."""
        elements = self.packed_elements(weights)
        columns = elements // weights[0].shape[1]
        both = self.arena.take(elements + columns * torch.float32.itemsize, torch.int8)
        tiles, scales = both[:elements], both[elements:].view(torch.float32)
        pack_each(self.native.pack_int8, weights, tiles, scales)
        return both


class ByteOperators(TiledOperators):
    """TiledOperators that round rows to int8, with a scale each, for int8 weights.

    Int8 weights are those of a quantized checkpoint with one scale for each output, and with
    `rounds` also all others whose number of inputs is a multiple of 64.
    """

    def __init__(self, native: Native, *, rounds: bool) -> None:
        super().__init__(native)
        self._rounds = rounds

    def pack(self, weights: tuple[Tensor, ...]) -> Packed:
        if not self._rounds or weights[0].shape[1] % _BYTE_INPUTS:
            return super().pack(weights)
        return self._pack_bytes([_rounded_rows(weight) for weight in weights])

    def grouped_projection(
        self, weights: Sequence[QuantizedWeight], bias: Tensor | None
    ) -> Projection:
        if not all(map(_has_bytes, weights)):
            return super().grouped_projection(weights, bias)
        parts = [_stored_bytes(weight) for weight in weights]
        whole = _Bytes(*map(torch.cat, zip(*parts, strict=True)))
        return self.packed_projection(self._pack_bytes([whole]), whole.codes.shape, bias)

    def grouped_gate(
        self,
        gate: QuantizedWeight,
        up: QuantizedWeight | None,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        activation: Activation = SWIGLU,
    ) -> Gate:
        both = [gate] if up is None else [gate, up]
        if not all(map(_has_bytes, both)):
            return super().grouped_gate(gate, up, gate_bias, up_bias, activation)
        if epilogue_of(activation) is None:
            product = self.grouped_projection(both, join_biases(gate_bias, up_bias))
            return TorchGate(product, len(both), activation, self)
        packed = self._pack_bytes([_stored_bytes(weight) for weight in both])
        return self.packed_gate(packed, gate.shape, gate_bias, up_bias, activation)

    def _pack_bytes(self, weights: "Sequence[_Bytes]") -> Packed:
        """Pack weights of one shape with their tiles interleaved."""
        outputs, inputs = weights[0].codes.shape
        columns = len(weights) * round_up(outputs, TILE_OUTPUTS)
        columns = round_up(columns, PANEL_OUTPUTS)
        tiles = self.arena.take(columns * inputs, torch.int8)
        scales = torch.zeros(columns // TILE_OUTPUTS, TILE_OUTPUTS)
        for first, weight in enumerate(weights):
            codes = weight.codes.contiguous()
            self.native.pack_bytes(
                codes.data_ptr(), tiles.data_ptr(), outputs, inputs, first, len(weights)
            )
            whole = torch.zeros(round_up(outputs, TILE_OUTPUTS))
            whole[:outputs] = weight.scales
            part = whole.view(-1, TILE_OUTPUTS)
            scales[first :: len(weights)][: len(part)] = part
        return Packed(Format.BYTES, tiles, scales.flatten())


class _Bytes(NamedTuple):
    """A weight in int8."""

    codes: Tensor
    """int8 [outputs, inputs]"""
    scales: Tensor
    """float32 [outputs]"""


def _rounded_rows(weight: Tensor) -> _Bytes:
    """Round a weight to int8, with a scale for each output."""
    exact = weight.float()
    largest = exact.abs().amax(dim=1, keepdim=True)
    inverse = torch.where(largest > 0, torch.full_like(largest, 127) / largest, 0)
    return _Bytes((exact * inverse).round().to(torch.int8), largest[:, 0] / 127)


def _has_bytes(weight: QuantizedWeight) -> bool:
    """Return whether a quantized weight is int8 with one scale for each output."""
    scales = weight.scales
    return (
        weight.bits == 8
        and isinstance(scales, GroupNumbers)
        and scales.each.shape[1] == 1
        and weight.offsets is None
        and weight.order is None
        and not weight.shape[1] % _BYTE_INPUTS
    )


def _stored_bytes(weight: QuantizedWeight) -> _Bytes:
    codes = weight.codes if isinstance(weight.codes, Tensor) else weight.codes.decode()
    return _Bytes((codes ^ 128).view(torch.int8), weight.scales.float()[:, 0])
