"""Decode steps as CUDA graphs: one launch instead of some ten for each layer.

Not yet run on a GPU.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.model.attention import KVCache
from services.engine.model.decoder import Decoder

__all__ = ["DecodeGraphs"]

_WARM_UPS = 2
"""Passes before the capture: they compile kernels and make the libraries allocate what they keep"""


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    hidden: Tensor
    held: object
    """What it reads and writes besides: kept, so that nothing else comes to lie there"""


class DecodeGraphs:
    """Runs decode steps, each size as a graph that is captured when the size first comes up.

    A size is a number of rows and a width of the block tables (`buckets`), so there are few; the
    first step of each takes as long as some passes, and seconds where attention's kernel has to be
    compiled for it. All graphs share one pool of memory, as large as the largest needs, besides the
    decoder's own buffers. A graph reads and writes where it did when it was captured: the memory
    that batches lie in must have been reserved.

    On the CPU there are no graphs: the same padded batches are run as they are.
    """

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self._decoder = decoder
        self._cache = cache
        self._is_cuda = decoder.device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._is_cuda else None
        self._captured: dict[tuple[int, ...], _Captured] = {}

    def run(self, batch: StepBatch) -> Tensor:
        """Hidden states [rows, hidden_size] of a padded batch that only decodes."""
        if not self._is_cuda:
            return self._decoder.forward(batch, self._cache)
        tables = batch.block_tables
        key = (*tables.shape, tables.data_ptr(), batch.token_ids.data_ptr())
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = self._capture(batch)
        captured.graph.replay()
        return captured.hidden

    def _capture(self, batch: StepBatch) -> _Captured:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):  # writes the same keys and values each time
                self._decoder.forward(batch, self._cache)
        torch.cuda.current_stream().wait_stream(stream)
        # a batch of its own: attention keeps what it makes of one, and this belongs into the graph
        own = replace(batch)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            hidden = self._decoder.forward(own, self._cache)
        return _Captured(graph, hidden, (own, self._decoder.buffers))
