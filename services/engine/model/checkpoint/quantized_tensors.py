"""Tensors of a Hugging Face checkpoint whose weights, or some of them, are quantized."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

from services.engine.model.checkpoint.quantized import QuantizedWeight, Weight, decoded
from services.engine.model.checkpoint.schemes import Scheme
from services.engine.model.checkpoint.tensors import Checkpoint, StoredTensor

__all__ = ["QuantizedTensors"]

_MATRIX = 2


class QuantizedTensors(Checkpoint):
    """The safetensors files of a checkpoint with quantized weights."""

    is_quantized = True

    def __init__(self, directory: Path, scheme: Scheme) -> None:
        super().__init__(directory)
        self._scheme = scheme

    def require(
        self,
        wanted: Iterable[StoredTensor],
        ignored: Sequence[str],
        among: Sequence[str] = ("*",),
    ) -> int:
        """Require the tensors that quantized weights are made of."""
        parts = (part for stored in wanted for part in self._parts(stored) or (stored,))
        return super().require(parts, (*ignored, *self._scheme.unused), among)

    def tensor(self, stored: StoredTensor) -> Tensor:
        """Return a view of the mapped file, or a decoded weight in float32."""
        weight = self._joined(stored)
        return super().tensor(stored) if weight is None else decoded(weight)

    def quantized(self, stored: StoredTensor) -> QuantizedWeight | None:
        weight = self._joined(stored)
        return weight if isinstance(weight, QuantizedWeight) else None

    def num_bytes(self, stored: StoredTensor) -> int:
        return sum(map(super().num_bytes, self._parts(stored) or (stored,)))

    def _joined(self, stored: StoredTensor) -> Weight | None:
        parts = self._parts(stored)
        if not parts:
            return None
        tensors = {part.name: Checkpoint.tensor(self, part) for part in parts}
        return self._scheme.join(stored, tensors)

    def _parts(self, stored: StoredTensor) -> Sequence[StoredTensor]:
        return self._scheme.parts(stored, self._found) if len(stored.shape) == _MATRIX else ()
