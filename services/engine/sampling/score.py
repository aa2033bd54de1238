"""Log-probabilities, ranks and top candidates of tokens under the model's own logits."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.engine.batch.transfer import HostCopy, to_device
from services.engine.kernels.library import native
from services.engine.kernels.structures import ScoreCall
from services.engine.messages import Score

__all__ = ["PendingScores", "score"]


def score(logits: Tensor, ids: Sequence[int], width: int) -> list[Score]:
    """Score one id per row, with the row's `width` most likely ids, at most all.

    logits: float32 [rows, vocabulary]. Logprobs are the log-softmax of these logits. On a CPU a
    native kernel computes them.
    """
    width = min(width, logits.shape[1])
    if native is not None and logits.device.type == "cpu":
        return _score_by_kernel(logits, ids, width)
    index = to_device(torch.tensor(ids, dtype=torch.int64), logits.device)
    return PendingScores(logits, index, width).wait()


class PendingScores:
    """Scores that the device computes, from logits that may change after the launch."""

    def __init__(self, logits: Tensor, ids: Tensor, width: int) -> None:
        """logits: float32 [rows, vocabulary]; ids: int64 [rows]; width: parameter of `score`."""
        self._width = min(width, logits.shape[1])
        self._scores: list[Score] | None = None
        if native is not None and logits.device.type == "cpu":
            self._scores = _score_by_kernel(logits, ids.tolist(), self._width)
        else:
            self._columns = HostCopy(_columns(logits, ids, self._width))

    def wait(self) -> list[Score]:
        """Wait for the device, and return a score for each row."""
        if self._scores is None:
            self._scores = _read(self._columns.wait(), self._width)
        return self._scores


def _columns(logits: Tensor, ids: Tensor, width: int) -> Tensor:
    """Return rank, logprob, and the ids and logprobs of the candidates: int32 [rows, columns].

    One tensor takes one copy to the host: the logprobs are the bits of float32.
    """
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, ids.unsqueeze(1))
    ranks = (logits > chosen).sum(dim=-1, keepdim=True, dtype=torch.int32)
    top = logits.topk(width, dim=-1)
    logprobs = (torch.cat((chosen, top.values), dim=1) - normaliser).view(torch.int32)
    return torch.cat((ranks, top.indices.int(), logprobs), dim=1)


def _read(columns: Tensor, width: int) -> list[Score]:
    ranks, ids = columns[:, 0].tolist(), columns[:, 1 : width + 1].tolist()
    logprobs = columns[:, width + 1 :].contiguous().view(torch.float32).tolist()
    return [
        Score(own, rank + 1, best, best_logprobs)
        for rank, best, (own, *best_logprobs) in zip(ranks, ids, logprobs, strict=True)
    ]


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
