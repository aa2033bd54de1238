"""Tensors of GGUF files, decoded from ggml's block formats."""

import mmap
import warnings
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.common.gguf.checkpoint_files import PARTS
from services.common.gguf.ggml_types import BLOCK_SIZES, GgmlType
from services.common.gguf.gguf_file import GgufError, GgufFile, GgufTensor
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.checkpoint.gguf_groups import has_codes, read_groups
from services.engine.model.checkpoint.mxfp4 import Mxfp4Weight
from services.engine.model.checkpoint.quantized import QuantizedWeight, StoredRows
from services.engine.model.checkpoint.tensors import FoundTensor, StoredTensor, TensorFiles

__all__ = ["GgufTensors"]

_KIND = GgmlType
_PLAIN = {_KIND.F32: torch.float32, _KIND.F16: torch.float16, _KIND.BF16: torch.bfloat16}
_READ = (
    *_PLAIN,
    *(_KIND.Q8_0, _KIND.Q4_0, _KIND.Q4_1, _KIND.Q5_0, _KIND.Q5_1),
    *(_KIND.Q2_K, _KIND.Q3_K, _KIND.Q4_K, _KIND.Q5_K, _KIND.Q6_K),
    *(_KIND.IQ4_NL, _KIND.IQ4_XS, _KIND.MXFP4, _KIND.NVFP4),
    *(_KIND.IQ3_S, _KIND.IQ3_XXS, _KIND.IQ2_S, _KIND.IQ2_XS, _KIND.IQ2_XXS, _KIND.IQ1_M),
    *(_KIND.IQ1_S, _KIND.TQ1_0, _KIND.TQ2_0),
)
_OTHER_NAMES = {
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    41: "Q1_0",
    42: "Q2_0",
}
"""Names of ggml's types that are not supported, by number"""
_MATRIX = 2
_EXPERTS = "_exps."
"""Part of the name of a tensor that stacks all experts of a layer"""
_BARE = ".ffn_norm"
"""Name of a norm that Falcon-H1's files have without .weight"""
_STREAMS = ("altup_proj.", "altup_unembd_proj.")
"""Stacks of products of Gemma 3n, one for each stream after the first"""
_BOTH = "ffn_gate_up_exps"
_PRODUCTS = ("ffn_gate_exps", "ffn_up_exps")
"""Tensors that `_BOTH` holds, one after the other in each expert"""


