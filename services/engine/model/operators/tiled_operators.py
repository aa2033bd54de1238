"""Operators on the tiled CPU kernels, with weights in bfloat16 or in groups of codes."""

from collections.abc import Callable, Iterable, Sequence
from ctypes import byref

import torch
from torch import Tensor

from services.engine.kernels.library import DTYPES, Format, InstructionSet, Kernel, Native
from services.engine.kernels.memory import allocate
from services.engine.kernels.structures import LayerNormCall, NormCall
from services.engine.kernels.tiles import TILE, from_tiles, rows_at_once
from services.engine.model.architecture.activation import SWIGLU, Activation
from services.engine.model.checkpoint.quantized import QuantizedWeight
from services.engine.model.operators.interface import (
    ExpertWeights,
    Gate,
    LayerNorm,
    Mixture,
    Projection,
)
from services.engine.model.operators.looped_mixture import LoopedMixture
from services.engine.model.operators.native_operators import NativeOperators
from services.engine.model.operators.recording import Recording
from services.engine.model.operators.stored_groups import (
    StoredGroups,
    alike_runs,
    has_kernel,
    mapped_call,
    pack_groups,
)
from services.engine.model.operators.tiled_mixture import tiled_mixture
from services.engine.model.operators.tiled_products import (
    PANEL_OUTPUTS,
    TILE_OUTPUTS,
    Packed,
    PackedWeight,
    PartedProjection,
    ProjectionPart,
    TiledGate,
    TiledProjection,
    epilogue_of,
    interleaved,
    padded,
    round_up,
)
from services.engine.model.operators.torch_operators import TorchGate, join, join_biases

__all__ = ["TiledOperators", "pack_each"]


