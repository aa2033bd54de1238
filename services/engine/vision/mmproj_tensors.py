"""Tensors of an mmproj file of llama.cpp, under the names and in the forms of transformers."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from services.common.gguf.checkpoint_files import MMPROJ
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.checkpoint.gguf_tensors import GgufTensors
from services.engine.model.checkpoint.tensors import FoundTensor, StoredTensor, TensorFiles
from services.engine.vision.mmproj_names import MmprojNames

__all__ = ["MmprojTensors"]

_UP, _DOWN = ".ffn_up.", ".ffn_down."
_CONVOLUTION = 4  # dimensions
_MERGER = re.compile(r"v\.deepstack\.(\d+)\.")


class MmprojTensors(TensorFiles):
    """The mmproj file of a checkpoint's directory."""

    def __init__(self, directory: Path, names: MmprojNames, *, hidden: int, heads: int) -> None:
        """Read the header. Raises CheckpointError for a damaged file, or for unknown tensors.

        hidden, heads: width of the tower, and its attention heads.
        """
        super().__init__(next((directory / MMPROJ).iterdir()).readlink())
        self._gguf = GgufTensors(directory, part=MMPROJ)
        self._names = names
        self._heads = heads
        self._parts: dict[str, list[StoredTensor]] = {}
        exchanges = self._exchanges_feed_forward(hidden)
        mergers = _mergers(self._gguf.names)
        found: dict[str, dict[int, StoredTensor]] = {}
        for name in self._gguf.names:
            place = names.place(_numbered(_exchanged(name) if exchanges else name, mergers))
            if place is not None:
                found.setdefault(place.parameter, {})[place.part] = self._gguf.stored(name)
            elif not any(fnmatchcase(name, pattern) for pattern in names.ignored):
                raise CheckpointError(
                    f"{self._directory}: the tensor {name:.100} is not part of the tower and "
                    "projector that the file describes."
                )
        for parameter, parts in found.items():
            self._parts[parameter] = [parts[number] for number in sorted(parts)]
            shapes = [each.shape for each in self._parts[parameter]]
            if not _can_join(shapes):
                raise CheckpointError(
                    f"{self._directory} is damaged: the parts of {parameter} have the shapes "
                    f"{', '.join(str([*shape]) for shape in shapes)}."
                )
            shape = _joined_shape(shapes)
            if parameter in names.flattened:
                shape = (shape[0], prod(shape[1:]))
            self._found[parameter] = FoundTensor(self._directory, shape, "")

    def __exit__(self, *failure: object) -> None:
        self._gguf.__exit__(*failure)

    def tensor(self, stored: StoredTensor) -> Tensor:
        """Return the parameter in float32 or, if it is one tensor of plain numbers, as stored."""
        whole = _joined([self._gguf.tensor(each) for each in self._parts[stored.name]])
        if stored.name in self._names.norms:
            return whole.float() - 1
        if stored.name in self._names.flattened:
            return whole.permute(0, 2, 3, 1).reshape(stored.shape)
        module, _, _ = stored.name.rpartition(".")
        if any(fnmatchcase(module, pattern) for pattern in self._names.interleaved):
            return _with_apart_pairs(whole, self._heads)
        return whole.view(stored.shape)

    def _check(self, stored: StoredTensor) -> int:
        if not self.holds(stored.name):
            raise CheckpointError(f"{self._directory} is damaged: it lacks {stored.name}.")
        return super()._check(stored)

    def _fits(self, stored: StoredTensor, found: FoundTensor) -> bool:
        """Compare shapes. The converter gives scalars a dimension."""
        return stored.fits(found.shape) or (not stored.shape and found.shape == (1,))

    def _num_bytes(self, stored: StoredTensor, found: FoundTensor) -> int:
        return sum(self._gguf.num_bytes(each) for each in self._parts[stored.name])

    def _exchanges_feed_forward(self, hidden: int) -> bool:
        """Return whether up and down have each other's names, as in old files."""
        name = f"v.blk.0{_DOWN}weight"
        return self._gguf.holds(name) and self._gguf.stored(name).shape[-1] == hidden


def _mergers(names: Sequence[str]) -> Sequence[str]:
    """Return the numbers of the layers whose outputs decoder layers add, in order."""
    matches = (_MERGER.match(name) for name in names)
    return sorted({match[1] for match in matches if match is not None}, key=int)


def _numbered(name: str, mergers: Sequence[str]) -> str:
    """Return the name with the number of the merger, as in transformers, and not of its layer."""
    match = _MERGER.match(name)
    if match is None:
        return name
    return f"{name[: match.start(1)]}{mergers.index(match[1])}{name[match.end(1) :]}"


def _exchanged(name: str) -> str:
    if _UP in name:
        return name.replace(_UP, _DOWN)
    return name.replace(_DOWN, _UP)


def _can_join(shapes: Sequence[tuple[int, ...]]) -> bool:
    """Return whether tensors can be parts of one, as in `_joined_shape`."""
    fixed = 0 if len(shapes[0]) == _CONVOLUTION else 1
    first = shapes[0]
    return all(len(each) == len(first) and each[fixed:] == first[fixed:] for each in shapes)


def _joined_shape(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    first = shapes[0]
    if len(shapes) == 1:
        return first
    if len(first) == _CONVOLUTION:  # frames of a patch
        return (*first[:2], len(shapes), *first[2:])
    return (sum(shape[0] for shape in shapes), *first[1:])


def _joined(parts: list[Tensor]) -> Tensor:
    """Return the tensor of transformers that the parts make up, as in `_joined_shape`."""
    if len(parts) == 1:
        return parts[0]
    return torch.stack(parts, dim=2) if parts[0].ndim == _CONVOLUTION else torch.cat(parts)


def _with_apart_pairs(rows: Tensor, heads: int) -> Tensor:
    """Return the rows of heads with the two of a RoPE pair half a head apart."""
    pairs = rows.view(heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
