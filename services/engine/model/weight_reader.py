"""Conversion of a checkpoint's tensors to the decoder's weights.

It folds several family differences into the weights. Let x be the residual, W and b a linear layer
that reads the norm of x, and V a linear layer whose output is added to x:

- A LayerNorm is an RMSNorm of x minus its mean, plus a bias. Subtracting the mean from each V and
  from the embedding keeps the mean of x at 0. W times the norm's bias is added to b.
- A factor on what is added to x is multiplied into V.
- Partial RoPE becomes full RoPE with some angles of 0: the rows of W are reordered so that the two
  dimensions of a pair lie half a head apart.

With tensor parallelism it takes this rank's shard of each weight.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor

from services.engine.model.adapters.adapters import Adapters, Site, SiteModule, StackedPart
from services.engine.model.architecture.rotary import RotarySpec
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.checkpoint.families import QkNorm
from services.engine.model.checkpoint.mxfp4 import Mxfp4Weight
from services.engine.model.checkpoint.progress import LoadProgress
from services.engine.model.checkpoint.quantized import (
    QuantizedWeight,
    Weight,
    decoded,
    split,
)
from services.engine.model.checkpoint.tensors import StoredTensor, TensorFiles
from services.engine.model.decoder import DecoderLayer, DecoderWeights
from services.engine.model.embedding import Embedding, StoredEmbedding, TensorEmbedding
from services.engine.model.feed_forward import Dense, Experts, FeedForward
from services.engine.model.manifest import (
    Manifest,
    StackedExperts,
    StoredExperts,
    StoredFeedForward,
    StoredLayer,
    StoredLinear,
    StoredNorm,
)
from services.engine.model.operators.interface import (
    AdaptedProjection,
    ExpertWeights,
    Gate,
    NormedProjection,
    Operators,
    Projection,
)
from services.engine.model.shard import Shard

__all__ = ["WeightReader"]

WeightAndBias: TypeAlias = tuple[Weight, Tensor | None]
"""A weight [outputs, inputs] and its bias [outputs]"""


class WeightReader:
    """Reader of one checkpoint, a layer at a time from the mapped files."""

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
        """adapters: those that may change the layers' products; None = no adapter can."""
        self._checkpoint = checkpoint
        self._spec = spec
        self._shard = shard
        self._adapters = adapters
        self._root = ""
        self._dtype = dtype
        self._device = device
        self._operators = operators
        self._bar = bar
        self._step_bytes = 0

    def read(self, manifest: Manifest) -> DecoderWeights:
        self._root = manifest.root
        layers = tuple(
            self._layer(layer, rotary)
            for layer, rotary in zip(manifest.layers, self._spec.rotaries, strict=True)
        )
        positions = None if manifest.positions is None else self._table(manifest.positions)
        head = self._shard.outputs(self._head(manifest))
        head_bias = self._with_norm_bias(head, None, manifest.final_norm)
        output = self._projection([head], head_bias, self._operators.for_logits())
        sinks = tuple(self._sinks(layer.sinks) for layer in manifest.layers if layer.sinks)
        return DecoderWeights(
            embedding=self._embedding(manifest.embedding),
            positions=positions,
            layers=layers,
            final_norm=self._norm_weight(self._tensor(manifest.final_norm.weight)),
            output=self._shard.gathered(output, self._operators),
            sinks=sinks or None,
            device=self._device,
            step_bytes=self._step_bytes,
        )

    def _head(self, manifest: Manifest) -> Weight:
        if manifest.head is not None:
            return self._weight(manifest.head, manifest.final_norm)
        quantized = self._quantized(manifest.embedding, manifest.final_norm)
        return self._checkpoint.tensor(manifest.embedding) if quantized is None else quantized

    def _layer(self, layer: StoredLayer, rotary: RotarySpec | None) -> DecoderLayer:
        qkv, query_norm, key_norm = self._qkv(layer, rotary), *self._head_norms(layer, rotary)
        if self._spec.family.qk_norm is QkNorm.ALL_HEADS:
            epsilon = self._spec.norm_epsilon
            qkv, query_norm, key_norm = self._shard.normed_heads(
                qkv, query_norm, key_norm, epsilon, self._operators
            )
        return DecoderLayer(
            attention_norm=self._norm(layer.attention_norm),
            qkv=qkv,
            query_norm=query_norm,
            key_norm=key_norm,
            output=self._residual_projection(layer.output, layer.attention_post_norm),
            feed_forward_norm=self._norm(layer.feed_forward_norm),
            feed_forward=self._feed_forward(layer),
        )

    def _qkv(self, layer: StoredLayer, rotary: RotarySpec | None) -> Projection:
        spec, shard = self._spec, self._shard
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        parts = self._linear(layer.qkv, layer.attention_norm)
        widths = [count * spec.head_dim for count in heads]
        queries, *others = _split(parts, widths)
        keys = shard.of_heads(spec.num_kv_heads)
        local = [_rows(queries, shard), *(_rows(part, keys) for part in others)]
        rotated = local[0][0].shape[0] + local[1][0].shape[0]
        order = torch.arange(sum(weight.shape[0] for weight, _ in local))
        order[:rotated] = self._to_half_split(order[:rotated], rotary)
        weights = _in_order([weight for weight, _ in local], order)
        biases = [bias for _, bias in local if bias is not None]
        bias = torch.cat(biases)[order] if biases else None
        product = self._projection(weights, bias, self._operators_of(layer.qkv))
        stored = torch.arange(sum(widths)).split_with_sizes(widths)
        shards = (shard, keys, keys)
        mine = torch.cat([part.rows(each) for part, each in zip(shards, stored, strict=True)])
        return self._adapted(product, self._site(layer.qkv, layer.attention_norm, mine[order]))

    def _feed_forward(self, layer: StoredLayer) -> FeedForward:
        spec, content = self._spec, layer.feed_forward
        norm, post_norm = layer.feed_forward_norm, layer.feed_forward_post_norm
        if isinstance(content, StoredFeedForward):
            gate = self._gate(self._linear(content.gate, norm), self._operators_of(content.gate))
            if self._adapters is not None:
                products = 2 if spec.activation.gated else 1
                order = self._order_of_gate(spec.intermediate_size, products)
                gate.adapt(self._adapters.delta(self._site(content.gate, norm, order)))
            return Dense(gate, self._residual_projection(content.down, post_norm))
        assert spec.experts is not None
        if isinstance(content.experts, StackedExperts):
            operators, experts = self._operators, self._stacked_experts(content.experts)
        else:
            parts = ((expert.gate, expert.down) for expert in content.experts)
            operators = self._operators_of(*chain.from_iterable(parts))
            experts = (
                self._expert(
                    self._linear(expert.gate, norm, of_expert=True),
                    *self._partial(expert.down, of_expert=True),
                )
                for expert in content.experts
            )
        mixture = operators.mixture(
            experts, spec.experts.count, spec.experts.per_token, spec.activation
        )
        if self._adapters is not None:
            mixture.adapt(self._adapters.experts(self._expert_sites(content, norm)))
        ((weight, bias),) = self._linear(content.router, norm)
        router = self._operators.exact_projection(decoded(weight), bias)
        self._step_bytes += mixture.weight_bytes + router.weight_bytes
        router = self._adapted(router, self._router_site(content, norm))
        layer_experts = Experts(
            router=router,
            mixture=mixture,
            count=spec.experts.count,
            per_token=spec.experts.per_token,
            normalized=spec.experts.normalized,
            operators=self._operators,
        )
        return self._shard.summed_experts(layer_experts)

    def _stacked_experts(self, content: StackedExperts) -> Iterator[ExpertWeights]:
        gates, gate_biases = self._stack(content.gate), self._tensor(content.gate_bias)
        downs, down_biases = self._stack(content.down), self._tensor(content.down_bias)
        for gate, gate_bias, down, down_bias in zip(
            gates, gate_biases, downs, down_biases, strict=True
        ):
            yield ExpertWeights(
                gate=self._shard.outputs(_every_second(gate, 0)),
                up=self._shard.outputs(_every_second(gate, 1)),
                down=self._shard.columns(down),
                gate_bias=self._shard.rows(gate_bias[0::2]),
                up_bias=self._shard.rows(gate_bias[1::2]),
                down_bias=self._shard.first_rank_only(down_bias),
            )

    def _stack(self, content: tuple[StoredTensor, ...]) -> Iterator[Tensor | Mxfp4Weight]:
        """Yield each expert's weight as [outputs, inputs]."""
        if content[0].dtype is None:
            yield from self._tensor(content[0]).transpose(1, 2)
        else:
            blocks, scales = map(self._tensor, content)
            yield from map(Mxfp4Weight, blocks, scales)

    def _expert(
        self, parts: list[WeightAndBias], down: Weight, down_bias: Tensor | None
    ) -> ExpertWeights:
        (gate, gate_bias), (up, up_bias) = self._gate_parts(parts, 2)
        if type(gate) is not type(up):
            gate, up = decoded(gate), decoded(up)
        return ExpertWeights(gate, up, down, gate_bias, up_bias, down_bias)

    def _gate(self, parts: list[WeightAndBias], operators: Operators) -> Gate:
        """Make a gate of one product or two, which may be stored as one."""
        activation = self._spec.activation
        (gate, gate_bias), *second = self._gate_parts(parts, 2 if activation.gated else 1)
        up, up_bias = second[0] if second else (None, None)
        if isinstance(gate, QuantizedWeight) and isinstance(up, QuantizedWeight | None):
            made = operators.grouped_gate(gate, up, gate_bias, up_bias, activation)
        else:
            factor = None if up is None else decoded(up)
            made = operators.gate(decoded(gate), factor, gate_bias, up_bias, activation)
        self._step_bytes += made.weight_bytes
        return made

    def _gate_parts(self, parts: list[WeightAndBias], products: int) -> list[WeightAndBias]:
        """Return this rank's rows of each product."""
        outputs = sum(weight.shape[0] for weight, _ in parts) // products
        return [_rows(part, self._shard) for part in _split(parts, [outputs] * products)]

    def _residual_projection(
        self, linear: StoredLinear, post_norm: StoredNorm | None
    ) -> Projection:
        """Make a projection whose output, summed over the ranks, is added to the residual."""
        projection = self._shard.summed(self._partial_projection(linear), self._operators)
        if post_norm is None:
            return projection
        norm = self._norm_weight(self._tensor(post_norm.weight))
        return NormedProjection(projection, norm, self._spec.norm_epsilon, self._operators)

    def _partial_projection(self, linear: StoredLinear) -> Projection:
        """Make this rank's summand of a projection that is added to the residual."""
        weight, bias = self._partial(linear)
        product = self._projection([weight], bias, self._operators_of(linear))
        return self._adapted(product, self._residual_site(linear))

    def _adapted(self, product: Projection, site: Site) -> Projection:
        if self._adapters is None:
            return product
        return AdaptedProjection(product, self._adapters.delta(site))

    def _site(
        self,
        linear: StoredLinear,
        norm: StoredNorm | None = None,
        order: Tensor | None = None,
        fold: Callable[[Tensor], Tensor] | None = None,
    ) -> Site:
        """Describe a product for adapters. norm: what it reads; order: of its outputs."""
        place = int(self._spec.family.transposed)
        modules = [
            SiteModule(
                weight.name.removeprefix(self._root).removesuffix(".weight"), weight.shape[place]
            )
            for weight in linear.weights
        ]
        bias = None
        if norm is not None and norm.bias is not None:
            bias = self._checkpoint.tensor(norm.bias).float()
        inputs = linear.weights[0].shape[1 - place]
        return Site(tuple(modules), inputs, order, norm_bias=bias, fold=fold)

    def _residual_site(self, linear: StoredLinear) -> Site:
        site = self._site(linear, fold=self._fold_residual)
        return replace(site, columns=self._columns_of(site.inputs))

    def _columns_of(self, inputs: int) -> slice | None:
        """Return this rank's part of the inputs of a product that is summed over the ranks."""
        if self._shard.count == 1:
            return None
        width = inputs // self._shard.count
        return slice(self._shard.number * width, (self._shard.number + 1) * width)

    def _order_of_gate(
        self, width: int, products: int, *, alternates: bool = False
    ) -> Tensor | None:
        """Return the stored outputs that this rank has; None = all, in their order.

        alternates: outputs of gate and up do.
        """
        if self._shard.count == 1 and not alternates:
            return None
        stored = torch.arange(products * width)
        parts = stored.view(width, products).T if alternates else stored.view(products, width)
        return torch.cat([self._shard.rows(part) for part in parts])

    def _router_site(self, content: StoredExperts, norm: StoredNorm | None) -> Site:
        assert self._spec.family.names.experts is not None
        name = f"{content.prefix}{self._spec.family.names.experts.router_module}"
        site = self._site(content.router, norm)
        (module,) = site.modules
        return replace(site, modules=(replace(module, alias=name.removeprefix(self._root)),))

    def _expert_sites(
        self, content: StoredExperts, norm: StoredNorm | None
    ) -> Iterator[tuple[Site, Site]]:
        """Describe gate and down of each expert for adapters."""
        spec, fold = self._spec, self._fold_residual
        assert spec.experts is not None
        assert spec.family.names.experts is not None
        count, width, hidden = spec.experts.count, spec.experts.width, spec.hidden_size
        module = f"{content.prefix}{spec.family.names.experts.module}.experts"
        module = module.removeprefix(self._root)
        alternates = isinstance(content.experts, StackedExperts)
        order = self._order_of_gate(width, 2, alternates=alternates)
        for number in range(count):
            if isinstance(content.experts, StackedExperts):
                gate = Site((), hidden, order)
                down = Site((), width, columns=self._columns_of(width), fold=fold)
            else:
                stored = content.experts[number]
                gate = self._site(stored.gate, norm, order)
                down = self._residual_site(stored.down)
            both = StackedPart(f"{module}.gate_up_proj", 2 * width, number, count)
            outputs = StackedPart(f"{module}.down_proj", hidden, number, count)
            yield replace(gate, stacked=both), replace(down, stacked=outputs)

    def _partial(self, linear: StoredLinear, *, of_expert: bool = False) -> WeightAndBias:
        """Read this rank's summand of a layer whose output is added to the residual."""
        ((weight, bias),) = self._linear(linear, None, of_expert=of_expert)
        bias = self._shard.first_rank_only(bias)
        part, scale = self._shard.columns(weight), self._spec.residual_scale
        if isinstance(part, QuantizedWeight):
            part = part.times(scale)
        elif isinstance(part, Tensor) or scale != 1:
            part = self._fold_residual(decoded(part))
        return part, None if bias is None else self._fold_residual(bias)

    def _fold_residual(self, outputs: Tensor) -> Tensor:
        """Fold the LayerNorm's mean and the residual scale into what is added to the residual."""
        if self._spec.family.layer_norm:
            outputs = _without_mean(outputs, 0)
        scale = self._spec.residual_scale
        return outputs if scale == 1 else outputs.float() * scale

    def _projection(
        self, weights: Sequence[Weight], bias: Tensor | None, operators: Operators
    ) -> Projection:
        """Make a projection of the outputs of all weights."""
        quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
        if len(quantized) == len(weights):
            projection = operators.grouped_projection(quantized, bias)
        else:
            projection = operators.projection(_whole(weights), bias)
        self._step_bytes += projection.weight_bytes
        return projection

    def _operators_of(self, *linears: StoredLinear) -> Operators:
        """Return the operators for layers that are multiplied at once."""
        weights = (weight for linear in linears for weight in linear.weights)
        if any(map(self._checkpoint.leaves_unquantized, weights)):
            return self._operators.without_fp8()
        return self._operators

    def _linear(
        self, linear: StoredLinear, norm: StoredNorm | None, *, of_expert: bool = False
    ) -> list[WeightAndBias]:
        """Read weights [outputs, inputs] and biases, with the bias of `norm` folded in."""
        weights = [self._weight(weight, norm, of_expert=of_expert) for weight in linear.weights]
        biases = map(self._tensor, linear.biases)
        return [
            (weight, self._with_norm_bias(weight, next(biases, None), norm)) for weight in weights
        ]

    def _weight(
        self, stored: StoredTensor, norm: StoredNorm | None, *, of_expert: bool = False
    ) -> Weight:
        """Read a weight [outputs, inputs] of a layer that reads `norm`."""
        quantized = self._quantized(stored, norm, of_expert=of_expert)
        if quantized is not None:
            self._bar.add(self._checkpoint.num_bytes(stored))
            return quantized
        weight = self._tensor(stored)
        return weight.T if self._spec.family.transposed else weight

    def _quantized(
        self, stored: StoredTensor, norm: StoredNorm | None, *, of_expert: bool = False
    ) -> QuantizedWeight | Mxfp4Weight | None:
        """Return the codes of a weight; None if it has none, or nothing may be folded into them."""
        family = self._spec.family
        if family.layer_norm or family.transposed or (norm is not None and norm.bias):
            return None
        if of_expert and self._operators.groups_experts:
            return self._checkpoint.mxfp4(stored, self._device)
        return self._checkpoint.quantized(stored) if self._operators.keeps_groups else None

    def _with_norm_bias(
        self, weight: Weight, bias: Tensor | None, norm: StoredNorm | None
    ) -> Tensor | None:
        if norm is None or norm.bias is None:
            return bias
        folded = decoded(weight).float() @ self._checkpoint.tensor(norm.bias).float()
        return folded if bias is None else folded + bias

    def _embedding(self, table: StoredTensor) -> Embedding:
        reads_rows = self._operators.keeps_groups and not self._spec.family.layer_norm
        if reads_rows and (rows := self._checkpoint.rows(table)) is not None:
            self._bar.add(self._checkpoint.num_bytes(table))
            return StoredEmbedding(rows)
        return TensorEmbedding(self._table(table))

    def _table(self, table: StoredTensor) -> Tensor:
        weight = self._tensor(table)
        if self._spec.family.layer_norm:
            weight = _without_mean(weight, 1)
        # If file and model share the dtype, this stays a view of the mapped file: a step reads few
        # rows, and the operating system may drop the pages.
        return weight.to(self._device, self._dtype)

    def _norm(self, norm: StoredNorm | None) -> Tensor | None:
        return None if norm is None else self._norm_weight(self._tensor(norm.weight))

    def _head_norms(
        self, layer: StoredLayer, rotary: RotarySpec | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Read the norms of queries and of keys."""
        queries = keys = Shard()
        if self._spec.family.qk_norm is QkNorm.ALL_HEADS:
            queries, keys = self._shard, self._shard.of_heads(self._spec.num_kv_heads)

        def read(norm: StoredTensor | None, shard: Shard) -> Tensor | None:
            if norm is None:
                return None
            return self._norm_weight(shard.rows(self._to_half_split(self._tensor(norm), rotary)))

        return read(layer.query_norm, queries), read(layer.key_norm, keys)

    def _sinks(self, sinks: StoredTensor) -> Tensor:
        return self._shard.rows(self._tensor(sinks)).to(self._device, torch.float32, copy=True)

    def _norm_weight(self, norm: Tensor) -> Tensor:
        """Copy a norm's weight out of the file."""
        self._step_bytes += norm.numel() * self._dtype.itemsize
        weight = norm.float() + 1 if self._spec.family.norm_offset else norm
        return weight.to(self._device, self._dtype, copy=True)

    def _to_half_split(self, rows: Tensor, rotary: RotarySpec | None) -> Tensor:
        """Reorder each head's rows so that the two of a RoPE pair lie half a head apart."""
        size = self._spec.head_dim
        if self._spec.family.interleaved_rotary:
            pairs = rows.reshape(-1, size // 2, 2, *rows.shape[1:])
            return pairs.transpose(1, 2).reshape(rows.shape)
        if rotary is None or rotary.width == size:
            return rows
        half, fixed = rotary.width // 2, (size - rotary.width) // 2
        first, second, *rest = torch.tensor_split(
            torch.arange(size), (half, 2 * half, size - fixed)
        )
        order = torch.cat((first, rest[0], second, rest[1]))
        return rows.reshape(-1, size, *rows.shape[1:])[:, order].reshape(rows.shape)

    def _tensor(self, stored: StoredTensor) -> Tensor:
        tensor = self._checkpoint.tensor(stored)
        self._bar.add(self._checkpoint.num_bytes(stored))
        return tensor


def _split(parts: list[WeightAndBias], outputs: Sequence[int]) -> list[WeightAndBias]:
    """Split into a weight and a bias for each of `outputs`, unless stored so."""
    if len(parts) == len(outputs):
        return parts
    ((weight, bias),) = parts
    biases = [None] * len(outputs) if bias is None else bias.split_with_sizes(outputs)
    return list(zip(split(weight, outputs), biases, strict=True))


def _every_second(weight: Tensor | Mxfp4Weight, first: int) -> Weight:
    """View every second output."""
    outputs = slice(first, None, 2)
    return weight[outputs] if isinstance(weight, Tensor) else weight.rows(outputs)


def _rows(part: WeightAndBias, shard: Shard) -> WeightAndBias:
    weight, bias = part
    return shard.outputs(weight), None if bias is None else shard.rows(bias)


def _without_mean(weight: Tensor, dim: int) -> Tensor:
    exact = weight.float()
    return exact - exact.mean(dim, keepdim=True)


def _whole(weights: Sequence[Weight]) -> Tensor:
    """Return the outputs of all weights as one."""
    tensors = [decoded(weight) for weight in weights]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _in_order(weights: Sequence[Weight], order: Tensor) -> Sequence[Weight]:
    """Return weights whose outputs are those of `weights` in an order within each of them."""
    if not all(isinstance(weight, QuantizedWeight) for weight in weights):
        return [_whole(weights)[order]]
    ordered, first = [], 0
    for weight in weights:
        index = order[first : first + weight.shape[0]] - first
        is_same = torch.equal(index, torch.arange(len(index)))
        ordered.append(weight if is_same or isinstance(weight, Tensor) else weight.rows(index))
        first += len(index)
    return ordered
