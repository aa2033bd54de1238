"""The few operations that a decoder layer is made of, besides attention."""

from abc import ABC, abstractmethod

from torch import Tensor

from services.engine.model.architecture.activation import SWIGLU, Activation
from services.engine.model.architecture.rotary import Rotation
from services.engine.model.operators.recording import Recording

__all__ = ["Gate", "NormedProjection", "Operators", "Projection"]


class Projection(ABC):
    """A linear layer that owns its weight, in whatever layout it computes fastest from."""

    finds_largest = False
    """Whether it has `largest`"""

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes of weights that a product reads, as they are kept."""

    @abstractmethod
    def into(self, rows: Tensor, out: Tensor) -> None:
        """out [n, outputs] = rows [n, inputs] @ weight.T + bias. Both contiguous.

        `out` may be float32 whatever the model's dtype is.
        """

    @abstractmethod
    def add_to(self, rows: Tensor, out: Tensor) -> None:
        """out += rows @ weight.T + bias"""

    def largest(self, rows: Tensor, out: Tensor) -> None:
        """out int64 [n] = which output is largest for each row, the first of equals; -1 where none
        is above minus infinity."""
        raise NotImplementedError


class Gate(ABC):
    """The first half of a feed-forward layer: one or two products and what is applied to them."""

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes of weights that its products read, as they are kept."""

    @abstractmethod
    def into(self, rows: Tensor, out: Tensor) -> None:
        """out [n, outputs] = activation(rows @ gate.T) * (rows @ up.T), biases added before each

        Without `up`, there is no second factor.
        """


class Operators(ABC):
    """One implementation of all of them, for one dtype and device."""

    rows_at_once = 32
    """Rows that products compute at once: with fewer they take as long"""

    @abstractmethod
    def empty(self, rows: int, width: int) -> Tensor:
        """An uninitialised contiguous activation [rows, width] in the model's dtype."""

    @abstractmethod
    def temporary(self, rows: int, width: int) -> Tensor:
        """The same for one that is soon dropped: cheap to get, slower to use."""

    @abstractmethod
    def projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        """`weight`: [outputs, inputs], of any floating dtype; it is copied."""

    def exact_projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        """One that decides something, and whose weight is never rounded to int8."""
        return self.projection(weight, bias)

    @abstractmethod
    def gate(
        self,
        gate: Tensor,
        up: Tensor | None,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        activation: Activation = SWIGLU,
    ) -> Gate:
        """`gate`, `up`: [outputs, inputs] each; they are copied. `up` where `activation` gates."""

    def recording(self) -> Recording | None:
        """What runs a decoder's layers by one call; None where they can't be recorded."""
        return None

    @abstractmethod
    def arrange(self, rows: Tensor, out: Tensor) -> None:
        """out = rows, in the layout that products read; both [n, width]."""

    @abstractmethod
    def rms_norm(self, rows: Tensor, weight: Tensor, epsilon: float, out: Tensor) -> None:
        """RMSNorm (https://arxiv.org/abs/1910.07467) of each row, in the layout of products."""

    @abstractmethod
    def add_rms_norm(self, rows: Tensor, weight: Tensor, epsilon: float, out: Tensor) -> None:
        """out += the RMSNorm of each row of a product, which may be written."""

    @abstractmethod
    def gather(self, rows: Tensor, index: Tensor) -> Tensor:
        """Some rows of what a product reads, in a temporary. `index`: int64 [n]."""

    def keep(self, rows: Tensor, kept: Tensor | None) -> None:
        """Moves some rows to the front, where the others are lost; None keeps all.

        rows: [n, ...], its first dimension may have gaps; kept: int64, rising.
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
        """Rotates queries and keys in place, after an RMSNorm of each where one is given.

        heads: [tokens, heads, head_dim], the first `num_queries` of them queries, the others keys;
        its first dimension may have gaps. Norms: [head_dim] over each head, or over all heads of a
        token together, as wide as these are.
        """


class NormedProjection(Projection):
    """A projection with an RMSNorm of what it makes."""

    def __init__(
        self, projection: Projection, norm: Tensor, epsilon: float, operators: Operators
    ) -> None:
        self._projection = projection
        self._norm = norm
        self._epsilon = epsilon
        self._operators = operators

    @property
    def weight_bytes(self) -> int:
        return self._projection.weight_bytes

    def into(self, rows: Tensor, out: Tensor) -> None:
        self.add_to(rows, out.zero_())

    def add_to(self, rows: Tensor, out: Tensor) -> None:
        product = self._operators.temporary(*out.shape)
        self._projection.into(rows, product)
        self._operators.add_rms_norm(product, self._norm, self._epsilon, out)
