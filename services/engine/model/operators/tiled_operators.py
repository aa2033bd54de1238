"""Operators on the tiled CPU kernels, with weights in bfloat16, int8 or groups of codes."""

from collections.abc import Callable, Sequence
from ctypes import pointer
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from services.engine.kernels.library import (
    DTYPES,
    Epilogue,
    Format,
    GroupedCall,
    InstructionSet,
    KeepCall,
    Kernel,
    LinearCall,
    Native,
    NormCall,
)
from services.engine.kernels.memory import Arena, allocate
from services.engine.kernels.tiles import TILE, from_tiles, rows_at_once, to_tiles
from services.engine.model.architecture.activation import SWIGLU, Activation
from services.engine.model.checkpoint.quantized import QuantizedWeight, rounded
from services.engine.model.operators.interface import Delta, Gate, Operators, Projection
from services.engine.model.operators.native_operators import NativeOperators
from services.engine.model.operators.recording import Recording
from services.engine.model.operators.stored_groups import StoredGroups, alike_runs, has_kernel
from services.engine.model.operators.torch_operators import TorchGate, join, join_biases

__all__ = ["ByteOperators", "Int4Operators", "Int8Operators", "Packed", "TiledOperators"]

_TILE_OUTPUTS = 16
"""Outputs in a tile of weights"""
_PANEL_OUTPUTS = 2 * _TILE_OUTPUTS
"""Outputs that are multiplied at once"""
_BYTE_INPUTS = 64
"""Inputs of a tile of int8"""


@dataclass(frozen=True, slots=True)
class Packed:
    """Weights packed into tiles."""

    format: Format
    tiles: Tensor
    scales: Tensor | None = None
    """Factors on int8 weights, float32, one per packed column; None: other formats"""
    groups: GroupedCall | None = None
    """Description of weights in groups; None: other formats"""


