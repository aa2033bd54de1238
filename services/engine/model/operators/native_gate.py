"""Gates whose activation is a kernel."""

from abc import abstractmethod

from torch import Tensor

from services.engine.kernels.library import Kernel, Native
from services.engine.kernels.structures import GateCall
from services.engine.model.architecture.activation import SWIGLU, Activation, Nonlinearity
from services.engine.model.operators.composed_projections import AdaptedProjection
from services.engine.model.operators.deltas import Delta
from services.engine.model.operators.interface import Gate, Projection

__all__ = ["DirectGate", "GateProduct", "NativeGate", "is_native"]


_GELU = Activation(Nonlinearity.GELU_TANH)
_PLAIN = (SWIGLU, _GELU)


def is_native(activation: Activation) -> bool:
    """Return whether `Kernel.GATE_ROWS` computes an activation."""
    return activation in _PLAIN or activation.nonlinearity is Nonlinearity.CLAMPED_SWIGLU


class GateProduct(Projection):
    """A product that can be written where `Kernel.GATE_ROWS` reads it."""

    @abstractmethod
    def into_gate(self, rows: Tensor) -> None:
        """Write the product of `rows` [n, inputs] to the place that `Kernel.GATE_ROWS` reads."""


class NativeGate(Gate):
    """A gate of one product that holds both factors."""

    def __init__(
        self, native: Native, product: Projection, activation: Activation, code: int
    ) -> None:
        """activation: one for which `is_native` is true."""
        self._native = native
        self._product = product
        self._activation = activation
        self._code = code
        self.weight_bytes = product.weight_bytes

    @property
    def is_adapted(self) -> bool:
        return self._product.is_adapted

    def adapt(self, delta: Delta) -> None:
        self._product = AdaptedProjection(self._product, delta)

    def into(self, rows: Tensor, out: Tensor) -> None:
        both = out.new_empty((out.shape[0], 2 * out.shape[1]))
        self._product.into(rows, both)
        self._run(both.data_ptr(), out)

    def _run(self, both: int | None, out: Tensor) -> None:
        """Activate a product at this address; None = the last product by `into_gate`."""
        activation = self._activation
        constants = (activation.alpha, activation.limit, activation == _GELU)
        call = GateCall(both, out.data_ptr(), *out.shape, out.stride(0), *constants, self._code)
        self._native.run(Kernel.GATE_ROWS, call)


class DirectGate(NativeGate):
    """A gate that needs no tensor for its product, unless an adapter adds to it."""

    def __init__(
        self, native: Native, product: GateProduct, activation: Activation, code: int
    ) -> None:
        super().__init__(native, product, activation, code)
        self.product = product

    def into(self, rows: Tensor, out: Tensor) -> None:
        if self.is_adapted:
            super().into(rows, out)
            return
        self.product.into_gate(rows)
        self._run(None, out)