@dataclass(frozen=True, slots=True)
class _Place:
    """Place of the bytes of a tensor, or of one expert in it."""

    file: Path
    start: int
    kind: GgmlType
    shape: tuple[int, ...]
    factor: float = 1.0
    """Number that all weights are multiplied by; only those in NVFP4 have one"""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, the last dimension of the tensor."""
        block, size = BLOCK_SIZES[self.kind]
        return self.shape[-1] // block * size

    @property
    def num_bytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, slots=True)
class _MappedFile:
    """A file mapped into memory, which must not be written to."""

    memory: mmap.mmap
    data: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, file: Path) -> "_MappedFile":
        with file.open("rb") as opened:
            # A mapping that could be written needs as much memory as the file has, or is refused.
            memory = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
        with warnings.catch_warnings():  # torch warns of a tensor that must not be written to
            warnings.simplefilter("ignore")
            return cls(memory, torch.frombuffer(memory, dtype=torch.uint8).numpy())


@dataclass(frozen=True, slots=True)
class _GgufRows:
    """Rows of the mapped file."""

    data: npt.NDArray[np.uint8]
    """[rows, bytes of a row]"""
    place: _Place

    def decode(self, index: Tensor) -> Tensor:
        rows = self.data[index.numpy()]
        groups = read_groups(rows, self.place.kind)
        if groups is None:
            return _decoded(rows, self.place)
        return _scaled(groups.decode(), self.place)


def _decoded(rows: npt.NDArray[np.uint8], place: _Place) -> Tensor:
    """Return numbers of any type, a few rows at a time, so that large tensors need little room."""
    # imported here only: gguf imports much of what is installed, such as mistral_common
    from gguf import GGMLQuantizationType, dequantize

    return _scaled(torch.from_numpy(dequantize(rows, GGMLQuantizationType(place.kind))), place)


def _scaled(numbers: Tensor, place: _Place) -> Tensor:
    return numbers if place.factor == 1 else numbers * place.factor


class GgufTensors(TensorFiles):
    """All parts of a GGUF file, mapped into memory.

    Each expert of a stack is found as a tensor of its own, such as blk.0.ffn_up_exps.3.weight, with
    gate and up apart. So is each product of a stack of Gemma 3n, such as altup_proj.0.weight.
    """

    has_peft_names = False

    def __init__(
        self, directory: Path, *, maps: bool = False, drafts: bool = False, part: str = PARTS
    ) -> None:
        """Read the headers. Raises CheckpointError for a damaged or truncated file.

        drafts: whether layers that make draft tokens are read, too. part: subdirectory of the links
        to the file's parts.
        """
        super().__init__(directory, maps=maps)
        self._places: dict[str, _Place] = {}
        try:
            file = GgufFile(min((directory / part).iterdir()).readlink())  # named in errors
        except GgufError as error:
            raise CheckpointError(str(error)) from None
        self._maps: dict[Path, _MappedFile] = {
            part: _MappedFile.of(part) for part, size in file.sizes.items() if size
        }
        unread: set[str] = set()
        if not drafts:  # layers that make draft tokens are not part of the model
            unread = {name.split(".")[1] for name in file.tensors if ".nextn." in name}
        for tensor in file.tensors.values():
            layer = tensor.name.partition("blk.")[2].partition(".")[0]
            if layer not in unread:
                self._add(tensor, file.sizes[tensor.file])
        self._take_factors(file)

        kinds = {place.kind for place in self._places.values()} - _PLAIN.keys()
        self.is_quantized = self.has_blocks = bool(kinds)
        self.types_without_codes = sorted(
            kind.name for kind in kinds if not has_codes(kind, mapped=maps)
        )
        self.has_mxfp4_experts = any(
            _EXPERTS in name and place.kind is _KIND.MXFP4 for name, place in self._places.items()
        )

    def __exit__(self, *failure: object) -> None:
        """Release the files' pages, of which only the embedding's are read again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for mapped in self._maps.values():
                mapped.memory.madvise(mmap.MADV_DONTNEED)
        self._maps.clear()

    def tensor(self, stored: StoredTensor) -> Tensor:
        """Return a view of the mapped file where it has plain numbers, else a decoded copy."""
        place, data = self._stored(stored)
        if (dtype := _PLAIN.get(place.kind)) is not None:
            return torch.from_numpy(data).view(dtype).view(stored.shape)
        return _decoded(data.reshape(-1, place.row_bytes), place).view(stored.shape)

    def quantized(self, stored: StoredTensor) -> QuantizedWeight | None:
        place, data = self._stored(stored)
        if len(place.shape) != _MATRIX:
            return None
        rows = data.reshape(-1, place.row_bytes)
        weight = read_groups(rows, place.kind, mapped=self.maps)
        return None if weight is None else weight.times(place.factor)

    def mxfp4(self, stored: StoredTensor, device: torch.device) -> Mxfp4Weight | None:
        place, data = self._stored(stored)
        if place.kind is not _KIND.MXFP4:
            return None
        rows = torch.from_numpy(data.reshape(-1, place.row_bytes))
        return Mxfp4Weight.from_gguf(rows.to(device))

    def rows(self, stored: StoredTensor) -> StoredRows | None:
        place, data = self._stored(stored)
        if place.kind in _PLAIN:
            return None
        return _GgufRows(data.reshape(-1, place.row_bytes), place)

    def _stored(self, stored: StoredTensor) -> tuple[_Place, npt.NDArray[np.uint8]]:
        """Return the place of a tensor, and its bytes."""
        place = self._places[stored.name]
        return place, self._maps[place.file].data[place.start : place.start + place.num_bytes]

    def _fits(self, stored: StoredTensor, found: FoundTensor) -> bool:
        """Compare shapes, but ignore dimensions of 1, some of which the converter drops."""
        ours, theirs = (
            [size for size in shape if size != 1] for shape in (stored.shape, found.shape)
        )
        return ours == theirs

    def _num_bytes(self, stored: StoredTensor, found: FoundTensor) -> int:
        return self._places[stored.name].num_bytes

    def _add(self, tensor: GgufTensor, file_size: int) -> None:
        names = ", ".join(kind.name for kind in _READ)
        if tensor.kind not in _READ:
            kind = _OTHER_NAMES.get(tensor.kind, f"the unknown type {tensor.kind}")
            raise CheckpointError(
                f"{tensor.file}: the tensor {tensor.name} is stored as {kind}, which is not "
                f"supported. Supported: {names}."
            )
        place = _Place(tensor.file, tensor.start, _KIND(tensor.kind), tensor.shape)
        block, _ = BLOCK_SIZES[place.kind]
        if tensor.shape[-1] % block:
            raise CheckpointError(
                f"{tensor.file}: the rows of {tensor.name} have {tensor.shape[-1]} numbers, which "
                f"is not a multiple of {block}."
            )
        if place.start + place.num_bytes > file_size:
            raise CheckpointError(f"{tensor.file} is truncated: {tensor.name} ends beyond it.")
        if not tensor.name.startswith(_STREAMS) and (
            _EXPERTS not in tensor.name or len(tensor.shape) == 1
        ):
            suffix = ".weight" if tensor.name.endswith(_BARE) else ""
            self._put(f"{tensor.name}{suffix}", place)
            return
        stem, _, suffix = tensor.name.rpartition(".")
        stems = [stem.replace(_BOTH, each) for each in _PRODUCTS] if _BOTH in stem else [stem]
        outputs = tensor.shape[1] // len(stems)
        one = replace(place, shape=(outputs, *tensor.shape[2:]))
        for number in range(tensor.shape[0] * len(stems)):
            expert, part = divmod(number, len(stems))
            start = place.start + number * one.num_bytes
            self._put(f"{stems[part]}.{expert}.{suffix}", replace(one, start=start))

    def _take_factors(self, file: GgufFile) -> None:
        """Give the weights in NVFP4 their factors: one for a tensor, or for each of its experts.

        Products don't round their inputs to 4 bits, so they need no input_scale.
        """
        found: dict[str, list[float]] = {}
        for name, place in list(self._places.items()):
            if place.kind is not _KIND.NVFP4:
                continue
            stem = name.removesuffix(".weight")
            tensor, _, expert = stem.rpartition(".") if _EXPERTS in name else (stem, "", "0")
            if tensor not in found:
                found[tensor] = _factors(file, f"{tensor}.scale")
                for beside in (f"{tensor}.scale", f"{tensor}.input_scale"):
                    self._found.pop(beside, None)
            if factors := found[tensor]:
                if int(expert) >= len(factors):
                    raise CheckpointError(f"{file.path}: {tensor}.scale has too few numbers.")
                self._places[name] = replace(place, factor=factors[int(expert)])

    def _put(self, name: str, place: _Place) -> None:
        self._places[name] = place
        self._found[name] = FoundTensor(place.file, place.shape, place.kind.name)


def _factors(file: GgufFile, name: str) -> list[float]:
    """Return a tensor of factors; an empty list if there is none."""
    try:
        return file.floats(name) or []
    except GgufError as error:
        raise CheckpointError(str(error)) from None
