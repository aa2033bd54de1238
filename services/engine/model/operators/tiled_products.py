"""Products with weights in tiles: the packed weights, and the calls that multiply by them."""

from collections.abc import Mapping, Sequence
from ctypes import pointer
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from services.engine.kernels.library import Epilogue, Format, Kernel, Native
from services.engine.kernels.structures import GroupedCall, LinearCall
from services.engine.model.architecture.activation import SWIGLU, Activation, Nonlinearity
from services.engine.model.operators.activations import activated
from services.engine.model.operators.deltas import Delta
from services.engine.model.operators.interface import Gate, Operators, Projection

__all__ = [
    "PANEL_OUTPUTS",
    "TILE_OUTPUTS",
    "Packed",
    "PackedWeight",
    "PartedProjection",
    "ProjectionPart",
    "TiledGate",
    "TiledProjection",
    "epilogue_of",
    "interleaved",
    "padded",
    "round_up",
]

TILE_OUTPUTS = 16
"""Number of outputs in a tile of weights"""
PANEL_OUTPUTS = 2 * TILE_OUTPUTS
"""Number of outputs that are multiplied at once"""


@dataclass(frozen=True, slots=True)
class Packed:
    """Weights packed into tiles."""

    format: Format
    tiles: Tensor | None
    """Packed tiles; None: the weights are mapped from their file"""
    scales: Tensor | None = None
    """float32, factors on int8 weights, one per packed column; None in other formats"""
    groups: GroupedCall | None = None
    """Description of weights in groups; None in other formats"""
    mapped_bytes: int = 0
    """Bytes of the file that mapped weights take"""

    @property
    def num_bytes(self) -> int:
        """Bytes that a product reads."""
        parts = (part.nbytes for part in (self.tiles, self.scales) if part is not None)
        return sum(parts) + self.mapped_bytes


class PackedWeight:
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
        self.num_bytes = packed.num_bytes
        self._call = LinearCall(
            packed=None if packed.tiles is None else packed.tiles.data_ptr(),
            scales=None if packed.scales is None else packed.scales.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            groups=None if packed.groups is None else pointer(packed.groups),
            inputs=inputs,
            outputs=outputs,
            out_stride=outputs if out_stride is None else out_stride,
            format=packed.format,
        )

    def set_activation(self, activation: Activation) -> None:
        """Set the constants of the activation that an epilogue computes."""
        self._call.alpha, self._call.limit = activation.alpha, activation.limit

    def call(self, epilogue: Epilogue) -> LinearCall:
        """Return a call that lacks rows and out, valid as long as this weight lives."""
        call = LinearCall.from_buffer_copy(self._call)
        call.epilogue = epilogue
        return call

    def multiply(self, rows: Tensor, out: Tensor, epilogue: Epilogue, first: int = 0) -> None:
        """Write the products to the outputs from `first` on."""
        call = self._call
        call.rows = rows.data_ptr()
        call.out = out.data_ptr() + first * out.element_size()
        call.num_rows = rows.shape[0]
        call.epilogue = epilogue
        self._native.run(Kernel.LINEAR, call)


class TiledProjection(Projection):
    has_argmax = True

    def __init__(self, weight: PackedWeight) -> None:
        self._weight = weight
        self.weight_bytes = weight.num_bytes

    def call(self) -> LinearCall:
        """Return a call that stores products in bfloat16; see `PackedWeight.call`."""
        return self._weight.call(Epilogue.STORE)

    def into(self, rows: Tensor, out: Tensor) -> None:
        self._weight.multiply(rows, out, _store(out))

    def add_to(self, rows: Tensor, out: Tensor) -> None:
        self._weight.multiply(rows, out, Epilogue.ADD)

    def argmax(self, rows: Tensor, out: Tensor) -> None:
        self._weight.multiply(rows, out, Epilogue.ARGMAX)


class ProjectionPart(NamedTuple):
    """Some neighbouring outputs of a projection."""

    first: int
    weight: PackedWeight


