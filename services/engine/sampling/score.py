"""What the model itself thinks of tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from services.engine.messages import Score

__all__ = ["score"]


def score(logits: Tensor, ids: Sequence[int], width: int) -> list[Score]:
    """Score one id per row, and report the `width` most likely ids.

    logits: float32 [rows, vocabulary]. Logprobs are the log-softmax of these logits.
    """
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    index = torch.tensor(ids, dtype=torch.int64, device=logits.device).unsqueeze(1)
    chosen = logits.gather(1, index)
    ranks = (logits > chosen).sum(dim=-1).tolist()
    logprobs = (chosen - normaliser).squeeze(1).tolist()
    if width == 0:
        return [Score(p, r + 1, (), ()) for p, r in zip(logprobs, ranks, strict=True)]
    top = logits.topk(width, dim=-1)
    top_ids, top_logprobs = top.indices.tolist(), (top.values - normaliser).tolist()
    columns = zip(logprobs, ranks, top_ids, top_logprobs, strict=True)
    return [Score(p, rank + 1, some, theirs) for p, rank, some, theirs in columns]
