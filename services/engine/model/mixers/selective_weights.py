"""Weights of Mamba: their names and shapes, and their loading."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.engine.model.architecture.selective_shape import SelectiveShape
from services.engine.model.checkpoint.quantized import Weight, decoded
from services.engine.model.checkpoint.tensors import StoredTensor
from services.engine.model.mixers.selective import SelectiveWeights
from services.engine.model.mixers.selective_scan import SelectiveConstants
from services.engine.model.operators.interface import Projection
from services.engine.model.parts.stored import LayerNames, StoredLinear, StoredNorm
from services.engine.model.parts.tensor_reader import TensorReader, arranged, take_columns

__all__ = ["StoredSelective", "read_selective", "stored_selective"]


@dataclass(frozen=True, slots=True)
class StoredSelective:
    inputs: StoredLinear
    """Product that computes the convolution's input, and the gate"""
    convolution: StoredTensor
    convolution_bias: StoredTensor | None
    factors: StoredLinear
    steps: StoredLinear
    norms: tuple[StoredTensor, ...]
    """Weights of the norms; empty: there are no norms, or they have no weights"""
    a_log: StoredTensor
    skip: StoredTensor
    output: StoredLinear


def stored_selective(names: LayerNames, shape: SelectiveShape) -> StoredSelective:
    """Name the tensors of a Mamba layer."""
    own, hidden, channels = names.names.selective, names.spec.hidden_size, shape.channels
    assert own is not None
    heads, mark = ((shape.heads,), "_") if own.by_head else ((), ".")
    width, rank = shape.head.channels, shape.step_rank
    factors = names.tensor(f"{own.factors}{mark}weight", *heads, sum(shape.factors), width)
    steps = names.tensor(f"{own.steps}{mark}weight", *heads, width, rank)
    return StoredSelective(
        inputs=names.linear((own.inputs,), (channels, channels), hidden, shape.has_bias),
        convolution=names.tensor(f"{own.convolution}.weight", channels, 1, shape.conv_width),
        convolution_bias=names.tensor(f"{own.convolution}.bias", channels)
        if shape.has_conv_bias
        else None,
        factors=StoredLinear((factors,), ()),
        steps=StoredLinear((steps,), (names.tensor(f"{own.steps}{mark}bias", *heads, width),)),
        norms=tuple(
            names.tensor(f"{name}.weight", width)
            for name, width in zip(own.norms or (), shape.factors, strict=False)
        ),
        a_log=names.tensor(own.a_log, *heads, width, shape.state_width),
        skip=names.tensor(own.skip, *heads, width),
        output=names.linear((own.output,), (hidden,), channels, shape.has_bias),
    )


def read_selective(
    reader: TensorReader,
    stored: StoredSelective,
    shape: SelectiveShape,
    norm: StoredNorm | None,
) -> tuple[SelectiveWeights, ...]:
    """Read the heads of a Mamba layer.

    shape: that of the whole model; norm: the norm whose output it reads.
    """
    layer = _Layer(reader, stored, shape, norm)
    return tuple(map(layer.head, range(shape.heads)))


