"""Memory that a pass on a CPU takes beside a decoder's buffers."""

import torch

from services.engine.model.architecture.layers import BesideSpec, ExpertsSpec, FeedForwardSpec
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.mixers.latent_pages import latent_numbers

__all__ = ["pass_bytes"]

_SUMS = 3
"""Rows of float32 that a loop over experts holds: a sum, an output times its factor, and both"""
_TEMPORARIES = 4
"""Rows of the model's dtype that layers around experts hold: normed, scaled, and their sums"""


def pass_bytes(spec: ModelSpec, dtype: torch.dtype, tokens: int, rows: int, context: int) -> int:
    """Return the most memory that a pass takes for experts and latent attention.

    spec: this rank's part; rows: sequences of the pass, at most; context: tokens of the longest.
    """
    latents = (
        latent_numbers(layer, tokens, min(rows, tokens), context) * dtype.itemsize
        for layer in set(spec.latent_layers.values())
    )
    mixtures = (
        _experts_bytes(experts, tokens, spec.hidden_size, dtype.itemsize)
        for experts in {_experts_of(layer.feed_forward) for layer in spec.layers}
        if experts is not None
    )
    return max(latents, default=0) + max(mixtures, default=0)


def _experts_of(layer: FeedForwardSpec) -> ExpertsSpec | None:
    if isinstance(layer, BesideSpec):
        return layer.experts
    return layer if isinstance(layer, ExpertsSpec) else None


def _experts_bytes(experts: ExpertsSpec, tokens: int, hidden_size: int, itemsize: int) -> int:
    """Return the bytes of all experts' inner rows and outputs, and of the rows that they read.

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
