"""Heads of single tokens beside the vectors of texts (BGE-M3)."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

import torch
from torch import Tensor
from torch.nn.functional import linear, normalize

from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.checkpoint.config import CheckpointError

__all__ = ["TokenHeads"]

_VECTORS, _WEIGHTS = "colbert_linear.pt", "sparse_linear.pt"
_ARCHITECTURE = "XLMRobertaModel"
_MATRIX = 2  # dimensions


@dataclass(frozen=True, slots=True)
class TokenHeads:
    """A vector and a weight of each token, from its state, in float32.

    Source: Chen et al., "M3-Embedding: Multi-Linguality, Multi-Functionality, Multi-Granularity
    Text Embeddings Through Self-Knowledge Distillation", 2024.
    """

    width: int
    """Width of a token's vector"""
    _vectors: Callable[[Tensor], Tensor]
    _weights: Callable[[Tensor], Tensor]

    def vectors(self, states: Tensor, *, is_raw: bool) -> Tensor:
        """Return float32 [tokens, width], of length 1 unless `is_raw`."""
        vectors = self._vectors(states)
        return vectors if is_raw else normalize(vectors)

    def weights(self, states: Tensor, *, is_raw: bool) -> Tensor:
        """Return float32 [tokens, 1], at least 0 unless `is_raw`."""
        weights = self._weights(states)
        return weights if is_raw else weights.relu()

    @staticmethod
    def read(directory: Path, spec: ModelSpec, device: torch.device) -> "TokenHeads | None":
        """Read both heads; None if a checkpoint has none. Raises CheckpointError."""
        files = [directory / name for name in (_VECTORS, _WEIGHTS)]
        held = [file for file in files if file.is_file()]
        if spec.architecture != _ARCHITECTURE or not held:
            return None
        if len(held) < len(files):
            raise CheckpointError(f"{directory} has {held[0].name}, but not both heads of BGE-M3.")
        width, vectors = _linear(files[0], spec.hidden_size, device)
        count, weights = _linear(files[1], spec.hidden_size, device)
        if count != 1:
            raise CheckpointError(f"{files[1]}: a token has {count} weights, and must have one.")
        return TokenHeads(width, vectors, weights)


def _linear(
    file: Path, inputs: int, device: torch.device
) -> tuple[int, Callable[[Tensor], Tensor]]:
    """Return the outputs of a linear layer, and the layer. Raises CheckpointError."""
    stored = _stored(file)
    named = stored if isinstance(stored, dict) else {}
    tensors = {name: part for name, part in named.items() if isinstance(part, Tensor)}
    if named.keys() != {"weight", "bias"} or tensors.keys() != named.keys():
        raise CheckpointError(f"{file} must hold a weight and a bias alone.")
    weight, bias = tensors["weight"], tensors["bias"]
    # other tensors, such as those that repeat one number, may take more memory than the file
    if not all(map(_is_plain, (weight, bias))):
        raise CheckpointError(f"{file}: weight and bias must be dense tensors of real numbers.")
    if (
        weight.dim() != _MATRIX
        or not len(weight)
        or weight.shape[1] != inputs
        or bias.shape != weight.shape[:1]
    ):
        raise CheckpointError(
            f"{file}: weight and bias have the shapes {list(weight.shape)} and {list(bias.shape)}, "
            f"but the model's states have {inputs} numbers."
        )
    weight, bias = (part.to(device, torch.float32) for part in (weight, bias))
    return len(weight), lambda states: linear(states, weight, bias)


def _stored(file: Path) -> object:
    """Return the content of a file written by torch.save. Raises CheckpointError.

    The file is a pickle. Its reader takes tensors and plain containers, and runs no code. A file
    that would take more memory than its own size is refused.
    """
    try:
        with ZipFile(file) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > file.stat().st_size:
            raise CheckpointError(f"{file} is compressed. Save it with torch.save.")
        return torch.load(file, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises errors of any class
        raise CheckpointError(f"{file} can't be read: {error or type(error).__name__}") from None


def _is_plain(tensor: Tensor) -> bool:
    is_dense = tensor.layout is torch.strided and not tensor.is_quantized
    return is_dense and tensor.is_contiguous() and tensor.is_floating_point() and tensor.is_cpu
