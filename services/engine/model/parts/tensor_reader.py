"""Reading of linear layers, norms and tables from a checkpoint, as every kind of layer needs them.

Several family differences are folded into the weights. Let x be the residual, W and b a linear
layer that reads the norm of x, and V a linear layer whose output is added to x:

- A LayerNorm is an RMSNorm of x minus its mean, plus a bias. Subtracting the mean from each V and
  from the embedding keeps the mean of x at 0. W times the norm's bias is added to b.
- A factor on V's output is multiplied into V.

With tensor parallelism, a layer takes this rank's shard of each weight.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor

from services.engine.model.adapters.adapters import Adapters, Site, SiteModule
from services.engine.model.architecture.activation import Activation
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.checkpoint.mxfp4 import Mxfp4Weight
from services.engine.model.checkpoint.progress import LoadProgress
from services.engine.model.checkpoint.quantized import (
    QuantizedWeight,
    StoredRows,
    Weight,
    decoded,
    split,
)
from services.engine.model.checkpoint.tensors import StoredTensor, TensorFiles
from services.engine.model.operators.composed_projections import AdaptedProjection, OutputNorm
from services.engine.model.operators.interface import Gate, Operators, Projection
from services.engine.model.parts.shard import Shard
from services.engine.model.parts.stored import StoredLinear, StoredNorm

__all__ = [
    "TensorReader",
    "WeightAndBias",
    "arranged",
    "shard_rows",
    "split_parts",
    "take_columns",
    "take_rows",
    "without_mean",
]

WeightAndBias: TypeAlias = tuple[Weight, Tensor | None]
"""A weight [outputs, inputs] and its bias [outputs]"""


class TensorReader:
    """Reader of one checkpoint's tensors, from the mapped files."""

    def __init__(
        self,
        checkpoint: TensorFiles,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        operators: Operators,
        bar: LoadProgress,
        shard: Shard,
        adapters: Adapters | None = None,
    ) -> None:
        """spec: that of the whole model; adapters: adapters that may change the layers' products;
        None = none can."""
        self.checkpoint = checkpoint
        self.spec = spec
        self.shard = shard
        self.adapters = adapters
        self.dtype = dtype
        self.device = device
        self.operators = operators
        self.root = ""
        """Beginning of the decoder's tensor names"""
        self.step_bytes = 0
        """Bytes of those weights read so far that every step reads"""
        self._bar = bar
        self._factors = {each.name: each.factors for each in spec.weight_factors}

    def residual_projection(
        self, linear: StoredLinear, columns: Tensor | None = None
    ) -> Projection:
        """Make a projection whose output, summed over the ranks, is added to the residual.

        columns: int64 [inputs], the stored column of each input; None = in order.
        """
        return self.shard.summed(self.partial_projection(linear, columns), self.operators)

    def output_norm(self, norm: StoredNorm) -> OutputNorm:
        """Read the norm of an output that is added to the residual."""
        weight = self.norm_weight(self.tensor(norm.weight))
        if norm.factor != 1:
            weight *= norm.factor
        return OutputNorm(weight, self.spec.norm_epsilon, self.operators)

    def partial_projection(self, linear: StoredLinear, columns: Tensor | None = None) -> Projection:
        """Make this rank's share of a projection that is added to the residual."""
        ((weight, bias),) = self.linear(linear, None)
        weight, bias = self.partial_of(take_columns(weight, columns), bias)
        product = self.projection([weight], bias, self.operators_of(linear))
        return self.adapted(product, self.residual_site(linear))

    def adapted(self, product: Projection, site: Site) -> Projection:
        if self.adapters is None:
            return product
        return AdaptedProjection(product, self.adapters.delta(site))

    def site(
        self,
        linear: StoredLinear,
        norm: StoredNorm | None = None,
        order: Tensor | None = None,
        fold: Callable[[Tensor], Tensor] | None = None,
    ) -> Site:
        """Describe a product for adapters. norm: the norm it reads; order: that of its outputs."""
        place = int(self.spec.family.transposed)
        names = [
            weight.name.removeprefix(self.root).removesuffix(".weight") for weight in linear.weights
        ]
        modules = [
            SiteModule(
                name, weight.shape[place], self._adapter_name(name), self._row_factors(weight)
            )
            for name, weight in zip(names, linear.weights, strict=True)
        ]
        bias = None
        if norm is not None and norm.bias is not None:
            bias = self.checkpoint.tensor(norm.bias).float()
        inputs = linear.weights[0].shape[1 - place]
        return Site(tuple(modules), inputs, order, norm_bias=bias, fold=fold)

    def _adapter_name(self, name: str) -> str:
        """Return a module's name in transformers 5; empty if it is the same."""
        for part, other in self.spec.family.names.adapter_names.items():
            if part in name:
                return name.replace(part, other)
        return ""

    def residual_site(self, linear: StoredLinear) -> Site:
        site = self.site(linear, fold=self.fold_residual)
        return replace(site, columns=self.columns_of(site.inputs))

    def columns_of(self, inputs: int) -> slice | None:
        """Return this rank's part of the inputs of a product that is summed over the ranks."""
        if self.shard.count == 1:
            return None
        width = inputs // self.shard.count
        return slice(self.shard.number * width, (self.shard.number + 1) * width)

    def partial(self, linear: StoredLinear, *, of_expert: bool = False) -> WeightAndBias:
        """Read this rank's share of a layer whose output is added to the residual."""
        ((weight, bias),) = self.linear(linear, None, of_expert=of_expert)
        return self.partial_of(weight, bias)

    def partial_of(self, weight: Weight, bias: Tensor | None) -> WeightAndBias:
        """Return this rank's share of a layer [outputs, inputs], as `partial` does."""
        bias = self.shard.first_rank_only(bias)
        part, scale = self.shard.columns(weight), self.spec.residual_scale
        if isinstance(part, QuantizedWeight):
            part = part.times(scale)
        elif isinstance(part, Tensor) or scale != 1:
            part = self.fold_residual(decoded(part))
        return part, None if bias is None else self.fold_residual(bias)

    def fold_residual(self, outputs: Tensor) -> Tensor:
        """Fold the LayerNorm's mean and the residual scale into an addend to the residual."""
        if self.spec.family.layer_norm:
            outputs = without_mean(outputs, 0)
        scale = self.spec.residual_scale
        return outputs if scale == 1 else outputs.float() * scale

    def projection(
        self, weights: Sequence[Weight], bias: Tensor | None, operators: Operators
    ) -> Projection:
        """Make a projection of the outputs of all weights."""
        quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
        if len(quantized) == len(weights):
            projection = operators.grouped_projection(quantized, bias)
        else:
            projection = operators.projection(_whole(weights), bias)
        self.step_bytes += projection.weight_bytes
        return projection

    def product(self, parts: Sequence[WeightAndBias], operators: Operators) -> Projection:
        """Make a projection of the outputs of all parts, which have all biases or none."""
        biases = [bias for _, bias in parts if bias is not None]
        bias = torch.cat(biases) if biases else None
        return self.projection([weight for weight, _ in parts], bias, operators)

    def gate(
        self, parts: Sequence[WeightAndBias], activation: Activation, operators: Operators
    ) -> Gate:
        """Make a gate of one product or two."""
        (gate, gate_bias), *second = parts
        up, up_bias = second[0] if second else (None, None)
        if isinstance(gate, QuantizedWeight) and isinstance(up, QuantizedWeight | None):
            made = operators.grouped_gate(gate, up, gate_bias, up_bias, activation)
        else:
            factor = None if up is None else decoded(up)
            made = operators.gate(decoded(gate), factor, gate_bias, up_bias, activation)
        self.step_bytes += made.weight_bytes
        return made

    def operators_of(self, *linears: StoredLinear) -> Operators:
        """Return the operators for layers that are multiplied at once."""
        weights = (weight for linear in linears for weight in linear.weights)
        if any(map(self.checkpoint.leaves_unquantized, weights)):
            return self.operators.without_fp8()
        return self.operators

    def linear(
        self, linear: StoredLinear, norm: StoredNorm | None, *, of_expert: bool = False
    ) -> list[WeightAndBias]:
        """Read weights [outputs, inputs] and biases, with the bias of `norm` folded in."""
        weights = [self.weight(weight, norm, of_expert=of_expert) for weight in linear.weights]
        biases = map(self.tensor, linear.biases)
        return [
            (weight, self.with_norm_bias(weight, next(biases, None), norm)) for weight in weights
        ]

    def weight(
        self, stored: StoredTensor, norm: StoredNorm | None, *, of_expert: bool = False
    ) -> Weight:
        """Read a weight [outputs, inputs] of a layer that reads `norm`."""
        quantized = self.quantized(stored, norm, of_expert=of_expert)
        if quantized is not None:
            self._bar.add(self.checkpoint.num_bytes(stored))
            return quantized
        weight = self.tensor(stored)
        return weight.T if self.spec.family.transposed else weight

    def quantized(
        self, stored: StoredTensor, norm: StoredNorm | None, *, of_expert: bool = False
    ) -> QuantizedWeight | Mxfp4Weight | None:
        """Return the codes of a weight; None if it has none, or must be decoded to be changed."""
        if not self.spec.family.keeps_codes or (norm is not None and norm.bias):
            return None
        if of_expert and self.operators.groups_experts:
            packed = self.checkpoint.mxfp4(stored, self.device)
            if packed is not None:
                return packed
        if not self.operators.keeps_groups:
            return None
        factors = self._factors_of(stored)
        if len(factors) > 1:
            return None
        quantized = self.checkpoint.quantized(stored)
        if quantized is None or not factors:
            return quantized
        return quantized.times(factors[0][1])

    def with_norm_bias(
        self, weight: Weight, bias: Tensor | None, norm: StoredNorm | None
    ) -> Tensor | None:
        if norm is None or norm.bias is None:
            return bias
        folded = decoded(weight).float() @ self.checkpoint.tensor(norm.bias).float()
        return folded if bias is None else folded + bias

    def norm(self, norm: StoredNorm | None) -> Tensor | None:
        return None if norm is None else self.norm_weight(self.tensor(norm.weight))

    def norm_weight(self, norm: Tensor) -> Tensor:
        """Copy a norm's weight out of the file."""
        self.step_bytes += norm.numel() * self.dtype.itemsize
        weight = norm.float() + 1 if self.spec.family.norm_offset else norm
        return weight.to(self.device, self.dtype, copy=True)

    def stored_rows(self, table: StoredTensor) -> StoredRows | None:
        """Return a table whose rows are decoded when read; None if it is stored otherwise."""
        rows = self.checkpoint.rows(table)
        if rows is not None:
            self._bar.add(self.checkpoint.num_bytes(table))
        return rows

    def tensor(self, stored: StoredTensor) -> Tensor:
        """Read a tensor, times its factors."""
        tensor = self.checkpoint.tensor(stored)
        self._bar.add(self.checkpoint.num_bytes(stored))
        factors = self._row_factors(stored)
        if factors is None:
            return tensor
        return tensor.float() * factors.view(-1, *(1,) * (tensor.ndim - 1))

    def _row_factors(self, stored: StoredTensor) -> Tensor | None:
        """Return the factor of each row of a tensor; None if there are none."""
        factors = self._factors_of(stored)
        if not factors:
            return None
        if len(factors) == 1:
            return torch.full(stored.shape[:1], factors[0][1])
        return torch.cat([torch.full((count,), factor) for count, factor in factors])

    def _factors_of(self, stored: StoredTensor) -> tuple[tuple[int, float], ...]:
        """Return the factors of a layer's tensor; empty if there are none."""
        if not self._factors:
            return ()
        layers = f"{self.root}{self.spec.family.names.layers}."
        return self._factors.get(stored.name.removeprefix(layers).partition(".")[2], ())


