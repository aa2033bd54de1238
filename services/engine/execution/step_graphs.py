"""CUDA graphs of padded steps: one launch instead of about ten per layer."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.model.attention import KVCache
from services.engine.model.model import Model

__all__ = ["StepGraphs", "key_of"]

_WARM_UPS = 2
"""Number of passes before a capture, which compile kernels and allocate libraries' workspaces"""


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    result: Tensor
    held: object
    """References to the memory that the graph reads and writes, which must not be freed"""


class StepGraphs:
    """A graph for each size of padded step, captured before the first request.

    A size of decode steps is a number of rows, a width of the block tables, and whether decodes
    share prefixes; one of steps with chunks is a number of tokens in addition. Steps with adapters
    have graphs of their own. `batch.buckets` keeps the number of sizes low. A capture takes several
    passes, and seconds more where attention compiles a kernel. A step of any other size runs
    without a graph.
    All graphs share one memory pool, as large as the largest graph needs. A graph replays with the
    addresses of its capture, so the memory of batches must be reserved beforehand.
    With several ranks, each has graphs of its own, which contain the sums over all ranks: all ranks
    must capture and replay them in the same order.

    On the CPU there are no graphs: padded batches run directly.
    """

    def __init__(
        self,
        decoder: Model,
        cache: KVCache,
        compute: Callable[[StepBatch], Tensor] | None = None,
    ) -> None:
        """compute: what graphs hold; None = `decoder.compute`."""
        self._decoder = decoder
        self._compute = compute or partial(decoder.compute, cache=cache)
        self._is_cuda = decoder.device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._is_cuda else None
        self._captured: dict[tuple[int, ...], _Captured] = {}
        self.missed_steps = 0
        """Number of steps on a GPU for whose size there is no graph"""

    def run(self, batch: StepBatch) -> Tensor:
        """Return what is computed of a padded batch, valid until the next call.

        It is hidden states [rows, hidden_size] unless `compute` says otherwise; padding has rows,
        too.
        """
        self._decoder.announce(batch, as_graph=True)
        captured = self._captured.get(key_of(batch))
        if captured is None:
            self.missed_steps += self._is_cuda
            return self._compute(batch)
        captured.graph.replay()
        return captured.result

    def capture(self, batch: StepBatch) -> None:
        """Capture the size of a padded batch. Later steps must have the addresses of this batch."""
        self._decoder.announce(batch, captures=True)
        self.capture_here(batch)

    def capture_here(self, batch: StepBatch) -> None:
        """Capture the size on this rank; every other rank must call this at the same time."""
        if self._is_cuda:
            self._captured[key_of(batch)] = self._capture(batch)
        else:
            self._compute(batch)

    def _capture(self, batch: StepBatch) -> _Captured:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):  # each pass writes the same keys and values
                self._compute(batch)
        torch.cuda.current_stream().wait_stream(stream)
        # Copy the batch: attention caches metadata on it, which must be captured.
        own = batch.copy()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = self._compute(own)
        return _Captured(graph, result, (own, self._decoder.buffers))


def key_of(batch: StepBatch) -> tuple[int, ...]:
    """Return the key of a padded batch's size and place. Batches of one key share a graph."""
    tables, tokens, shares = batch.block_tables, batch.token_ids, batch.prefixes is not None
    kind = (shares, batch.padded is not None, batch.adapters is not None)
    return (len(tokens), *tables.shape, *kind, tables.data_ptr(), tokens.data_ptr())
