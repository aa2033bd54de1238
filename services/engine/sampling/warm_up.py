"""Warm-up draws before the first request."""

from dataclasses import replace

import torch

from services.engine.checked_request import SamplingSettings
from services.engine.sampling.pending_tokens import PendingTokens
from services.engine.sampling.row import Row

__all__ = ["warm_up"]

_PLAIN = SamplingSettings(1.0, 1.0, 0, 0.0, 0)
_KINDS = (_PLAIN, replace(_PLAIN, temperature=0.0), replace(_PLAIN, top_p=0.9))


def warm_up(vocabulary: int, device: torch.device) -> None:
    """Draw in every way that has a kernel, so that all are compiled or loaded.

    A second row of logits may have another alignment than the first, and so need another kernel.
    """
    for logits in torch.zeros((2, 1, vocabulary), device=device):
        for kind in _KINDS:
            for mask in (None, b"\1"):
                PendingTokens(logits, [Row(kind, 0, 0, mask=mask)], [0]).wait()
