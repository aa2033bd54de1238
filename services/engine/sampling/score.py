"""Log-probabilities, ranks and top candidates of tokens under the model's own logits."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.engine.kernels.library import ScoreCall, native
from services.engine.messages import Score

__all__ = ["score"]


def score(logits: Tensor, ids: Sequence[int], width: int) -> list[Score]:
    """Score one id per row, with the row's `width` most likely ids, or the whole vocabulary.

    logits: float32 [rows, vocabulary]. Logprobs are the log-softmax of these logits. On a CPU a
    native kernel computes them.
    """
    width = min(width, logits.shape[1])
    if native is not None and logits.device.type == "cpu":
        return _score_by_kernel(logits, ids, width)
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
    return [Score(p, rank + 1, best, best_logprobs) for p, rank, best, best_logprobs in columns]


def _score_by_kernel(logits: Tensor, ids: Sequence[int], width: int) -> list[Score]:
    assert native is not None
    top_ids = np.empty((len(ids), width), dtype=np.int64)
    top_logprobs = np.empty((len(ids), width), dtype=np.float32)
    first, stride = logits.data_ptr(), logits.stride(0) * logits.element_size()
    calls = (ScoreCall * len(ids))()
    for i, (call, token) in enumerate(zip(calls, ids, strict=True)):
        call.logits, call.id = first + i * stride, token
        call.top_ids = top_ids.ctypes.data + i * width * top_ids.itemsize
        call.top_logprobs = top_logprobs.ctypes.data + i * width * top_logprobs.itemsize
    native.score_tokens(calls, len(ids), logits.shape[1], width)
    columns = zip(calls, top_ids.tolist(), top_logprobs.tolist(), strict=True)
    return [Score(call.logprob, call.rank, best, logprobs) for call, best, logprobs in columns]
