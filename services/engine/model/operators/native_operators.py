"""Operators on the portable CPU kernels, with matrix products in torch."""

from ctypes import byref
from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from services.engine.kernels.library import DTYPES, Arrangement, Kernel, Native
from services.engine.kernels.memory import Arena, allocate
from services.engine.kernels.structures import (
    ArrangeCall,
    KeepCall,
    RotationCall,
    RowNormCall,
    ScaleCall,
)
from services.engine.kernels.tiles import TILE
from services.engine.model.architecture.activation import SWIGLU, Activation, GateFunction
from services.engine.model.architecture.routing import Routing
from services.engine.model.operators.interface import Gate, HeadNorms, Projection
from services.engine.model.operators.low_rank import LowRankProduct
from services.engine.model.operators.native_gate import (
    DirectGate,
    GateProduct,
    NativeGate,
    is_native,
)
from services.engine.model.operators.native_low_rank import NativeLowRankProduct
from services.engine.model.operators.native_mixture import routing_call
from services.engine.model.operators.rotation import Rotation
from services.engine.model.operators.torch_operators import TorchOperators, join

__all__ = ["NativeOperators"]

_GATES = {
    GateFunction.SIGMOID: Arrangement.MULTIPLY_BY_SIGMOID,
    GateFunction.SOFTPLUS: Arrangement.MULTIPLY_BY_SOFTPLUS,
}