def split_parts(parts: list[WeightAndBias], outputs: Sequence[int]) -> list[WeightAndBias]:
    """Split a single part into a weight and a bias for each number of `outputs`."""
    if len(parts) == len(outputs):
        return parts
    ((weight, bias),) = parts
    biases = [None] * len(outputs) if bias is None else bias.split_with_sizes(outputs)
    return list(zip(split(weight, outputs), biases, strict=True))


def shard_rows(part: WeightAndBias, shard: Shard) -> WeightAndBias:
    weight, bias = part
    return shard.outputs(weight), None if bias is None else shard.rows(bias)


def without_mean(weight: Tensor, dim: int) -> Tensor:
    exact = weight.float()
    return exact - exact.mean(dim, keepdim=True)


def _whole(weights: Sequence[Weight]) -> Tensor:
    """Return the outputs of all weights as one."""
    tensors = [decoded(weight) for weight in weights]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def take_rows(part: WeightAndBias, index: Tensor) -> WeightAndBias:
    """Return some outputs of a linear layer, in an order. index: int64 [outputs]."""
    weight, bias = part
    if torch.equal(index, torch.arange(weight.shape[0])):
        return part
    rows = weight[index] if isinstance(weight, Tensor) else weight.rows(index)
    return rows, None if bias is None else bias[index]


def take_columns(weight: Weight, columns: Tensor | None) -> Weight:
    """Return a weight whose input i is column columns[i] of `weight`; None = in order."""
    if columns is None:
        return weight
    if isinstance(weight, QuantizedWeight):
        return replace(weight, order=columns if weight.order is None else weight.order[columns])
    return decoded(weight)[:, columns]


def arranged(parts: Sequence[WeightAndBias], places: Sequence[Tensor]) -> list[WeightAndBias]:
    """Return outputs of linear layers in an order.

    places: int64, numbers of the outputs among all parts' outputs; each tensor is in one part.
    """
    taken: list[tuple[int, list[Tensor]]] = []
    ends = list(accumulate(weight.shape[0] for weight, _ in parts))
    for place in places:
        number = bisect_right(ends, int(place[0]))
        index = place - (ends[number - 1] if number else 0)
        if taken and taken[-1][0] == number:
            taken[-1][1].append(index)
        else:
            taken.append((number, [index]))
    return [take_rows(parts[number], torch.cat(index)) for number, index in taken]