class TiledOperators(NativeOperators):
    """Operators for bfloat16 on AMX or AVX-512 BF16, with weights packed into tiles.

    Inputs of products, which are outputs of norms and gates, are in tiles too. Without AMX, weights
    are compressed without loss to 12.5 bits and decoded as they are read; so are the codes of a
    quantized checkpoint.
    """

    _tiles_inputs = True

    def __init__(self, native: Native, *, keeps_groups: bool = True) -> None:
        """keeps_groups: whether a quantized checkpoint's codes stay in memory."""
        super().__init__(native, torch.bfloat16)
        self.keeps_groups = keeps_groups
        self.native = native
        self._compresses = native.instruction_set() != InstructionSet.AMX
        self.rows_at_once = rows_at_once()
        # torch multiplies nothing here, so its threads stay idle and don't compete with the pool.
        native.use_pool(torch.get_num_threads())

    def empty(self, rows: int, width: int) -> Tensor:
        return super().empty(round_up(rows, TILE), width)[:rows]

    def temporary(self, rows: int, width: int) -> Tensor:
        return super().temporary(round_up(rows, TILE), width)[:rows]

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

    def layer_norm(
        self, rows: Tensor, norm: LayerNorm, epsilon: float, out: Tensor, *, replaces: bool = False
    ) -> None:
        call = LayerNormCall(
            rows.data_ptr(),
            norm.weight.data_ptr(),
            norm.bias.data_ptr(),
            out.data_ptr(),
            *rows.shape,
            epsilon,
            replaces,
        )
        self.native.layer_norm(byref(call))

    def recording(self, *, only_decodes: bool) -> Recording:
        return Recording(self.native, only_decodes=only_decodes)

    def projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        return self.packed_projection(self.pack((weight,)), weight.shape, bias)

    def packed_projection(
        self, packed: Packed, shape: tuple[int, ...], bias: Tensor | None
    ) -> Projection:
        """Make a projection of a packed weight whose `shape` is [outputs, inputs]."""
        outputs, inputs = shape
        whole = None if bias is None else padded(bias)
        return TiledProjection(PackedWeight(self.native, packed, whole, inputs, outputs))

    def packed_gate(
        self,
        packed: Packed,
        shape: tuple[int, ...],
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        activation: Activation = SWIGLU,
    ) -> Gate:
        """Make a gate of two weights of this shape, whose tiles alternate in `packed`.

        A gate without a second factor has one weight.
        """
        outputs, inputs = shape
        if activation.gated:
            bias = interleaved(gate_bias, up_bias, outputs)
        else:
            bias = None if gate_bias is None else padded(gate_bias)
        columns = outputs * (2 if activation.gated else 1)
        weight = PackedWeight(self.native, packed, bias, inputs, columns)
        return TiledGate(weight, outputs, activation, self)

    def exact_projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        return self.packed_projection(TiledOperators.pack(self, (weight,)), weight.shape, bias)

    def grouped_projection(
        self, weights: Sequence[QuantizedWeight], bias: Tensor | None
    ) -> Projection:
        if not all(map(has_kernel, weights)):
            return super().grouped_projection(weights, bias)
        total = sum(weight.shape[0] for weight in weights)
        parts, first = [], 0
        for run in alike_runs(weights, PANEL_OUTPUTS):
            outputs = sum(weight.codes.shape[0] for weight in run)
            part = None if bias is None else padded(bias[first : first + outputs])
            packed = self._pack_groups(run, outputs)
            inputs = weights[0].shape[1]
            weight = PackedWeight(self.native, packed, part, inputs, outputs, total)
            parts.append(ProjectionPart(first, weight))
            first += outputs
        return TiledProjection(parts[0].weight) if len(parts) == 1 else PartedProjection(parts)

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
        if epilogue_of(activation) is None or not alike:
            product = self.grouped_projection(both, join_biases(gate_bias, up_bias))
            return TorchGate(product, len(both), activation, self)
        columns = len(both) * round_up(gate.shape[0], TILE_OUTPUTS)
        packed = self._pack_groups(stored, columns, alternate=up is not None)
        return self.packed_gate(packed, gate.shape, gate_bias, up_bias, activation)

    def gate(
        self,
        gate: Tensor,
        up: Tensor | None,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        activation: Activation = SWIGLU,
    ) -> Gate:
        if epilogue_of(activation) is None:
            product = self.projection(*join(gate, up, gate_bias, up_bias))
            return TorchGate(product, 1 if up is None else 2, activation, self)
        parts = (gate,) if up is None else (gate, up)
        return self.packed_gate(self.pack(parts), gate.shape, gate_bias, up_bias, activation)

    def mixture(
        self, experts: Iterable[ExpertWeights], count: int, per_row: int, activation: Activation
    ) -> Mixture:
        looped = LoopedMixture(experts, activation, self)
        return tiled_mixture(self.native, looped) if activation.gated else looped

    def pack(self, weights: tuple[Tensor, ...]) -> Packed:
        """Pack weights of one shape with their tiles interleaved."""
        what = f"tiles {[(*weight.shape, weight.dtype) for weight in weights]}"
        packed = self.arena.packed(what, lambda: self._pack_tiles(weights))
        return Packed(Format.PACKED if packed.dtype == torch.bfloat16 else Format.CODED, packed)

    def _pack_tiles(self, weights: tuple[Tensor, ...]) -> Tensor:
        """Return weights in bfloat16, or compressed in bytes."""
        elements = self.packed_elements(weights)
        if not self._compresses:
            packed = self.arena.take(elements, torch.bfloat16)
            pack_each(self.native.pack, weights, packed)
            return packed
        packed = allocate((elements,), torch.bfloat16)
        pack_each(self.native.pack, weights, packed)
        compressed = self._compressed(packed)
        return self.arena.copy(packed if compressed is None else compressed)

    def _pack_groups(
        self, weights: Sequence[StoredGroups], outputs: int, *, alternate: bool = False
    ) -> Packed:
        """Pack weights that are stored alike, one after the other or with their tiles interleaved.

        outputs: of all weights; zeros follow to whole panels. Mapped weights stay in their file.
        """
        if weights[0].is_mapped:
            columns = round_up(outputs, PANEL_OUTPUTS)
            groups, num_bytes = mapped_call(weights, columns, alternate=alternate)
            return Packed(Format.GROUPS, None, groups=groups, mapped_bytes=num_bytes)
        groups = weights[0].call(round_up(outputs, PANEL_OUTPUTS))
        # Zeros follow: packing writes neither to a second weight's missing tiles nor behind the
        # outputs.
        packed = pack_groups(self.native, self.arena, weights, groups, alternate=alternate)
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
        columns = len(weights) * round_up(outputs, TILE_OUTPUTS)
        return self.native.packed_elements(columns, inputs)


def pack_each(kernel: Callable[..., int], weights: tuple[Tensor, ...], *targets: Tensor) -> None:
    """Pack weights of one shape into the targets, with their tiles interleaved."""
    outputs, inputs = weights[0].shape
    for first, weight in enumerate(weights):
        weight = weight.contiguous()
        addresses = [tensor.data_ptr() for tensor in (weight, *targets)]
        kernel(DTYPES[weight.dtype], *addresses, outputs, inputs, first, len(weights))


def _compressed_bytes(elements: int) -> int:
    """Return the bytes of compressed weights, rare exceptions not counted (src/coded.h)."""
    return elements * 25 // 16


def _whole_tiles(rows: Tensor) -> Tensor:
    """View all that `empty` and `temporary` allocated for `rows`: whole blocks of 32 rows."""
    count, width = rows.shape
    return rows.as_strided((round_up(count, TILE), width), (width, 1))


def _blocks(tiles: Tensor) -> Tensor:
    return tiles.view(-1, tiles.shape[1] // TILE, TILE, TILE)
