"""Reads a checkpoint's tensors into what the decoder computes with.

Much that sets families apart ends here, because other weights give the same outputs. With x the
residual, W and b a linear layer that reads the norm of it, V one that adds to it:

- A LayerNorm is the RMSNorm of x less its mean, times a weight, plus a bias. The mean is 0 when
  every V, and the embedding, adds nothing to it; W times the norm's bias becomes part of b.
- A factor on what is added to x becomes part of V.
- Heads that rotate a part of their dimensions rotate all, some by nothing: the dimensions of W are
  put in the order in which those that turn together lie half a head apart.

Of what is cut for tensor parallelism it takes this rank's shard, once the parts of a weight are
apart.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from services.engine.model import layout as stored
from services.engine.model.architecture.rotary import RotarySpec
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.checkpoint.families import QkNorm
from services.engine.model.checkpoint.mxfp4 import decode
from services.engine.model.checkpoint.progress import LoadProgress
from services.engine.model.checkpoint.tensors import Checkpoint, Stored
from services.engine.model.decoder import DecoderLayer, DecoderWeights
from services.engine.model.feed_forward import Dense, Experts, FeedForward
from services.engine.model.layout import Layout, Linear, Norm
from services.engine.model.operators.interface import Gate, NormedProjection, Operators, Projection
from services.engine.model.shard import WHOLE, Shard

__all__ = ["Reader", "Weights"]

Part: TypeAlias = tuple[Tensor, Tensor | None]
"""A weight [outputs, inputs] and its bias"""


@dataclass(frozen=True, slots=True)
class Weights:
    """What was read: for the decoder, and for its attention."""

    weights: DecoderWeights
    sinks: tuple[Tensor, ...] | None
    """For each layer, float32 [num_heads of the shard]"""


class Reader:
    """Reads one checkpoint, a layer at a time from the mapped files."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        operators: Operators,
        bar: LoadProgress,
        shard: Shard,
    ) -> None:
        self._checkpoint = checkpoint
        self._spec = spec
        self._shard = shard
        self._dtype = dtype
        self._device = device
        self._operators = operators
        self._bar = bar
        self._step_bytes = 0

    def read(self, layout: Layout) -> Weights:
        layers = tuple(
            self._layer(layer, rotary)
            for layer, rotary in zip(layout.layers, self._spec.rotaries, strict=True)
        )
        positions = None if layout.positions is None else self._embedding(layout.positions)
        head = self._checkpoint.tensor(layout.embedding)
        if layout.head is not None:
            head = self._tensor(layout.head)
        head = self._shard.rows(head)
        output = self._projection(head, self._with_norm_bias(head, None, layout.final_norm))
        weights = DecoderWeights(
            embedding=self._embedding(layout.embedding),
            positions=positions,
            layers=layers,
            final_norm=self._small(self._tensor(layout.final_norm.weight)),
            output=self._shard.gathered(output, self._operators),
            num_bytes=self._step_bytes,
        )
        sinks = [self._sinks(layer.sinks) for layer in layout.layers if layer.sinks]
        return Weights(weights, tuple(sinks) or None)

    def _layer(self, layer: stored.Layer, rotary: RotarySpec | None) -> DecoderLayer:
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
            output=self._onto_residual(layer.output, layer.attention_post_norm),
            feed_forward_norm=self._norm(layer.feed_forward_norm),
            feed_forward=self._feed_forward(layer),
        )

    def _qkv(self, layer: stored.Layer, rotary: RotarySpec | None) -> Projection:
        spec, shard = self._spec, self._shard
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        parts = self._linear(layer.qkv, layer.attention_norm)
        queries, *others = _apart(parts, [count * spec.head_dim for count in heads])
        keys = shard.of_heads(spec.num_kv_heads)
        cut = [_rows(queries, shard), *(_rows(part, keys) for part in others)]
        turned = len(cut[0][0]) + len(cut[1][0])

        def joined(parts: list[Tensor]) -> Tensor:
            whole = torch.cat(parts)
            whole[:turned] = self._in_turning_order(whole[:turned], rotary)
            return whole

        biases = [bias for _, bias in cut if bias is not None]
        weight = joined([weight for weight, _ in cut])
        return self._projection(weight, joined(biases) if biases else None)

    def _feed_forward(self, layer: stored.Layer) -> FeedForward:
        spec, content = self._spec, layer.feed_forward
        norm, post_norm = layer.feed_forward_norm, layer.feed_forward_post_norm
        if isinstance(content, stored.FeedForward):
            gate = self._gate(self._linear(content.gate, norm))
            return Dense(gate, self._onto_residual(content.down, post_norm))
        assert spec.experts is not None
        if isinstance(content.experts, stored.StackedExperts):
            experts = tuple(self._stacked_experts(content.experts))
        else:
            experts = tuple(
                Dense(self._gate(self._linear(expert.gate, norm)), self._addition(expert.down))
                for expert in content.experts
            )
        ((weight, bias),) = self._linear(content.router, norm)
        router = self._operators.exact_projection(weight, bias)
        self._step_bytes += router.weight_bytes
        mixture = Experts(
            router=router,
            experts=experts,
            per_token=spec.experts.per_token,
            normalized=spec.experts.normalized,
            width=spec.experts.width // self._shard.count,
            operators=self._operators,
        )
        return self._shard.summed_experts(mixture)

    def _stacked_experts(self, content: stored.StackedExperts) -> Iterator[Dense]:
        gates, gate_biases = self._stack(content.gate), self._tensor(content.gate_bias)
        downs, down_biases = self._stack(content.down), self._tensor(content.down_bias)
        for gate, gate_bias, down, down_bias in zip(
            gates, gate_biases, downs, down_biases, strict=True
        ):
            parts = [(gate[first::2], gate_bias[first::2]) for first in range(2)]
            cut = self._shard.columns(down)
            yield Dense(self._gate(parts), self._projection(cut, self._shard.once(down_bias)))

    def _stack(self, content: tuple[Stored, ...]) -> Iterator[Tensor]:
        """[outputs, inputs] of one expert after another."""
        if not content[0].packed:
            yield from self._tensor(content[0]).transpose(1, 2)
        else:
            blocks, scales = map(self._tensor, content)
            yield from map(decode, blocks, scales)

    def _gate(self, parts: list[Part]) -> Gate:
        """Of one product or two, which may be stored in one."""
        activation = self._spec.activation
        products = 2 if activation.gated else 1
        outputs = sum(len(weight) for weight, _ in parts) // products
        parts = [_rows(part, self._shard) for part in _apart(parts, [outputs] * products)]
        (gate, gate_bias), *second = parts
        up, up_bias = second[0] if second else (None, None)
        made = self._operators.gate(gate, up, gate_bias, up_bias, activation)
        self._step_bytes += made.weight_bytes
        return made

    def _onto_residual(self, linear: Linear, post_norm: Norm | None) -> Projection:
        projection = self._shard.summed(self._addition(linear), self._operators)
        if post_norm is None:
            return projection
        norm = self._small(self._tensor(post_norm.weight))
        return NormedProjection(projection, norm, self._spec.norm_epsilon, self._operators)

    def _addition(self, linear: Linear) -> Projection:
        """What this shard adds to the residual."""
        ((weight, bias),) = self._linear(linear, None)
        bias = self._shard.once(bias)
        added = self._added(self._shard.columns(weight))
        return self._projection(added, None if bias is None else self._added(bias))

    def _added(self, outputs: Tensor) -> Tensor:
        """What adds to the residual, without its mean and scaled, where the family wants that."""
        if self._spec.family.layer_norm:
            outputs = _without_mean(outputs, 0)
        scale = self._spec.residual_scale
        return outputs if scale == 1 else outputs.float() * scale

    def _projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        projection = self._operators.projection(weight, bias)
        self._step_bytes += projection.weight_bytes
        return projection

    def _linear(self, linear: Linear, norm: Norm | None) -> list[Part]:
        """Weights [outputs, inputs] and biases; that of the norm they read is part of them."""
        weights = [self._tensor(weight) for weight in linear.weights]
        if self._spec.family.transposed:
            weights = [weight.T for weight in weights]
        biases = map(self._tensor, linear.biases)
        return [
            (weight, self._with_norm_bias(weight, next(biases, None), norm)) for weight in weights
        ]

    def _with_norm_bias(
        self, weight: Tensor, bias: Tensor | None, norm: Norm | None
    ) -> Tensor | None:
        if norm is None or norm.bias is None:
            return bias
        folded = weight.float() @ self._checkpoint.tensor(norm.bias).float()
        return folded if bias is None else folded + bias

    def _embedding(self, table: Stored) -> Tensor:
        weight = self._tensor(table)
        if self._spec.family.layer_norm:
            weight = _without_mean(weight, 1)
        # While file and model agree on the dtype this stays a view of the mapped file: the rows a
        # step looks up are few, and the pages are the kernel's to drop.
        return weight.to(self._device, self._dtype)

    def _norm(self, norm: Norm | None) -> Tensor | None:
        return None if norm is None else self._small(self._tensor(norm.weight))

    def _head_norms(
        self, layer: stored.Layer, rotary: RotarySpec | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Of queries and of keys."""
        shards = (WHOLE, WHOLE)
        if self._spec.family.qk_norm is QkNorm.ALL_HEADS:
            shards = (self._shard, self._shard.of_heads(self._spec.num_kv_heads))

        def read(norm: Stored | None, shard: Shard) -> Tensor | None:
            if norm is None:
                return None
            return self._small(shard.rows(self._in_turning_order(self._tensor(norm), rotary)))

        return read(layer.query_norm, shards[0]), read(layer.key_norm, shards[1])

    def _sinks(self, sinks: Stored) -> Tensor:
        mine = self._shard.rows(self._tensor(sinks))
        return mine.to(self._device, torch.float32, copy=True)

    def _small(self, norm: Tensor) -> Tensor:
        """A norm's weight, copied out of the file."""
        self._step_bytes += norm.numel() * self._dtype.itemsize
        weight = norm.float() + 1 if self._spec.family.norm_offset else norm
        return weight.to(self._device, self._dtype, copy=True)

    def _in_turning_order(self, rows: Tensor, rotary: RotarySpec | None) -> Tensor:
        """Each head's rows so that the first of two that turn together is half a head before."""
        size = self._spec.head_dim
        if rotary is None or rotary.width == size:
            return rows
        half, still = rotary.width // 2, (size - rotary.width) // 2
        first, second, *rest = torch.tensor_split(
            torch.arange(size), (half, 2 * half, size - still)
        )
        order = torch.cat((first, rest[0], second, rest[1]))
        return rows.reshape(-1, size, *rows.shape[1:])[:, order].reshape(rows.shape)

    def _tensor(self, stored: Stored) -> Tensor:
        tensor = self._checkpoint.tensor(stored)
        self._bar.add(tensor.nbytes)
        return tensor


def _apart(parts: list[Part], outputs: Sequence[int]) -> list[Part]:
    """A weight and a bias for each of `outputs`, which may be stored in one."""
    if len(parts) == len(outputs):
        return parts
    ((weight, bias),) = parts
    biases = [None] * len(outputs) if bias is None else bias.split_with_sizes(outputs)
    return list(zip(weight.split_with_sizes(outputs), biases, strict=True))


def _rows(part: Part, shard: Shard) -> Part:
    weight, bias = part
    return shard.rows(weight), None if bias is None else shard.rows(bias)


def _without_mean(weight: Tensor, dim: int) -> Tensor:
    exact = weight.float()
    return exact - exact.mean(dim, keepdim=True)
