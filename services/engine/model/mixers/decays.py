"""Products of tokens' vectors that decay with the distance of the tokens."""

import torch
from torch import Tensor

__all__ = ["decayed_products"]


def decayed_products(left: Tensor, right: Tensor, sums: Tensor) -> Tensor:
    """Return the products of each token in `left` with those up to it in `right`, decayed.

    left, right: [..., tokens, width]; sums: [..., tokens, 1 or width], running sums of the decays'
    logarithms. Returns [..., tokens, tokens].
    """
    tokens = left.shape[-2]
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=left.device).triu(1)
    between = sums[..., :, None, :] - sums[..., None, :, :]
    decay = between.masked_fill(later[..., None], float("-inf")).exp()
    if decay.shape[-1] == 1:
        return left @ right.transpose(-1, -2) * decay.squeeze(-1)
    return torch.einsum("...ik,...jk,...ijk->...ij", left, right, decay)
