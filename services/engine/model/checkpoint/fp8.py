"""FP8 weights (E4M3) with scales, and the keys of config.json that describe them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from services.engine.model.checkpoint.config import CheckpointError, Config
from services.engine.model.checkpoint.mxfp4 import GROUP_SIZE, Mxfp4Weight
from services.engine.model.checkpoint.quantized import QuantizedWeight, in_groups
from services.engine.model.checkpoint.tensors import Checkpoint, FoundTensor, StoredTensor

__all__ = ["Fp8Format", "Fp8Tensors"]

_FLOATS = "float-quantized"
_STORED = "F8_E4M3"
_PACKED = "I8"
"""Type of tensors whose bytes hold two numbers of 4 bits each"""
_SCALES = ("F32", "BF16", "F16", "F8_E8M0")
_EXPONENTS = ("F8_E8M0", "U8")
"""Types of scales that are powers of two, stored as their exponents plus 127"""
_WEIGHT, _SCALE = ".weight", ".scale"
"""Suffixes of a weight's name and, in some files, of its scale's name"""
_GROUPS = (64, 128)
"""Widths of blocks that the GPU's kernels multiply as they are"""
_UNUSED = ("*.input_scale", "*.k_scale", "*.v_scale")
"""Scales of activations and of a quantized KV cache; the engine keeps both in its own dtype"""


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """Form in which a checkpoint stores the scales of its FP8 weights.

    A stored number times its scale is the weight. Weights of modules in the lists `ignore` and
    `modules_to_not_convert` have another dtype in the file, by which they are recognized.
    """

    suffix: str
    """Suffix that turns a weight's name into that of its scale"""
    block: tuple[int, int] | None
    """Numbers of outputs and inputs that share a scale; None: one for each tensor or each output"""

    @property
    def group(self) -> int | None:
        """Number of inputs that share a scale on a GPU; None: all of an output."""
        return self.block[1] if self.block is not None and self.block[1] in _GROUPS else None

    @staticmethod
    def is_fp8(config: Config) -> bool:
        """Return whether a quantization_config says that weights are FP8."""
        method = config.text("quant_method", "")
        return method == "fp8" or (
            method == "compressed-tensors" and config.text("format", "") == _FLOATS
        )

    @staticmethod
    def from_config(config: Config) -> "Fp8Format":
        """Read a quantization_config for which `is_fp8` is true. Raises CheckpointError."""
        if config.text("quant_method") == "fp8":
            if not config.has("weight_block_size"):
                return Fp8Format("_scale", None)
            block = config.ids("weight_block_size")
            if len(block) != 2 or min(block) < 1:
                raise CheckpointError(
                    f"{config.file}: weight_block_size must be two positive integers, not "
                    f"{list(block)}."
                )
            return Fp8Format("_scale_inv", (block[0], block[1]))
        return Fp8Format("_scale", None)

    def scale_shapes(self, weight: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the shapes that the scale of a weight [outputs, inputs] may have."""
        if self.block is None:
            return (weight[0], 1), (1,), ()
        return (tuple(-(-size // part) for size, part in zip(weight, self.block, strict=True)),)


class Fp8Tensors(Checkpoint):
    """The safetensors files of a checkpoint whose weights, or some of them, are FP8.

    Other weights may be MXFP4, with two numbers in a byte, such as the experts of DeepSeek V4.
    """

    is_quantized = True

    def __init__(self, directory: Path, stored_as: Fp8Format) -> None:
        super().__init__(directory)
        self._format = stored_as

    def require(
        self,
        wanted: Iterable[StoredTensor],
        ignored: Sequence[str],
        among: Sequence[str] = ("*",),
    ) -> int:
        """Require the scales of FP8 weights, too. Scales of activations are optional."""
        both = (part for stored in wanted for part in self._parts(stored))
        return super().require(both, (*ignored, *_UNUSED), among)

    def tensor(self, stored: StoredTensor) -> Tensor:
        """Return a view of the mapped file, or for an FP8 weight its numbers in float32."""
        if (packed := self._packed(stored)) is not None:
            return packed.decode()
        tensor, *scales = map(super().tensor, self._parts(stored))
        if not scales:
            return tensor
        scale = scales[0].float()
        if self._format.block is not None:
            for dim, (part, size) in enumerate(zip(self._format.block, stored.shape, strict=True)):
                scale = scale.repeat_interleave(part, dim).narrow(dim, 0, size)
        return tensor.float().mul_(scale)

    def quantized(self, stored: StoredTensor) -> QuantizedWeight | None:
        packed = self._packed(stored)
        return None if packed is None else in_groups(packed)

    def mxfp4(self, stored: StoredTensor, device: torch.device) -> Mxfp4Weight | None:
        packed = self._packed(stored)
        if packed is None:
            return None
        return Mxfp4Weight(packed.blocks.to(device), packed.scales.to(device))

    def leaves_unquantized(self, stored: StoredTensor) -> bool:
        return not self._is_scaled(stored)

    def num_bytes(self, stored: StoredTensor) -> int:
        return sum(map(super().num_bytes, self._parts(stored)))

    def _num_bytes(self, stored: StoredTensor, found: FoundTensor) -> int:
        if self._is_scaled(stored):
            return prod(found.shape)
        return super()._num_bytes(stored, found)

    def _parts(self, stored: StoredTensor) -> Iterator[StoredTensor]:
        """Yield the tensor and, if it is FP8 or packed, its scale."""
        if self._is_packed(stored):
            outputs, inputs = stored.shape
            yield replace(stored, shape=(outputs, inputs // 2), dtype=_PACKED)
            groups = (outputs, inputs // GROUP_SIZE)
            yield StoredTensor(self._scale_name(stored), groups, dtype=_EXPONENTS)
            return
        yield stored
        if self._is_scaled(stored):
            name = self._scale_name(stored)
            shapes = self._format.scale_shapes(stored.shape)
            found = self._found.get(name)
            is_known = found is not None and found.shape in shapes
            shape = found.shape if found and is_known else shapes[0]
            yield StoredTensor(name, shape, dtype=_SCALES)

    def _scale_name(self, stored: StoredTensor) -> str:
        short = f"{stored.name.removesuffix(_WEIGHT)}{_SCALE}"
        return short if short in self._found else f"{stored.name}{self._format.suffix}"

    def _packed(self, stored: StoredTensor) -> Mxfp4Weight | None:
        """Return a weight of 4 bits; None if it is stored otherwise."""
        if not self._is_packed(stored):
            return None
        codes, scales = (Checkpoint.tensor(self, part) for part in self._parts(stored))
        outputs, groups = scales.shape
        blocks = codes.view(torch.uint8).view(outputs, groups, GROUP_SIZE // 2)
        return Mxfp4Weight(blocks, scales.view(torch.uint8))

    def _is_packed(self, stored: StoredTensor) -> bool:
        found = self._found.get(stored.name)
        if found is None or found.dtype != _PACKED or len(stored.shape) != len(found.shape):
            return False
        outputs, inputs = stored.shape
        return inputs % GROUP_SIZE == 0 and found.shape == (outputs, inputs // 2)

    def _is_scaled(self, stored: StoredTensor) -> bool:
        found = self._found.get(stored.name)
        return len(stored.shape) == 2 and found is not None and found.dtype == _STORED