class TiledOperators(NativeOperators):
    """bfloat16 on AMX or AVX-512 BF16, with weights packed into tiles.

    Inputs of products, which are outputs of norms and gates, are in tiles too. Without AMX, weights
    are compressed without loss to 12.5 bits and decoded as they are read; so are the codes of a
    quantized checkpoint.
    """

    def __init__(self, native: Native, *, keeps_groups: bool = True) -> None:
        """keeps_groups: whether a quantized checkpoint's codes stay in memory."""
        super().__init__(native, torch.bfloat16)
        self.keeps_groups = keeps_groups
        self.native = native
        self.arena = Arena()
        self._compresses = native.instruction_set() != InstructionSet.AMX
        self.rows_at_once = rows_at_once()
        # torch multiplies nothing here, so its threads stay idle and don't compete with the pool.
        native.use_pool(torch.get_num_threads())

    def empty(self, rows: int, width: int) -> Tensor:
        return super().empty(_round_up(rows, TILE), width)[:rows]

    def temporary(self, rows: int, width: int) -> Tensor:
        return super().temporary(_round_up(rows, TILE), width)[:rows]

    def arrange(self, rows: Tensor, out: Tensor) -> None:
        _whole_tiles(out).copy_(to_tiles(rows))

    def gather(self, rows: Tensor, index: Tensor) -> Tensor:
        gathered = self.temporary(len(index), rows.shape[1])
        place = torch.arange(len(index))
        # Blocks are [rows / 32, width / 32, 32, 32]: a row is one line of each block in its strip.
        sources, targets = (_blocks(_whole_tiles(tensor)) for tensor in (rows, gathered))
        targets[place // TILE, :, place % TILE] = sources[index // TILE, :, index % TILE]
        return gathered

    def plain(self, rows: Tensor) -> Tensor:
        return from_tiles(_whole_tiles(rows))[: len(rows)]

    def rms_norm(self, rows: Tensor, weight: Tensor, epsilon: float, out: Tensor) -> None:
        call = NormCall(
            rows.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows.shape[0],
            rows.shape[1],
            epsilon,
        )
        self.native.run(Kernel.NORM, call)

    def keep(self, rows: Tensor, kept: Tensor | None) -> None:
        call = KeepCall(
            rows.data_ptr(),
            None if kept is None else kept.data_ptr(),
            0 if kept is None else len(kept),
            rows.stride(0) * rows.element_size(),
            rows.shape[1:].numel() * rows.element_size(),
        )
        self.native.run(Kernel.KEEP, call)

    def recording(self) -> Recording:
        return Recording(self.native)

    def projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        return self.packed_projection(self.pack((weight,)), weight.shape, bias)

    def packed_projection(
        self, packed: Packed, shape: tuple[int, ...], bias: Tensor | None
    ) -> Projection:
        """Make a projection of a packed weight whose `shape` is [outputs, inputs]."""
        outputs, inputs = shape
        padded = None if bias is None else _padded(bias)
        return _TiledProjection(_PackedWeight(self.native, packed, padded, inputs, outputs))

    def grouped_projection(
        self, weights: Sequence[QuantizedWeight], bias: Tensor | None
    ) -> Projection:
        if not all(map(has_kernel, weights)):
            return super().grouped_projection(weights, bias)
        total = sum(weight.shape[0] for weight in weights)
        parts, first = [], 0
        for run in alike_runs(weights, _PANEL_OUTPUTS):
            outputs = sum(weight.codes.shape[0] for weight in run)
            padded = None if bias is None else _padded(bias[first : first + outputs])
            packed = self._pack_groups(run, outputs)
            inputs = weights[0].shape[1]
            weight = _PackedWeight(self.native, packed, padded, inputs, outputs, total)
            parts.append(_Part(first, weight))
            first += outputs
        return _TiledProjection(parts[0].weight) if len(parts) == 1 else _PartedProjection(parts)

    def grouped_gate(
        self,
        gate: QuantizedWeight,
        up: QuantizedWeight | None,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        activation: Activation = SWIGLU,
    ) -> Gate:
        both = [gate] if up is None else [gate, up]
        if not all(map(has_kernel, both)):
            return super().grouped_gate(gate, up, gate_bias, up_bias, activation)
        stored = [StoredGroups.of(weight) for weight in both]
        alike = len({weight.format for weight in stored}) == 1
        if up is None or activation != SWIGLU or not alike:
            product = self.grouped_projection(both, join_biases(gate_bias, up_bias))
            return TorchGate(product, len(both), activation, self)
        outputs, inputs = gate.shape
        columns = 2 * _round_up(outputs, _TILE_OUTPUTS)
        packed = self._pack_groups(stored, columns, interleaved=True)
        bias = _interleaved(gate_bias, up_bias, outputs)
        weight = _PackedWeight(self.native, packed, bias, inputs, 2 * outputs)
        return _TiledGate(weight, outputs, self)

    def gate(
        self,
        gate: Tensor,
        up: Tensor | None,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        activation: Activation = SWIGLU,
    ) -> Gate:
        if up is None or activation != SWIGLU:
            product = self.projection(*join(gate, up, gate_bias, up_bias))
            return TorchGate(product, 1 if up is None else 2, activation, self)
        outputs, inputs = gate.shape
        packed = self.pack((gate, up))
        bias = _interleaved(gate_bias, up_bias, outputs)
        weight = _PackedWeight(self.native, packed, bias, inputs, 2 * outputs)
        return _TiledGate(weight, outputs, self)

    def pack(self, weights: tuple[Tensor, ...]) -> Packed:
        """Pack weights of one shape with their tiles interleaved."""
        elements = self.packed_elements(weights)
        if not self._compresses:
            packed = self.arena.take(elements, torch.bfloat16)
            _pack(self.native.pack, weights, packed)
            return Packed(Format.PACKED, packed)
        packed = allocate((elements,), torch.bfloat16)
        _pack(self.native.pack, weights, packed)
        compressed = self._compressed(packed)
        if compressed is None:
            return Packed(Format.PACKED, self.arena.copy(packed))
        return Packed(Format.CODED, self.arena.copy(compressed))

    def _pack_groups(
        self, weights: Sequence[StoredGroups], outputs: int, *, interleaved: bool = False
    ) -> Packed:
        """Pack weights that are stored alike, one after the other or with their tiles interleaved.

        outputs: of all weights; zeros follow to whole panels.
        """
        groups = weights[0].call(_round_up(outputs, _PANEL_OUTPUTS))
        packed = self.arena.take(self.native.grouped_bytes(groups), torch.uint8)
        if interleaved or outputs % _PANEL_OUTPUTS:
            packed.zero_()
        place = packed.data_ptr()
        for first, weight in enumerate(weights):
            if interleaved:
                weight.pack(self.native, place, first, len(weights))
            else:
                weight.pack(self.native, place)
                place += self.native.grouped_bytes(weight.call())
        return Packed(Format.GROUPS, packed, groups=groups)

    def _compressed(self, packed: Tensor) -> Tensor | None:
        """Return compressed weights, or None if decoding would be slower than reading `packed`."""
        num_bytes = _compressed_bytes(packed.numel())
        while True:
            coded = allocate((num_bytes,), torch.uint8)
            needed = self.native.code(
                packed.data_ptr(), packed.numel(), coded.data_ptr(), num_bytes
            )
            if needed <= num_bytes:
                return coded if needed > 0 else None
            num_bytes = needed

    def packed_elements(self, weights: tuple[Tensor, ...]) -> int:
        """Return the elements that `pack` fills, padding included."""
        outputs, inputs = weights[0].shape
        columns = len(weights) * _round_up(outputs, _TILE_OUTPUTS)
        return self.native.packed_elements(columns, inputs)


class Int8Operators(TiledOperators):
    """TiledOperators with weights rounded to int8, with a scale per output: half the bytes to read.

    The kernels widen weights to bfloat16, which holds every int8, so activations and sums are as
    exact as with bfloat16 weights.
    """

    def exact_projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        return self.packed_projection(super().pack((weight,)), weight.shape, bias)

    def pack(self, weights: tuple[Tensor, ...]) -> Packed:
        elements = self.packed_elements(weights)
        tiles = self.arena.take(elements, torch.int8)
        scales = torch.zeros(elements // weights[0].shape[1], dtype=torch.float32)
        _pack(self.native.pack_int8, weights, tiles, scales)
        return Packed(Format.INT8, tiles, scales)


class ByteOperators(TiledOperators):
    """TiledOperators on AMX that round rows to int8, with a scale each, for int8 weights.

    These are a quantized checkpoint's with one scale for each output, and with `rounds` all others:
    whatever has a multiple of 64 inputs.
    """

    def __init__(self, native: Native, *, rounds: bool) -> None:
        super().__init__(native)
        self._rounds = rounds

    def exact_projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        return self.packed_projection(super().pack((weight,)), weight.shape, bias)

    def pack(self, weights: tuple[Tensor, ...]) -> Packed:
        if not self._rounds or weights[0].shape[1] % _BYTE_INPUTS:
            return super().pack(weights)
        return self._pack_bytes([_rounded_rows(weight) for weight in weights])

    def grouped_projection(
        self, weights: Sequence[QuantizedWeight], bias: Tensor | None
    ) -> Projection:
        if not all(map(_has_bytes, weights)):
            return super().grouped_projection(weights, bias)
        codes = torch.cat([_signed(weight) for weight in weights])
        scales = torch.cat([weight.scales.float()[:, 0] for weight in weights])
        return self.packed_projection(self._pack_bytes([_Bytes(codes, scales)]), codes.shape, bias)

    def grouped_gate(
        self,
        gate: QuantizedWeight,
        up: QuantizedWeight | None,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        activation: Activation = SWIGLU,
    ) -> Gate:
        both = [gate] if up is None else [gate, up]
        if not all(map(_has_bytes, both)):
            return super().grouped_gate(gate, up, gate_bias, up_bias, activation)
        if up is None or activation != SWIGLU:
            product = self.grouped_projection(both, join_biases(gate_bias, up_bias))
            return TorchGate(product, len(both), activation, self)
        outputs, inputs = gate.shape
        packed = self._pack_bytes(
            [_Bytes(_signed(weight), weight.scales.float()[:, 0]) for weight in both]
        )
        bias = _interleaved(gate_bias, up_bias, outputs)
        weight = _PackedWeight(self.native, packed, bias, inputs, 2 * outputs)
        return _TiledGate(weight, outputs, self)

    def _pack_bytes(self, weights: "Sequence[_Bytes]") -> Packed:
        """Pack weights of one shape with their tiles interleaved."""
        outputs, inputs = weights[0].codes.shape
        columns = len(weights) * _round_up(outputs, _TILE_OUTPUTS)
        columns = _round_up(columns, _PANEL_OUTPUTS)
        tiles = self.arena.take(columns * inputs, torch.int8).zero_()
        scales = torch.zeros(columns // _TILE_OUTPUTS, _TILE_OUTPUTS)
        for first, weight in enumerate(weights):
            codes = weight.codes.contiguous()
            self.native.pack_bytes(
                codes.data_ptr(), tiles.data_ptr(), outputs, inputs, first, len(weights)
            )
            whole = torch.zeros(_round_up(outputs, _TILE_OUTPUTS))
            whole[:outputs] = weight.scales
            part = whole.view(-1, _TILE_OUTPUTS)
            scales[first :: len(weights)][: len(part)] = part
        return Packed(Format.BYTES, tiles, scales.flatten())


class _Bytes(NamedTuple):
    """A weight in int8."""

    codes: Tensor
    """int8 [outputs, inputs]"""
    scales: Tensor
    """float32 [outputs]"""


def _rounded_rows(weight: Tensor) -> _Bytes:
    """Round a weight to int8, with a scale for each output."""
    exact = weight.float()
    largest = exact.abs().amax(dim=1, keepdim=True)
    inverse = torch.where(largest > 0, torch.full_like(largest, 127) / largest, 0)
    return _Bytes((exact * inverse).round().to(torch.int8), largest[:, 0] / 127)


def _has_bytes(weight: QuantizedWeight) -> bool:
    """Return whether a quantized weight is int8 with one scale for each output."""
    one_scale = weight.scales.each.shape[1] == 1 and weight.offsets is None
    return (
        weight.bits == 8
        and one_scale
        and weight.order is None
        and not weight.shape[1] % _BYTE_INPUTS
    )


def _signed(weight: QuantizedWeight) -> Tensor:
    codes = weight.codes if isinstance(weight.codes, Tensor) else weight.codes.decode()
    return (codes ^ 128).view(torch.int8)


class Int4Operators(TiledOperators):
    """TiledOperators with weights rounded to 4 bits, in groups of 32 inputs."""

    def __init__(self, native: Native, bits: int = 4) -> None:
        """bits: 4 or 8. With 4, the product that computes the logits has 8."""
        super().__init__(native)
        self._bits = bits

    def for_logits(self) -> Operators:
        return Int4Operators(self.native, 8)

    def exact_projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        return TiledOperators.projection(self, weight, bias)

    def projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        return self.grouped_projection([rounded(weight, self._bits, TILE)], bias)

    def gate(
        self,
        gate: Tensor,
        up: Tensor | None,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        activation: Activation = SWIGLU,
    ) -> Gate:
        first = rounded(gate, self._bits, TILE)
        second = None if up is None else rounded(up, self._bits, TILE)
        return self.grouped_gate(first, second, gate_bias, up_bias, activation)


class _PackedWeight:
    """A packed weight and the reused call that multiplies by it."""

    def __init__(
        self,
        native: Native,
        packed: Packed,
        bias: Tensor | None,
        inputs: int,
        outputs: int,
        out_stride: int | None = None,
    ) -> None:
        """out_stride: numbers between two rows of the output; None = `outputs`."""
        self._native = native
        self._held = (packed, bias)  # the memory that the call points to
        self.num_bytes = packed.tiles.nbytes
        if packed.scales is not None:
            self.num_bytes += packed.scales.nbytes
        self._call = LinearCall(
            packed=packed.tiles.data_ptr(),
            scales=None if packed.scales is None else packed.scales.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            groups=None if packed.groups is None else pointer(packed.groups),
            inputs=inputs,
            outputs=outputs,
            out_stride=outputs if out_stride is None else out_stride,
            format=packed.format,
        )

    def multiply(self, rows: Tensor, out: Tensor, epilogue: Epilogue, first: int = 0) -> None:
        """Write the products to the outputs from `first` on."""
        call = self._call
        call.rows = rows.data_ptr()
        call.out = out.data_ptr() + first * out.element_size()
        call.num_rows = rows.shape[0]
        call.epilogue = epilogue
        self._native.run(Kernel.LINEAR, call)


class _TiledProjection(Projection):
    has_argmax = True

    def __init__(self, weight: _PackedWeight) -> None:
        self._weight = weight
        self.weight_bytes = weight.num_bytes

    def into(self, rows: Tensor, out: Tensor) -> None:
        exact = out.dtype == torch.float32
        epilogue = Epilogue.STORE_FLOAT32 if exact else Epilogue.STORE
        self._weight.multiply(rows, out, epilogue)

    def add_to(self, rows: Tensor, out: Tensor) -> None:
        self._weight.multiply(rows, out, Epilogue.ADD)

    def argmax(self, rows: Tensor, out: Tensor) -> None:
        self._weight.multiply(rows, out, Epilogue.ARGMAX)


class _Part(NamedTuple):
    """Some neighbouring outputs of a projection."""

    first: int
    weight: _PackedWeight


class _PartedProjection(Projection):
    """A projection whose outputs are stored in different formats."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self._parts = parts
        self.weight_bytes = sum(part.weight.num_bytes for part in parts)

    def into(self, rows: Tensor, out: Tensor) -> None:
        exact = out.dtype == torch.float32
        for first, weight in self._parts:
            weight.multiply(rows, out, Epilogue.STORE_FLOAT32 if exact else Epilogue.STORE, first)

    def add_to(self, rows: Tensor, out: Tensor) -> None:
        for first, weight in self._parts:
            weight.multiply(rows, out, Epilogue.ADD, first)


class _TiledGate(Gate):
    """A SwiGLU in one pass over the weights, whose tiles of gate and up alternate."""

    def __init__(self, weight: _PackedWeight, outputs: int, operators: TiledOperators) -> None:
        self._weight = weight
        self._outputs = outputs
        self._operators = operators
        self._delta: Delta | None = None
        self.weight_bytes = weight.num_bytes

    def adapt(self, delta: Delta) -> None:
        self._delta = delta

    def into(self, rows: Tensor, out: Tensor) -> None:
        if self._delta is None or not self._delta.is_active:
            self._weight.multiply(rows, out, Epilogue.GATE)
            return
        columns = 2 * _round_up(self._outputs, _TILE_OUTPUTS)
        product = self._operators.temporary(len(rows), columns)
        self._weight.multiply(rows, product, Epilogue.STORE)
        tiles = product.view(len(rows), -1, 2, _TILE_OUTPUTS).transpose(1, 2)
        both = tiles.reshape(len(rows), 2, -1)[:, :, : self._outputs].flatten(1)
        self._delta.add_to(rows, both)
        self._operators.arrange(SWIGLU.apply(both), out)


def _pack(kernel: Callable[..., int], weights: tuple[Tensor, ...], *targets: Tensor) -> None:
    """Pack weights of one shape into the targets, with their tiles interleaved."""
    outputs, inputs = weights[0].shape
    for first, weight in enumerate(weights):
        weight = weight.contiguous()
        addresses = [tensor.data_ptr() for tensor in (weight, *targets)]
        kernel(DTYPES[weight.dtype], *addresses, outputs, inputs, first, len(weights))


def _padded(bias: Tensor) -> Tensor:
    """Return a bias in float32, with zeros to whole panels."""
    padded = torch.zeros(_round_up(len(bias), _PANEL_OUTPUTS), dtype=torch.float32)
    padded[: len(bias)] = bias
    return padded


def _interleaved(gate: Tensor | None, up: Tensor | None, outputs: int) -> Tensor | None:
    """Return the biases of two products whose tiles alternate."""
    if gate is None or up is None:
        return None
    both = torch.zeros(2, _round_up(outputs, _TILE_OUTPUTS), dtype=torch.float32)
    both[0, :outputs], both[1, :outputs] = gate, up
    return both.view(2, -1, _TILE_OUTPUTS).transpose(0, 1).reshape(-1)


def _compressed_bytes(elements: int) -> int:
    """Return the bytes of compressed weights, rare exceptions not counted (src/coded.h)."""
    return elements * 25 // 16


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _whole_tiles(rows: Tensor) -> Tensor:
    """View all that `empty` and `temporary` allocated for `rows`: whole blocks of 32 rows."""
    count, width = rows.shape
    return rows.as_strided((_round_up(count, TILE), width), (width, 1))


def _blocks(tiles: Tensor) -> Tensor:
    return tiles.view(-1, tiles.shape[1] // TILE, TILE, TILE)
