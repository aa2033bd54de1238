"""First draws on a GPU, before the first request."""

from dataclasses import replace

import torch

from services.engine.messages import SamplingSettings
from services.engine.sampling.pending_tokens import PendingTokens
from services.engine.sampling.row import Row

__all__ = ["warm_up"]

_PLAIN = SamplingSettings(1.0, 1.0, 0, 0.0, 0)
_KINDS = (_PLAIN, replace(_PLAIN, temperature=0.0), replace(_PLAIN, top_p=0.9))


def warm_up(vocabulary: int, device: torch.device) -> None:
    """Draw in every way that has a kernel, masked and unmasked, so that all are compiled."""
    logits = torch.zeros((2 * len(_KINDS), vocabulary), device=device)
    rows = [Row(kind, 0, 0, mask=mask) for kind in _KINDS for mask in (None, b"\1")]
    PendingTokens(logits, rows, [0] * len(rows)).wait()