class NativeOperators(TorchOperators):
    """Operators for float32 and bfloat16 on any CPU."""

    _tiles_inputs: ClassVar = False
    """True if inputs of products lie in tiles"""

    def __init__(self, native: Native, dtype: torch.dtype) -> None:
        super().__init__(dtype, torch.device("cpu"))
        self._native = native
        self._code = DTYPES[dtype]
        self.arena = Arena()
        native.use_pool(0)

    def empty(self, rows: int, width: int) -> Tensor:
        return allocate((rows, width), self._dtype)

    def arrange(self, rows: Tensor, out: Tensor) -> None:
        self._arrange(rows, out, Arrangement.COPY)

    def multiply(self, factors: Tensor, out: Tensor) -> None:
        self._arrange(factors, out, Arrangement.MULTIPLY)

    def multiply_by_gates(self, gates: Tensor, function: GateFunction, out: Tensor) -> None:
        self._arrange(gates, out, _GATES[function], out.shape[1] // gates.shape[1])

    def add(self, rows: Tensor, out: Tensor) -> None:
        self._run_arrange(rows, out, Arrangement.ADD_ROWS, is_tiled=False)

    def _arrange(
        self, rows: Tensor, out: Tensor, arrangement: Arrangement, columns: int = 1
    ) -> None:
        tile = TILE if self._tiles_inputs else 1
        assert rows.shape[1] * columns % tile == 0
        assert columns == 1 or columns % tile == 0
        self._run_arrange(rows, out, arrangement, columns, is_tiled=self._tiles_inputs)

    def _run_arrange(
        self,
        rows: Tensor,
        out: Tensor,
        arrangement: Arrangement,
        columns: int = 1,
        *,
        is_tiled: bool,
    ) -> None:
        """columns: number of columns of `out` for each number in `rows`."""
        count, numbers = rows.shape
        call = ArrangeCall(
            *(rows.data_ptr(), out.data_ptr(), count, numbers * columns, columns),
            *(rows.stride(0), is_tiled, arrangement, self._code),
        )
        self._native.run(Kernel.ARRANGE, call)

    def low_rank(self, parts: int, widest: int) -> LowRankProduct:
        return NativeLowRankProduct(self._native, self.plain)

    def gate(
        self,
        gate: Tensor,
        up: Tensor | None,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        activation: Activation = SWIGLU,
    ) -> Gate:
        if not is_native(activation):
            return super().gate(gate, up, gate_bias, up_bias, activation)
        product = self.projection(*join(gate, up, gate_bias, up_bias))
        return self._activated(product, activation)

    def _activated(self, product: Projection, activation: Activation) -> Gate:
        """Make a gate of a product with both factors. activation: `is_native` is true for it."""
        if isinstance(product, GateProduct):
            return DirectGate(self._native, product, activation, self._code)
        return NativeGate(self._native, product, activation, self._code)

    def choose(
        self, scores: Tensor, routing: Routing, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        call = routing_call(routing, scores.shape[1], bias)
        if call is None:
            return super().choose(scores, routing, bias)
        shape = (len(scores), routing.per_token)
        chosen, factors = torch.empty(shape, dtype=torch.int64), torch.empty(shape)
        addresses = (chosen.data_ptr(), factors.data_ptr())
        self._native.choose_experts(byref(call), scores.data_ptr(), len(scores), *addresses)
        return chosen, factors

    def rms_norm(self, rows: Tensor, weight: Tensor, epsilon: float, out: Tensor) -> None:
        self._norm_rows(rows, weight, epsilon, out, adds=False)

    def add_rms_norm(self, rows: Tensor, weight: Tensor, epsilon: float, out: Tensor) -> None:
        self._norm_rows(rows, weight, epsilon, out, adds=True)

    def _norm_rows(
        self, rows: Tensor, weight: Tensor, epsilon: float, out: Tensor, *, adds: bool
    ) -> None:
        count, width = rows.shape
        call = RowNormCall(
            *(rows.data_ptr(), weight.data_ptr(), out.data_ptr()),
            *(count, 1, width, width, epsilon, adds, self._code),
        )
        self._native.run(Kernel.ROW_NORM, call)

    def norm_heads(self, heads: Tensor, num_queries: int, norms: HeadNorms, epsilon: float) -> None:
        if norms.centers or norms.queries.ndim > 1:
            super().norm_heads(heads, num_queries, norms, epsilon)
            return
        parts = (num_queries, norms.queries), (heads.shape[1] - num_queries, norms.keys)
        first = heads.data_ptr()
        for count, weight in parts:
            if count:
                self._norm_part(heads, first, count, weight, epsilon)
            first += count * heads.shape[2] * heads.element_size()

    def _norm_part(
        self, heads: Tensor, first: int, count: int, weight: Tensor, epsilon: float
    ) -> None:
        """Norm `count` heads of each token from address `first` on, each alone or all together."""
        width = len(weight)
        call = RowNormCall(
            *(first, weight.data_ptr(), first, heads.shape[0]),
            *(count * heads.shape[2] // width, width, heads.stride(0), epsilon, False, self._code),
        )
        self._native.run(Kernel.ROW_NORM, call)

    def clear(self, rows: Tensor) -> None:
        self._scale(rows, 0)

    def scale(self, rows: Tensor, factor: float) -> None:
        self._scale(rows, factor)

    def clip(self, rows: Tensor, limit: float) -> None:
        self._scale(rows, 1.0, limit)

    def _scale(self, rows: Tensor, factor: float, limit: float = inf) -> None:
        call = ScaleCall(rows.data_ptr(), *rows.shape, factor, limit, DTYPES[rows.dtype])
        self._native.run(Kernel.SCALE, call)

    def keep(self, rows: Tensor, kept: Tensor | None) -> None:
        call = KeepCall(
            rows.data_ptr(),
            None if kept is None else kept.data_ptr(),
            0 if kept is None else len(kept),
            rows.stride(0) * rows.element_size(),
            rows.shape[1:].numel() * rows.element_size(),
        )
        self._native.run(Kernel.KEEP, call)

    def rotate(
        self,
        heads: Tensor,
        num_queries: int,
        rotation: Rotation,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        epsilon: float,
    ) -> None:
        tokens, num_heads, head_dim = heads.shape
        if query_norm is not None and key_norm is not None and len(query_norm) > head_dim:
            norms = HeadNorms(query_norm, key_norm, centers=False)
            self.norm_heads(heads, num_queries, norms, epsilon)
            query_norm = key_norm = None
        call = RotationCall(
            heads.data_ptr(),
            heads.stride(0),
            rotation.cosines.data_ptr(),
            rotation.sines.data_ptr(),
            None if query_norm is None else query_norm.data_ptr(),
            None if key_norm is None else key_norm.data_ptr(),
            tokens,
            num_queries,
            num_heads - num_queries,
            head_dim,
            epsilon,
            self._code,
        )
        self._native.run(Kernel.ROTATION, call)
