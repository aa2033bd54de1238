"""Mixture of experts on a GPU, whose launches depend on no content."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from services.engine.model.architecture.activation import Activation
from services.engine.model.checkpoint.mxfp4 import Mxfp4Weight
from services.engine.model.checkpoint.quantized import QuantizedWeight, Weight
from services.engine.model.operators.activations import activated
from services.engine.model.operators.deltas import Delta, ExpertDeltas
from services.engine.model.operators.expert_kernels import (
    TILES,
    Blocks,
    Tile,
    add_sums,
    choose_tile,
    multiply_experts,
    sort_choices,
)
from services.engine.model.operators.fp8_weights import Fp8Rounding
from services.engine.model.operators.grouped_weights import GroupedWeights
from services.engine.model.operators.interface import ExpertWeights, Mixture
from services.engine.model.operators.packed_experts import PackedExperts

__all__ = ["GroupedMixture", "MixtureShape", "first_of", "plain"]


class MixtureShape(NamedTuple):
    """Widths of a mixture's products, and numbers of its experts."""

    inputs: int
    width: int
    """Number of outputs of gate and of up"""
    outputs: int
    experts: int
    per_row: int
    """Number of experts of a row"""

    @staticmethod
    def of(expert: ExpertWeights, count: int, per_row: int) -> "MixtureShape":
        (width, inputs), outputs = expert.gate.shape, expert.down.shape[0]
        return MixtureShape(inputs, width, outputs, count, per_row)


class GroupedMixture(Mixture):
    """Experts in one product per half, in float16 and bfloat16, without a wait for the host.

    Encoded weights are decoded in registers; rows keep their dtype.
    """

    def __init__(
        self,
        gate: GroupedWeights | PackedExperts,
        down: GroupedWeights | PackedExperts,
        shape: MixtureShape,
        activation: Activation,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Compile the kernels. gate: gate and up of all experts."""
        self._gate = gate
        self._down = down
        self.weight_bytes = gate.nbytes + down.nbytes
        self._width = shape.width
        self._activation = activation
        self._count = shape.experts
        most = min(each.most_rows for each in (gate, down))
        self._tiles = [tile for tile in TILES if tile.rows <= most]
        self._deltas: ExpertDeltas | None = None
        row, out = (
            torch.zeros((1, width), dtype=dtype, device=device)
            for width in (shape.inputs, shape.outputs)
        )
        chosen = torch.arange(shape.per_row, device=device)[None]
        # Without this, the first step of some size would wait for the compiler.
        for tile in self._tiles:
            self._add_to(row, chosen, chosen.float(), out, tile)

    @staticmethod
    def of(
        experts: Iterable[ExpertWeights],
        count: int,
        per_row: int,
        activation: Activation,
        dtype: torch.dtype,
        device: torch.device,
        rounding: Fp8Rounding | None = None,
    ) -> "GroupedMixture":
        """Copy the weights to the device, an expert at a time.

        per_row: number of experts of a row. rounding: rounding to FP8 of weights that are
        not MXFP4; None: they are converted to `dtype`.
        """
        first, rest = first_of(experts)
        shape = MixtureShape.of(first, count, per_row)
        gate = GroupedWeights.allocate(
            plain(first.gate, first.up), first.gate_bias, count, dtype, device, rounding
        )
        down = GroupedWeights.allocate(
            plain(first.down), first.down_bias, count, dtype, device, rounding
        )
        for number, each in enumerate(rest):
            gate.put(number, plain(each.gate, each.up), (each.gate_bias, each.up_bias))
            down.put(number, plain(each.down), (each.down_bias,))
        return GroupedMixture(gate, down, shape, activation, dtype, device)

    def adapt(self, deltas: ExpertDeltas) -> None:
        self._deltas = deltas

    def add_to(self, rows: Tensor, chosen: Tensor, factors: Tensor, out: Tensor) -> None:
        tile = choose_tile(chosen.numel(), self._count, self._tiles)
        self._add_to(rows, chosen, factors, out, tile)

    def _add_to(
        self, rows: Tensor, chosen: Tensor, factors: Tensor, out: Tensor, tile: Tile
    ) -> None:
        choices, per_row = chosen.numel(), chosen.shape[1]
        outputs = out.shape[1]
        blocks = sort_choices(chosen, self._count, tile)
        deltas = self._deltas if self._deltas is not None and self._deltas.is_active else None
        products = rows.new_empty((choices, outputs))
        if deltas is None:
            hidden = rows.new_empty((choices, self._width))
            _multiply(rows, self._gate, blocks, per_row, self._activation, hidden)
        else:
            both = rows.new_empty((choices, 2 * self._width))
            _multiply(rows, self._gate, blocks, per_row, None, both)
            _adapt(deltas, deltas.gates, rows, chosen, both)
            hidden = activated(self._activation, both)
        _multiply(hidden, self._down, blocks, 1, None, products)
        if deltas is not None:
            _adapt(deltas, deltas.downs, hidden, chosen, products)
        if self.returns_rows:
            has_weights = chosen[..., None] < self._count
            own = products.view(*chosen.shape, outputs)
            products = torch.where(has_weights, own, rows[:, None])
        add_sums(products, factors, out)


def _multiply(
    rows: Tensor,
    weights: GroupedWeights | PackedExperts,
    blocks: Blocks,
    per_row: int,
    activation: Activation | None,
    out: Tensor,
) -> None:
    if isinstance(weights, PackedExperts):
        weights.multiply(rows, blocks, per_row, activation, out)
    else:
        multiply_experts(rows, weights, blocks, per_row, activation, out)


def _adapt(
    deltas: ExpertDeltas, parts: Sequence[Delta], rows: Tensor, chosen: Tensor, out: Tensor
) -> None:
    """Add to each choice's product the addition of its row's adapter to its expert.

    The host waits for the choices: steps with adapters of experts run without CUDA graphs anyway.
    parts: one for each expert; rows: of the step, or of its choices; out: [choices, outputs].
    """
    per_row, flat = chosen.shape[1], chosen.flatten()
    for number in sorted(set(flat.tolist())):
        if number >= len(parts):
            break  # experts without weights
        choices = torch.where(flat == number)[0]
        with deltas.routed(choices // per_row):
            if parts[number].is_active:
                product = out[choices]
                parts[number].add_to(rows[choices * len(rows) // len(out)], product)
                out[choices] = product


def first_of(experts: Iterable[ExpertWeights]) -> tuple[ExpertWeights, Iterable[ExpertWeights]]:
    """Return the first expert, and an iterable of all experts."""
    iterator = iter(experts)
    first = next(iterator)
    return first, chain((first,), iterator)


def plain(*weights: Weight | None) -> list[Tensor | Mxfp4Weight]:
    """Decode weights that no kernel here reads, and leave out those that are None."""
    found = (each for each in weights if each is not None)
    return [each.decode() if isinstance(each, QuantizedWeight) else each for each in found]
