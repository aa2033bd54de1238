"""The few operations that a decoder layer is made of, besides attention."""

from abc import ABC, abstractmethod

from torch import Tensor

from services.engine.model.rotary import Rotation

__all__ = ["Gate", "Operators", "Projection"]


class Projection(ABC):
    """A linear layer that owns its weight, in whatever layout it computes fastest from."""

    @abstractmethod
    def into(self, rows: Tensor, out: Tensor) -> None:
        """out [n, outputs] = rows [n, inputs] @ weight.T + bias. Both contiguous.

        `out` may be float32 whatever the model's dtype is.
        """

    @abstractmethod
    def add_to(self, rows: Tensor, out: Tensor) -> None:
        """out += rows @ weight.T + bias"""


class Gate(ABC):
    """The first half of a SwiGLU feed-forward layer (https://arxiv.org/abs/2002.05202)."""

    @abstractmethod
    def into(self, rows: Tensor, out: Tensor) -> None:
        """out [n, outputs] = silu(rows @ gate.T) * (rows @ up.T), biases added before each"""


class Operators(ABC):
    """One implementation of all of them, for one dtype and device."""

    @abstractmethod
    def empty(self, rows: int, width: int) -> Tensor:
        """An uninitialised contiguous activation [rows, width] in the model's dtype."""

    @abstractmethod
    def projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        """`weight`: [outputs, inputs], of any floating dtype; it is copied."""

    @abstractmethod
    def gate(
        self, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None
    ) -> Gate:
        """`gate`, `up`: [outputs, inputs] each; they are copied."""

    @abstractmethod
    def weight_bytes(self, outputs: int, inputs: int) -> int:
        """What a product reads of a weight [outputs, inputs]."""

    @abstractmethod
    def rms_norm(self, rows: Tensor, weight: Tensor, epsilon: float, out: Tensor) -> None:
        """RMSNorm (https://arxiv.org/abs/1910.07467) of each row; rows, out [n, width]."""

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
        """Rotates queries and keys in place, after an RMSNorm over each head where one is given.

        heads: [tokens, heads, head_dim], the first `num_queries` of them queries, the others keys;
        its first dimension may have gaps. Norms: [head_dim].
        """
