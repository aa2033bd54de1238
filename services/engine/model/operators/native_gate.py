"""Gates whose activation is a kernel."""

from torch import Tensor

from services.engine.kernels.library import GateCall, Kernel, Native
from services.engine.model.architecture.activation import SWIGLU, Activation, Nonlinearity
from services.engine.model.operators.interface import AdaptedProjection, Delta, Gate, Projection

__all__ = ["NativeGate", "is_native"]


_GELU = Activation(Nonlinearity.GELU_TANH)
_PLAIN = (SWIGLU, _GELU)


def is_native(activation: Activation) -> bool:
    """Return whether `Kernel.GATE` computes an activation."""
    return activation in _PLAIN or activation.nonlinearity is Nonlinearity.CLAMPED_SWIGLU


class NativeGate(Gate):
    """A gate of one product that holds both factors."""

    def __init__(
        self, native: Native, product: Projection, activation: Activation, code: int
    ) -> None:
        """activation: one that `is_native`."""
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
        """Activate a product at this address; None = the last grouped product into no tensor."""
        activation = self._activation
        constants = (activation.alpha, activation.limit, activation == _GELU)
        call = GateCall(both, out.data_ptr(), *out.shape, out.stride(0), *constants, self._code)
        self._native.run(Kernel.GATE, call)
