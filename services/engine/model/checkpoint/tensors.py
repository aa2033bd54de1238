"""Tensors in the files of a checkpoint directory."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.engine.kernels.memory import give_back_files
from services.engine.model.checkpoint.config import CheckpointError, Config
from services.engine.model.checkpoint.mxfp4 import Mxfp4Weight
from services.engine.model.checkpoint.quantized import QuantizedWeight, StoredRows

__all__ = ["Checkpoint", "FoundTensor", "StoredTensor", "TensorFiles"]

_FLOATING = {"F32": 4, "BF16": 2, "F16": 2}
"""Supported dtypes of weights, as safetensors names them, and their sizes in bytes"""
_SIZES = {**_FLOATING, "F8_E8M0": 1, "U8": 1, "I8": 1, "I32": 4, "I64": 8}
"""Sizes of all dtypes that some tensors may have"""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that a checkpoint must hold."""

    name: str
    shape: tuple[int, ...]
    dtype: str | tuple[str, ...] | None = None
    """Dtypes that it may have, as safetensors names them; None = any floating-point dtype"""
    in_any_order: bool = False
    """True if the file may hold the last two dimensions in the other order"""

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether the file may hold the tensor in this shape."""
        other = (*self.shape[:-2], *reversed(self.shape[-2:]))
        return shape == self.shape or (self.in_any_order and shape == other)


@dataclass(frozen=True, slots=True)
class FoundTensor:
    """A tensor in a file's header."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class TensorFiles(ABC):
    """The files of a checkpoint, which are open within this context manager."""

    is_quantized = False
    """True if weights, or some of them, are codes"""
    types_without_codes: Sequence[str] = ()
    """Types of quantized weights that are decoded at loading in any case"""
    has_mxfp4_experts = False
    """True if `mxfp4` returns the weights of experts, or of some of them"""
    has_blocks = False
    """True if the codes of weights, or of some of them, lie in blocks, row by row"""
    has_peft_names = True
    """True if the tensors have the names by which PEFT's adapters refer to them"""

    def __init__(self, directory: Path, *, maps: bool = False) -> None:
        """maps: `quantized` returns weights that stay in the files, even after these are closed."""
        self.maps = maps
        self._directory = directory
        self._found: dict[str, FoundTensor] = {}

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, *failure: object) -> None:
        """Close the files."""

    @abstractmethod
    def tensor(self, stored: StoredTensor) -> Tensor:
        """Return a tensor of floating-point numbers, or of its `dtype`."""

    def quantized(self, stored: StoredTensor) -> QuantizedWeight | None:
        """Return a weight in groups of codes; None if it is stored otherwise."""
        return None

    def mxfp4(self, stored: StoredTensor, device: torch.device) -> Mxfp4Weight | None:
        """Copy a weight in MXFP4 to `device`; None if it is stored otherwise."""
        return None

    def rows(self, stored: StoredTensor) -> StoredRows | None:
        """Return the rows of a weight in groups of codes; None if it is stored otherwise."""
        return None

    @abstractmethod
    def _num_bytes(self, stored: StoredTensor, found: FoundTensor) -> int:
        """Return the tensor's bytes in the file. Raises CheckpointError for a wrong dtype."""

    def num_bytes(self, stored: StoredTensor) -> int:
        """Return the bytes that the files hold for a tensor that `require` found."""
        return self._num_bytes(stored, self._found[stored.name])

    def leaves_unquantized(self, stored: StoredTensor) -> bool:
        """Return whether this weight of a quantized checkpoint is not quantized."""
        return False

    def holds(self, name: str) -> bool:
        return name in self._found

    @property
    def names(self) -> Sequence[str]:
        """Names of all tensors in the files."""
        return tuple(self._found)

    def stored(self, name: str) -> StoredTensor:
        """Return a tensor of the files in the shape that it has there."""
        return StoredTensor(name, self._found[name].shape)

    def require(
        self,
        wanted: Iterable[StoredTensor],
        ignored: Sequence[str],
        among: Sequence[str] = ("*",),
    ) -> int:
        """Return the bytes of `wanted`. Raises CheckpointError unless the files hold exactly these.

        Tensors whose names match a pattern of `ignored`, or none of `among`, are optional.
        """
        names, num_bytes = set(), 0
        for stored in wanted:
            names.add(stored.name)
            num_bytes += self._check(stored)
        for name, found in self._found.items():
            if name not in names and _matches(name, among) and not _matches(name, ignored):
                raise CheckpointError(
                    f"{found.file}: the tensor {name} is not part of the model that "
                    "config.json describes."
                )
        return num_bytes

    def _fits(self, stored: StoredTensor, found: FoundTensor) -> bool:
        return stored.fits(found.shape)

    def _check(self, stored: StoredTensor) -> int:
        """Return the tensor's size in bytes."""
        found = self._found.get(stored.name)
        if found is None:
            raise CheckpointError(f"{self._directory}: no file holds the tensor {stored.name}.")
        if not self._fits(stored, found):
            raise CheckpointError(
                f"{found.file}: the tensor {stored.name} has the shape {list(found.shape)}, "
                f"but config.json asks for {list(stored.shape)}."
            )
        return self._num_bytes(stored, found)