class _Layer:
    """The tensors of a Mamba layer."""

    def __init__(
        self,
        reader: TensorReader,
        stored: StoredSelective,
        shape: SelectiveShape,
        norm: StoredNorm | None,
    ) -> None:
        own = reader.spec.family.names.selective
        assert own is not None
        self._own, self._reader, self._stored = own, reader, stored
        self._shape, self._norm = shape, norm
        self._inputs = reader.linear(stored.inputs, norm)
        ((self._factors, _),) = reader.linear(stored.factors, None)
        ((self._steps, step_bias),) = reader.linear(stored.steps, None)
        ((self._output, self._output_bias),) = reader.linear(stored.output, None)
        assert step_bias is not None
        a_log, bias = reader.tensor(stored.a_log), stored.convolution_bias
        self._constants = SelectiveConstants(
            convolution=reader.tensor(stored.convolution).flatten(1),
            convolution_bias=None if bias is None else reader.tensor(bias),
            rates=(-a_log if own.has_rates else a_log.float().exp()).flatten(0, -2),
            step_bias=step_bias.flatten(),
            skip=reader.tensor(stored.skip).flatten(),
        )
        """Constants of all channels; channels are the first dimension of each"""
        self._norms = tuple(map(reader.tensor, stored.norms))

    def head(self, number: int) -> SelectiveWeights:
        """Return this rank's part of a head."""
        reader, stored, width = self._reader, self._stored, self._shape.head.channels
        mine = reader.shard.rows(torch.arange(width)) + number * width
        places = [mine, mine + self._shape.channels]
        if self._own.by_head:
            places = [torch.stack((2 * mine, 2 * mine + 1), 0).flatten()]
        operators = reader.operators_of(stored.inputs)
        inputs = reader.product(arranged(self._inputs, places), operators)
        whole = self._constants
        bias = whole.convolution_bias
        return SelectiveWeights(
            inputs=reader.adapted(
                inputs, reader.site(stored.inputs, self._norm, torch.cat(places))
            ),
            factors=self._factors_product(number),
            steps=self._steps_product(number),
            norms=self._norm_weights(),
            constants=SelectiveConstants(
                convolution=self._constant(whole.convolution[mine].T),
                convolution_bias=None if bias is None else self._constant(bias[mine]),
                rates=self._constant(whole.rates[mine].T),
                step_bias=self._constant(whole.step_bias[mine]),
                skip=self._constant(whole.skip[mine]),
            ),
            output=self._output_product(number, mine),
        )

    def _constant(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._reader.device, torch.float32, copy=True).contiguous()

    def _norm_weights(self) -> tuple[Tensor, ...]:
        if not self._shape.has_norms:
            return ()
        ones = (torch.ones(width, device=self._reader.device) for width in self._shape.factors)
        return tuple(map(self._constant, self._norms)) or tuple(ones)

    def _of_head(self, weight: Weight, number: int) -> Weight:
        return decoded(weight)[number] if self._own.by_head else weight

    def _factors_product(self, number: int) -> Projection:
        """Make the product that computes time steps and factors, which is summed over the ranks.

        It is never rounded: time steps are exponents.
        """
        reader, stored = self._reader, self._stored.factors
        part = decoded(reader.shard.columns(self._of_head(self._factors, number)))
        product = reader.operators.exact_projection(part, None)
        reader.step_bytes += product.weight_bytes
        if not self._own.by_head:  # a product by head is not a linear layer in transformers
            site = reader.site(stored)
            product = reader.adapted(product, replace(site, columns=reader.columns_of(site.inputs)))
        return reader.shard.summed(product, reader.operators)

    def _steps_product(self, number: int) -> Projection:
        """Make the product that widens time steps, whose bias is added in float32.

        No adapter changes it, because none does in transformers.
        """
        reader = self._reader
        part = decoded(reader.shard.outputs(self._of_head(self._steps, number)))
        product = reader.operators.exact_projection(part, None)
        reader.step_bytes += product.weight_bytes
        return product

    def _output_product(self, number: int, mine: Tensor) -> Projection:
        """Make the head's summand of the product that adds to the residual.

        mine: int64, this rank's channels, which follow one another.
        """
        reader, stored, width = self._reader, self._stored.output, self._shape.head.channels
        weight, bias = self._output, self._output_bias if number == 0 else None
        site = reader.residual_site(stored)
        if self._shape.heads > 1:
            weight = take_columns(weight, torch.arange(width) + number * width)
            site = replace(site, columns=slice(int(mine[0]), int(mine[-1]) + 1))
        weight, bias = reader.partial_of(weight, bias)
        product = reader.projection([weight], bias, reader.operators_of(stored))
        return reader.shard.summed(reader.adapted(product, site), reader.operators)
