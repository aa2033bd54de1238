"""Loading of the addends to the scores of two tokens of an encoder."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from services.engine.model.architecture.distance import alibi_slopes, distance_buckets
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention.pair_scores import (
    AlibiScores,
    DisentangledScores,
    DistanceKeys,
    DistanceScores,
    PairScores,
)
from services.engine.model.checkpoint.tensors import StoredTensor
from services.engine.model.encoder_manifest import EncoderManifest, StoredDistances
from services.engine.model.parts.stored import StoredLinear

__all__ = ["read_pair_scores"]


def read_pair_scores(
    spec: ModelSpec,
    manifest: EncoderManifest,
    read: Callable[[StoredTensor], Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> PairScores | None:
    """Return the addends of a model's scores; None if it has none. read: reads a tensor."""
    assert spec.family.encoder is not None
    if (attention := spec.attention(0)).alibi_bias:
        return AlibiScores(alibi_slopes(attention.num_heads, attention.alibi_bias).to(device))
    if manifest.bias is not None:
        return _by_bucket(spec, read(manifest.bias).to(device, dtype))
    if manifest.distances is not None:
        return _by_content(spec, manifest.distances, read, device, dtype)
    return None


def _by_bucket(spec: ModelSpec, table: Tensor) -> DistanceScores:
    most = spec.context_length - 1
    distances = torch.arange(-most, most + 1, device=table.device)
    return DistanceScores(table[distance_buckets(distances)].T.contiguous())


def _by_content(
    spec: ModelSpec,
    stored: StoredDistances,
    read: Callable[[StoredTensor], Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> DisentangledScores:
    shape, attention = spec.disentangled, spec.attention(0)
    assert shape is not None
    table = read(stored.table).float()
    if stored.norm is not None:
        weight = read(stored.norm.weight).float()
        bias = None if stored.norm.bias is None else read(stored.norm.bias).float()
        table = layer_norm(table, table.shape[1:], weight, bias, spec.norm_epsilon)

    def project(layer: StoredLinear | None) -> Tensor | None:
        if layer is None:
            return None
        [weight], [bias] = layer.weights, layer.biases
        rows = linear(table, read(weight).float(), read(bias).float())
        heads = rows.view(-1, attention.num_heads, attention.head_dim).transpose(0, 1)
        return heads.to(device, dtype).contiguous()

    pairs = zip(stored.keys, stored.queries, strict=True)
    return DisentangledScores(
        shape, [DistanceKeys(project(keys), project(queries)) for keys, queries in pairs]
    )
