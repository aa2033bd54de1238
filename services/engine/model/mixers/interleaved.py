"""RoPE of pairs that lie side by side, at the end of each head."""

import torch
from torch import Tensor

from services.engine.model.operators.rotation import Rotation

__all__ = ["rotate"]


def rotate(heads: Tensor, rotation: Rotation, *, backwards: bool = False) -> None:
    """Rotate the last numbers of heads [n, heads, head_dim] in place, as many as rotate."""
    width = 2 * rotation.cosines.shape[1]
    rotating = heads[..., -width:]
    first, second = rotating.float().view(*rotating.shape[:2], -1, 2).unbind(3)
    cosines, sines = rotation.cosines[:, None], rotation.sines[:, None]
    if backwards:
        sines = -sines
    turned = (first * cosines - second * sines, second * cosines + first * sines)
    rotating.copy_(torch.stack(turned, dim=3).flatten(2))
