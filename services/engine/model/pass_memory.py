"""Memory that a pass on a CPU takes beside a decoder's buffers."""

import torch

from services.engine.model.architecture.layers import (
    BesideSpec,
    DenseSpec,
    ExpertsSpec,
    FeedForwardSpec,
)
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.hyper_connections import HYPER_ROWS
from services.engine.model.mixers.block_attention import block_numbers
from services.engine.model.mixers.compressed_attention import compressed_numbers
from services.engine.model.mixers.latent_pages import latent_numbers
from services.engine.model.mixers.relative_attention import relative_numbers

__all__ = ["pass_bytes"]

_SUMS = 3
"""Rows of float32 that a loop over experts holds: a sum, a scaled output, and the new sum"""
_FLOAT = 4
"""Bytes of a number of float32"""
_STREAMS = 4
"""Tensors of a row's streams: old ones, their squares, mixed ones, and the new ones"""
_TEMPORARIES = 4
"""Rows of the model's dtype that layers around experts hold: normed, scaled, and their sums"""


def pass_bytes(spec: ModelSpec, dtype: torch.dtype, tokens: int, rows: int, context: int) -> int:
    """Return the most memory that a pass takes for experts, streams, shared blocks, and attention
    that is latent, compressed, to chosen blocks, or with addends by distance.

    spec: this rank's part; rows: most sequences of the pass; context: length of the longest.
    """
    latents = (
        latent_numbers(layer, tokens, min(rows, tokens), context) * dtype.itemsize
        for layer in set(spec.latent_layers.values())
    )
    compressed = (
        compressed_numbers(layer, tokens, context) * _FLOAT
        for layer in set(spec.compressed_layers.values())
    )
    chosen = (
        block_numbers(layer, tokens, context) * _FLOAT
        for layer in set(spec.indexed_layers.values())
    )
    relative = (
        relative_numbers(layer, tokens, context) * _FLOAT
        for layer in set(spec.relative_layers.values())
    )
    mixtures = (
        _experts_bytes(experts, tokens, spec.hidden_size, dtype.itemsize)
        for experts in {_experts_of(layer.content) for layer in spec.layers}
        if experts is not None
    )
    blocks = _shared_blocks_bytes(spec, tokens, dtype.itemsize)
    parts = (*latents, *compressed, *chosen, *relative, _streams_bytes(spec, tokens), blocks)
    return max(parts) + max(mixtures, default=0)


def _shared_blocks_bytes(spec: ModelSpec, tokens: int, itemsize: int) -> int:
    """Return the bytes of shared blocks: gate and up, their activation, input and outputs.

    The same width is added for attention's temporaries.
    """
    inner = [
        layer.feed_forward.width
        for layer in spec.layers
        if layer.shared_block is not None and isinstance(layer.feed_forward, DenseSpec)
    ]
    return tokens * (5 * max(inner) + 4 * spec.hidden_size) * itemsize if inner else 0


def _streams_bytes(spec: ModelSpec, tokens: int) -> int:
    """Return the bytes of hyper-connections: streams of some rows, old and new."""
    if spec.layers[0].hyper is None:
        return 0
    rows = min(tokens, HYPER_ROWS)
    return _STREAMS * rows * spec.num_streams * spec.hidden_size * _FLOAT


def _experts_of(layer: FeedForwardSpec) -> ExpertsSpec | None:
    if isinstance(layer, BesideSpec):
        return layer.experts
    return layer if isinstance(layer, ExpertsSpec) else None


def _experts_bytes(experts: ExpertsSpec, tokens: int, hidden_size: int, itemsize: int) -> int:
    """Return the bytes of all experts' inner rows, outputs, and inputs.

    Kernels compute the shared expert with the others. Each thread copies the rows of the expert
    that it computes, which may be all rows.
    """
    inner = experts.routing.per_token * experts.width
    outputs = experts.routing.per_token
    if experts.shared is not None:
        inner += experts.shared.width
        outputs += 1
    copies = outputs + torch.get_num_threads() + _TEMPORARIES
    numbers = inner + copies * hidden_size
    return tokens * (numbers * itemsize + _SUMS * 4 * hidden_size)
