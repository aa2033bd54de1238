"""Mixture of experts on a GPU, whose launches depend on no content."""

from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor

from services.engine.model.architecture.activation import Activation
from services.engine.model.checkpoint.mxfp4 import Mxfp4Weight
from services.engine.model.checkpoint.quantized import QuantizedWeight, Weight
from services.engine.model.operators.activations import activated
from services.engine.model.operators.deltas import Delta, ExpertDeltas
from services.engine.model.operators.expert_kernels import (
    TILES,
    Tile,
    add_sums,
    choose_tile,
    multiply_experts,
    sort_choices,
)
from services.engine.model.operators.fp8_weights import Fp8Rounding
from services.engine.model.operators.grouped_weights import GroupedWeights
from services.engine.model.operators.interface import ExpertWeights, Mixture

__all__ = ["GroupedMixture"]


class GroupedMixture(Mixture):
    """Experts in one product per half, in float16 and bfloat16, without a wait for the host.

    Encoded weights are decoded in registers; rows keep their dtype.
    """

    def __init__(
        self,
        experts: Iterable[ExpertWeights],
        count: int,
        per_row: int,
        activation: Activation,
        dtype: torch.dtype,
        device: torch.device,
        rounding: Fp8Rounding | None = None,
    ) -> None:
        """Copy the weights to the device, an expert at a time, and compile the kernels.

        per_row: number of experts of a row. rounding: rounding to FP8 of weights that are
        not MXFP4; None: they are converted to `dtype`.
        """
        first, rest = _first(experts)
        inputs, outputs = first.gate.shape[1], first.down.shape[0]
        self._gate = GroupedWeights.allocate(
            _plain(first.gate, first.up), first.gate_bias, count, dtype, device, rounding
        )
        self._down = GroupedWeights.allocate(
            _plain(first.down), first.down_bias, count, dtype, device, rounding
        )
        for number, each in enumerate(rest):
            self._gate.put(number, _plain(each.gate, each.up), (each.gate_bias, each.up_bias))
            self._down.put(number, _plain(each.down), (each.down_bias,))
        self.weight_bytes = self._gate.nbytes + self._down.nbytes
        self._width = first.gate.shape[0]
        self._activation = activation
        self._count = count
        self._deltas: ExpertDeltas | None = None
        row, out = (
            torch.zeros((1, width), dtype=dtype, device=device) for width in (inputs, outputs)
        )
        chosen = torch.arange(per_row, device=device)[None]
        # Without this, the first step of some size would wait for the compiler.
        for tile in TILES:
            self._add_to(row, chosen, chosen.float(), out, tile)

    def adapt(self, deltas: ExpertDeltas) -> None:
        self._deltas = deltas

    def add_to(self, rows: Tensor, chosen: Tensor, factors: Tensor, out: Tensor) -> None:
        tile = choose_tile(chosen.numel(), self._count)
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
            multiply_experts(rows, self._gate, blocks, per_row, self._activation, hidden)
        else:
            both = rows.new_empty((choices, 2 * self._width))
            multiply_experts(rows, self._gate, blocks, per_row, None, both)
            _adapt(deltas, deltas.gates, rows, chosen, both)
            hidden = activated(self._activation, both)
        multiply_experts(hidden, self._down, blocks, 1, None, products)
        if deltas is not None:
            _adapt(deltas, deltas.downs, hidden, chosen, products)
        if self.returns_rows:
            has_weights = chosen[..., None] < self._count
            own = products.view(*chosen.shape, outputs)
            products = torch.where(has_weights, own, rows[:, None])
        add_sums(products, factors, out)


def _adapt(
    deltas: ExpertDeltas, parts: Sequence[Delta], rows: Tensor, chosen: Tensor, out: Tensor
) -> None:
    """Add to each choice's product the addition of its row's adapter to its expert.

    The host waits for the choices: steps with adapters run without CUDA graphs anyway. parts: one
    for each expert; rows: of the step, or of its choices; out: [choices, outputs].
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


def _first(experts: Iterable[ExpertWeights]) -> tuple[ExpertWeights, Iterable[ExpertWeights]]:
    """Return the first expert, and an iterable of all experts."""
    iterator = iter(experts)
    first = next(iterator)
    return first, chain((first,), iterator)


def _plain(*weights: Weight | None) -> list[Tensor | Mxfp4Weight]:
    """Decode weights that no kernel here reads, and leave out those that are None."""
    found = (each for each in weights if each is not None)
    return [each.decode() if isinstance(each, QuantizedWeight) else each for each in found]