class PartedProjection(Projection):
    """A projection whose outputs are stored in different formats."""

    def __init__(self, parts: Sequence[ProjectionPart]) -> None:
        self._parts = parts
        self.weight_bytes = sum(part.weight.num_bytes for part in parts)

    def into(self, rows: Tensor, out: Tensor) -> None:
        for first, weight in self._parts:
            weight.multiply(rows, out, _store(out), first)

    def add_to(self, rows: Tensor, out: Tensor) -> None:
        for first, weight in self._parts:
            weight.multiply(rows, out, Epilogue.ADD, first)


_EPILOGUES: Mapping[Activation, Epilogue] = {
    SWIGLU: Epilogue.GATE,
    Activation(Nonlinearity.GELU): Epilogue.GATE_GELU,
    Activation(Nonlinearity.GELU_TANH): Epilogue.GATE_GELU_TANH,
    Activation(Nonlinearity.GELU, gated=False): Epilogue.GELU,
    Activation(Nonlinearity.GELU_TANH, gated=False): Epilogue.GELU_TANH,
}


def epilogue_of(activation: Activation) -> Epilogue | None:
    """Return the epilogue that computes an activation with the products; None if none does."""
    if activation.nonlinearity is Nonlinearity.CLAMPED_SWIGLU:
        return Epilogue.GATE_CLAMPED
    return _EPILOGUES.get(activation)


class TiledGate(Gate):
    """A gate in one pass over the weights, whose tiles of gate and up alternate."""

    def __init__(
        self, weight: PackedWeight, outputs: int, activation: Activation, operators: Operators
    ) -> None:
        epilogue = epilogue_of(activation)
        assert epilogue is not None
        weight.set_activation(activation)
        self._epilogue = epilogue
        self._weight = weight
        self._outputs = outputs
        self._activation = activation
        self._operators = operators
        self._delta: Delta | None = None
        self.weight_bytes = weight.num_bytes

    @property
    def is_adapted(self) -> bool:
        return self._delta is not None and self._delta.is_active

    def adapt(self, delta: Delta) -> None:
        self._delta = delta

    def call(self) -> LinearCall:
        """Return a call that computes the gate; see `PackedWeight.call`."""
        return self._weight.call(self._epilogue)

    def into(self, rows: Tensor, out: Tensor) -> None:
        if self._delta is None or not self.is_adapted:
            self._weight.multiply(rows, out, self._epilogue)
            return
        products = 2 if self._activation.gated else 1
        columns = products * round_up(self._outputs, TILE_OUTPUTS)
        product = self._operators.temporary(len(rows), columns)
        self._weight.multiply(rows, product, Epilogue.STORE)
        tiles = product.view(len(rows), -1, products, TILE_OUTPUTS).transpose(1, 2)
        all_ = tiles.reshape(len(rows), products, -1)[:, :, : self._outputs].flatten(1)
        self._delta.add_to(rows, all_)
        self._operators.arrange(activated(self._activation, all_), out)


def padded(bias: Tensor) -> Tensor:
    """Return a bias in float32, padded with zeros to whole panels."""
    padded = torch.zeros(round_up(len(bias), PANEL_OUTPUTS), dtype=torch.float32)
    padded[: len(bias)] = bias
    return padded


def interleaved(gate: Tensor | None, up: Tensor | None, outputs: int) -> Tensor | None:
    """Return the biases of two products whose tiles alternate."""
    if gate is None or up is None:
        return None
    both = torch.zeros(2, round_up(outputs, TILE_OUTPUTS), dtype=torch.float32)
    both[0, :outputs], both[1, :outputs] = gate, up
    return both.view(2, -1, TILE_OUTPUTS).transpose(0, 1).reshape(-1)


def round_up(size: int, multiple: int) -> int:
    """Return the least multiple that is not below `size`."""
    return -(-size // multiple) * multiple


def _store(out: Tensor) -> Epilogue:
    return Epilogue.STORE_FLOAT32 if out.dtype == torch.float32 else Epilogue.STORE
