"""Ways in which Hugging Face checkpoints store quantized weights.

Sources: the loaders of transformers for GPTQ and AWQ, the packages compressed-tensors and
bitsandbytes. The tensors that a file has in place of a weight tell whether it is quantized.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from services.engine.model.checkpoint.config import CheckpointError, Config
from services.engine.model.checkpoint.quantized import GroupNumbers, QuantizedWeight, Weight
from services.engine.model.checkpoint.tensors import FoundTensor, StoredTensor

__all__ = ["SCHEMES", "Scheme"]

Found: TypeAlias = Mapping[str, FoundTensor]
"""Tensors found in the files, by name"""
_WORD = 32
"""Number of bits of the words into which codes are packed"""
_WEIGHT = ".weight"
_STATE = ".quant_state."
_BITS = (4, 8)
_FORMATS = ("int-quantized", "naive-quantized", "pack-quantized")
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Outputs in the order of their codes in a word"""


class Scheme(ABC):
    """Form in which the quantized weights of a checkpoint are stored."""

    unused: Sequence[str] = ()
    """Patterns of tensors that the engine has no use for"""
    rounds_rows = False
    """True if the model is made for products with rows in int8, with a scale for each row"""

    @abstractmethod
    def parts(self, weight: StoredTensor, found: Found) -> Sequence[StoredTensor]:
        """Return the tensors that make up a weight [outputs, inputs]; none if it is not quantized.

        Raises CheckpointError for tensors that don't fit the weight.
        """

    @abstractmethod
    def join(self, weight: StoredTensor, parts: Mapping[str, Tensor]) -> Weight:
        """Return a weight, made of its `parts` by name."""