class Checkpoint(TensorFiles):
    """The safetensors files of a checkpoint in Hugging Face format.

    Tensors are views of the mapped files. Entering raises CheckpointError if a file is missing or
    truncated.
    """

    def __init__(self, directory: Path, *, maps: bool = False) -> None:
        super().__init__(directory, maps=maps)
        self._stack = ExitStack()
        self._open: dict[Path, safe_open] = {}

    @staticmethod
    def config(directory: Path) -> Config:
        """Read config.json of the checkpoint in `directory`."""
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is not a directory.")
        return Config.read(directory / "config.json")

    def __enter__(self) -> Self:
        with self._stack:
            for file in self._files():
                self._add(file)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *failure: object) -> None:
        """Release the files' pages; views that outlive the context read them again."""
        give_back_files(self._open)
        self._open.clear()
        self._stack.close()

    def tensor(self, stored: StoredTensor) -> Tensor:
        """Return a view of the mapped file; reading the view reads the disk."""
        file = self._found[stored.name].file
        tensor: Tensor = self._open[file].get_tensor(stored.name)  # type: ignore[no-untyped-call]
        is_other = stored.in_any_order and tensor.shape != stored.shape
        return tensor.mT if is_other else tensor

    def _num_bytes(self, stored: StoredTensor, found: FoundTensor) -> int:
        known = (stored.dtype,) if isinstance(stored.dtype, str) else stored.dtype
        sizes = _FLOATING if known is None else {dtype: _SIZES[dtype] for dtype in known}
        if found.dtype not in sizes:
            raise CheckpointError(
                f"{found.file}: the tensor {stored.name} is stored as {found.dtype}, which is not "
                f"supported. Supported: {', '.join(sizes)}."
            )
        return prod(found.shape) * sizes[found.dtype]

    def _files(self) -> list[Path]:
        index = self._directory / "model.safetensors.index.json"
        if not index.exists():
            return [self._directory / "model.safetensors"]
        placed = Config.read(index).section("weight_map")
        names = sorted({placed.text(name) for name in placed.values})
        if any(Path(name).name != name for name in names):
            raise CheckpointError(f"{index} names a file outside the checkpoint.")
        return [self._directory / name for name in names]

    def _add(self, file: Path) -> None:
        if not file.is_file():
            raise CheckpointError(f"{file} does not exist.")
        if not os.access(file, os.R_OK):
            raise CheckpointError(f"{file} is not readable by this user.")
        try:
            opened = self._stack.enter_context(safe_open(file, framework="pt"))
            for name in opened.keys():  # noqa: SIM118  (not a mapping)
                part = opened.get_slice(name)
                self._found[name] = FoundTensor(file, tuple(part.get_shape()), part.get_dtype())
                self.has_blocks |= name.endswith("_blocks") and part.get_dtype() == "U8"
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is damaged or truncated: {error}.") from None
        self._open[file] = opened


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