class _Gptq(Scheme):
    """GPTQ: columns of codes in words, and groups of inputs, whose order `desc_act` may change."""

    unused = ("*.bias",)  # AutoGPTQ writes biases of zeros for layers that have none

    def __init__(self, bits: int, offset: int) -> None:
        """offset: number to add to stored zero points: 1 in older checkpoints, else 0."""
        self._bits = bits
        self._offset = offset

    @staticmethod
    def from_config(config: Config) -> "Scheme":
        if config.section("dynamic").values:
            raise CheckpointError(
                f"{config.file}: quantization_config.dynamic (rules by layer) is not supported."
            )
        name = config.text("checkpoint_format", "gptq")
        if name not in ("gptq", "gptq_v2"):
            raise CheckpointError(
                f"{config.file}: checkpoint_format {name} is not supported. Supported: gptq, "
                "gptq_v2."
            )
        return _Gptq(_bits(config, "bits"), 1 if name == "gptq" else 0)

    def parts(self, weight: StoredTensor, found: Found) -> Sequence[StoredTensor]:
        stem = weight.name.removesuffix(_WEIGHT)
        if f"{stem}.qweight" not in found:
            return ()
        outputs, inputs = weight.shape
        count = _groups(weight, found, f"{stem}.scales", dim=0)
        packed = _WORD // self._bits
        parts = [
            StoredTensor(f"{stem}.qweight", (inputs // packed, outputs), dtype="I32"),
            StoredTensor(f"{stem}.qzeros", (count, outputs // packed), dtype="I32"),
            StoredTensor(f"{stem}.scales", (count, outputs)),
        ]
        if f"{stem}.g_idx" in found:
            parts.append(StoredTensor(f"{stem}.g_idx", (inputs,), dtype="I32"))
        return parts

    def join(self, weight: StoredTensor, parts: Mapping[str, Tensor]) -> Weight:
        stem = weight.name.removesuffix(_WEIGHT)
        codes = _unpacked(parts[f"{stem}.qweight"], self._bits, dim=0).T
        scales = parts[f"{stem}.scales"].T.float()
        zeros = _unpacked(parts[f"{stem}.qzeros"], self._bits, dim=1).T.float() + self._offset
        return _ordered(weight, codes, self._bits, scales, zeros, parts.get(f"{stem}.g_idx"))


class _Awq(Scheme):
    """AWQ: rows of 4-bit codes in words of eight outputs, in the order `_AWQ_ORDER`."""

    @staticmethod
    def from_config(config: Config) -> "Scheme":
        version = config.text("version", "gemm").lower()
        if version != "gemm":
            raise CheckpointError(
                f"{config.file}: version {version} of AWQ is not supported. Supported: gemm."
            )
        if (bits := config.integer("bits", 4)) != 4:
            raise CheckpointError(f"{config.file}: AWQ with {bits} bits is not supported.")
        return _Awq()

    def parts(self, weight: StoredTensor, found: Found) -> Sequence[StoredTensor]:
        stem = weight.name.removesuffix(_WEIGHT)
        if f"{stem}.qweight" not in found:
            return ()
        outputs, inputs = weight.shape
        count = _groups(weight, found, f"{stem}.scales", dim=0)
        words = outputs // len(_AWQ_ORDER)
        return (
            StoredTensor(f"{stem}.qweight", (inputs, words), dtype="I32"),
            StoredTensor(f"{stem}.qzeros", (count, words), dtype="I32"),
            StoredTensor(f"{stem}.scales", (count, outputs)),
        )

    def join(self, weight: StoredTensor, parts: Mapping[str, Tensor]) -> Weight:
        stem = weight.name.removesuffix(_WEIGHT)
        codes, zeros = (_in_awq_order(parts[f"{stem}.{each}"]) for each in ("qweight", "qzeros"))
        scales = parts[f"{stem}.scales"].T.float()
        offsets = GroupNumbers(-zeros.float() * scales)
        return QuantizedWeight(codes, 4, GroupNumbers(scales), offsets)


class _CompressedTensors(Scheme):
    """compressed-tensors: 8-bit numbers, or 4-bit and 8-bit codes in words along the inputs."""

    unused = ("*.input_scale", "*.input_zero_point", "*.k_scale", "*.v_scale", "*.output_scale")

    @staticmethod
    def from_config(config: Config) -> "Scheme":
        name = config.text("format", "unnamed")
        if name not in _FORMATS:
            raise CheckpointError(
                f"{config.file}: the format {name} of compressed-tensors is not supported. "
                f"Supported: float-quantized, {', '.join(_FORMATS)}."
            )
        return _CompressedTensors(_rounds_rows(config))

    def __init__(self, rounds_rows: bool) -> None:
        self.rounds_rows = rounds_rows

    def parts(self, weight: StoredTensor, found: Found) -> Sequence[StoredTensor]:
        packed = found.get(f"{weight.name}_packed")
        stored = found.get(weight.name)
        if packed is None and (stored is None or stored.dtype != "I8"):
            return ()
        outputs, inputs = weight.shape
        count = _groups(weight, found, f"{weight.name}_scale", dim=1)
        whole = found[f"{weight.name}_scale"].shape == (1,)  # a scale for all of the tensor
        scale = StoredTensor(f"{weight.name}_scale", (1,) if whole else (outputs, count))
        zero, order = f"{weight.name}_zero_point", f"{weight.name}_g_idx"
        orders = [StoredTensor(order, (inputs,), dtype="I32")] if order in found else []
        if packed is None:
            parts = [StoredTensor(weight.name, weight.shape, dtype="I8"), scale]
            zeros = [StoredTensor(zero, scale.shape, dtype="I8")] if zero in found else []
            return [*parts, *zeros, *orders]
        bits = _packed_bits(weight, packed)
        words, shape = f"{weight.name}_packed", f"{weight.name}_shape"
        parts = [
            StoredTensor(words, (outputs, inputs * bits // _WORD), dtype="I32"),
            scale,
            *([StoredTensor(shape, (2,), dtype="I64")] if shape in found else []),
        ]
        if zero in found:
            rows = -(-outputs * bits // _WORD)
            parts.append(StoredTensor(zero, (rows, count), dtype="I32"))
        return [*parts, *orders]

    def join(self, weight: StoredTensor, parts: Mapping[str, Tensor]) -> Weight:
        outputs, inputs = weight.shape
        scales, zero = parts[f"{weight.name}_scale"].float(), parts.get(f"{weight.name}_zero_point")
        if (packed := parts.get(f"{weight.name}_packed")) is None:
            codes, bits = parts[weight.name].view(torch.uint8) ^ 128, 8
            zeros = None if zero is None else zero.view(torch.uint8) ^ 128
        else:
            bits = packed.shape[1] * _WORD // inputs
            codes = _unpacked(packed, bits, dim=1)
            zeros = None if zero is None else _unpacked(zero, bits, dim=0)[:outputs]
        points = torch.full_like(scales, 2 ** (bits - 1)) if zeros is None else zeros.float()
        if scales.ndim == 1:
            scales, points = scales.expand(outputs, 1), points.expand(outputs, 1)
        return _ordered(weight, codes, bits, scales, points, parts.get(f"{weight.name}_g_idx"))


def _rounds_rows(config: Config) -> bool:
    """Return whether all groups of layers round their inputs to int8 by token at run time."""
    groups = config.section("config_groups").values
    wanted = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    inputs = [
        group.get("input_activations") if isinstance(group, dict) else None
        for group in groups.values()
    ]
    return bool(inputs) and all(
        isinstance(each, dict) and {key: each.get(key) for key in wanted} == wanted
        for each in inputs
    )


class _BitsAndBytes(Scheme):
    """bitsandbytes: 4-bit codes of a table with block scales, or 8-bit numbers with row scales."""

    def parts(self, weight: StoredTensor, found: Found) -> Sequence[StoredTensor]:
        stem, (outputs, inputs) = weight.name.removesuffix(_WEIGHT), weight.shape
        if f"{stem}.SCB" in found:
            parts = [
                StoredTensor(weight.name, weight.shape, dtype="I8"),
                StoredTensor(f"{stem}.SCB", (outputs,)),
            ]
            mark = f"{stem}.weight_format"
            return [*parts, *([StoredTensor(mark, (), dtype="U8")] if mark in found else [])]
        states = [name for name in found if name.startswith(f"{weight.name}{_STATE}")]
        if not states:
            return ()
        half = StoredTensor(weight.name, (outputs * inputs // 2, 1), dtype="U8")
        parts = [half, _as_found(found, states[0])]
        suffixes = ["absmax", "quant_map"]
        if f"{weight.name}.nested_absmax" in found:
            suffixes += ["nested_absmax", "nested_quant_map"]
        return [*parts, *(_as_found(found, f"{weight.name}.{suffix}") for suffix in suffixes)]

    def join(self, weight: StoredTensor, parts: Mapping[str, Tensor]) -> Weight:
        stored, stem = parts[weight.name], weight.name.removesuffix(_WEIGHT)
        if (largest := parts.get(f"{stem}.SCB")) is not None:
            scales = largest.float()[:, None] / 127
            return QuantizedWeight(stored.view(torch.uint8) ^ 128, 8, GroupNumbers(scales))
        (state,) = (_state(name, part) for name, part in parts.items() if _STATE in name)
        absmax, nested = parts[f"{weight.name}.absmax"], parts.get(f"{weight.name}.nested_absmax")
        if nested is not None:
            table = parts[f"{weight.name}.nested_quant_map"]
            scale = nested.repeat_interleave(state.positive("nested_blocksize"))[: len(absmax)]
            absmax = table[absmax.long()] * scale + state.number("nested_offset")
        codes = torch.stack((stored[:, 0] >> 4, stored[:, 0] & 15), dim=1).flatten()
        values, block = parts[f"{weight.name}.quant_map"].float(), state.positive("blocksize")
        if len(codes) != len(absmax) * block:
            raise CheckpointError(f"{weight.name}: its blocks and their scales differ in number.")
        outputs, inputs = weight.shape
        if inputs % block:  # some blocks have weights of two outputs
            return (values[codes.long()].view(-1, block) * absmax[:, None]).view(weight.shape)
        numbers = GroupNumbers(absmax.view(outputs, -1).float())
        return QuantizedWeight(codes.view(weight.shape), 4, numbers, values=tuple(values.tolist()))


def _bits(config: Config, key: str) -> int:
    bits = config.integer(key)
    if bits not in _BITS:
        raise CheckpointError(f"{config.file}: {bits} bits are not supported. Supported: 4, 8.")
    return bits


def _groups(weight: StoredTensor, found: Found, name: str, *, dim: int) -> int:
    """Return the number of groups of a weight, from the shape of its scales."""
    scales = found.get(name)
    if scales is None:
        raise CheckpointError(f"No file holds {name}, which the quantized weight needs.")
    count = scales.shape[dim] if len(scales.shape) > dim else 1
    if count < 1 or weight.shape[1] % count:
        raise CheckpointError(
            f"{scales.file}: {name} has {count} groups, which don't divide {weight.shape[1]} "
            "inputs."
        )
    return count


def _packed_bits(weight: StoredTensor, packed: FoundTensor) -> int:
    bits = packed.shape[-1] * _WORD / weight.shape[1] if packed.shape else 0
    if bits not in _BITS:
        raise CheckpointError(
            f"{packed.file}: {weight.name}_packed has {bits:g} bits per weight. Supported: 4, 8."
        )
    return int(bits)


def _unpacked(words: Tensor, bits: int, *, dim: int) -> Tensor:
    """Return the codes of int32 words, lowest bits first, as bytes along `dim`."""
    if bits == 8:
        bytes_ = words.movedim(dim, -1).contiguous().view(torch.uint8)
        return bytes_.movedim(-1, dim)
    shifts = torch.arange(0, _WORD, bits, dtype=torch.int32)
    moved: Tensor = words.movedim(dim, -1)[..., None] >> shifts & 2**bits - 1
    return moved.to(torch.uint8).flatten(-2).movedim(-1, dim)


def _in_awq_order(words: Tensor) -> Tensor:
    """Return the codes [outputs, rows] of words [rows, outputs / 8]."""
    codes = _unpacked(words, 4, dim=1)
    return codes.view(len(words), -1, len(_AWQ_ORDER))[..., _AWQ_ORDER].flatten(1).T.contiguous()


def _ordered(
    weight: StoredTensor,
    codes: Tensor,
    bits: int,
    scales: Tensor,
    zeros: Tensor,
    groups: Tensor | None,
) -> QuantizedWeight:
    """Return a weight whose groups are neighbours. groups: the group of each input."""
    is_middle = bool((zeros == 2 ** (bits - 1)).all())
    offsets, order = None if is_middle else GroupNumbers(-zeros * scales), None
    if groups is not None:
        count, size = scales.shape[1], codes.shape[1] // scales.shape[1]
        columns = torch.argsort(groups, stable=True)
        expected = torch.arange(count).repeat_interleave(size)
        if not torch.equal(groups[columns], expected):
            raise CheckpointError(f"{weight.name}: g_idx does not name {count} equal groups.")
        if not torch.equal(columns, torch.arange(len(columns))):
            codes, order = codes[:, columns], torch.argsort(columns)
    numbers = GroupNumbers(scales.contiguous())
    return QuantizedWeight(codes.contiguous(), bits, numbers, offsets, order)


def _as_found(found: Found, name: str) -> StoredTensor:
    """Return a tensor of bytes or floating-point numbers, in the shape that it has in its file."""
    stored = found.get(name)
    is_raw = stored is not None and stored.dtype == "U8"
    shape = () if stored is None else stored.shape
    return StoredTensor(name, shape, dtype="U8" if is_raw else None)


def _state(name: str, content: Tensor) -> Config:
    try:
        values = json.loads(bytes(content.tolist()))
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise CheckpointError(f"{name} is not a JSON object.")
    return Config(name, values)


SCHEMES: Mapping[str, Callable[[Config], Scheme]] = {
    "gptq": _Gptq.from_config,
    "awq": _Awq.from_config,
    "compressed-tensors": _CompressedTensors.from_config,
    "bitsandbytes": lambda _: _BitsAndBytes(),
}
"""Makers of a scheme from a quantization_config, by quant_method. They raise CheckpointError"""
