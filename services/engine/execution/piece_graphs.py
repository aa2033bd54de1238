"""CUDA graphs of the pieces between attentions, for steps with prompts."""

import torch
from torch import Tensor

from services.engine.batch.buckets import TOKEN_BUCKETS, token_bucket
from services.engine.batch.step_batch import StepBatch
from services.engine.model.attention import KVCache
from services.engine.model.model import Model

__all__ = ["PieceGraphs"]

_WARM_UPS = 2
"""Number of passes before a capture, which compile kernels and allocate libraries' workspaces"""


class PieceGraphs:
    """Forward passes in which attention alone is launched kernel by kernel.

    The number of sequences and their lengths differ from step to step, so attention is in no graph.
    All else depends on the number of tokens alone: it lies in one graph per layer, captured for a
    few numbers of tokens, to which steps are padded. A piece also writes keys and values to the
    cache; those of padded tokens go to the spare block. Hidden states pass from graph to graph in
    the decoder's buffers, so all graphs share one memory pool, as large as the largest graph needs.

    On the CPU there are no graphs: the padded pieces run directly.
    """

    def __init__(self, decoder: Model, cache: KVCache, tokens: int) -> None:
        """tokens: number of tokens of the largest step, for which the decoder has reserved its
        buffers. It is at least the smallest of `TOKEN_BUCKETS`."""
        self._decoder = decoder
        self._cache = cache
        self.sizes = [size for size in reversed(TOKEN_BUCKETS) if size <= tokens]
        """Numbers of tokens to which steps are padded, largest first"""
        self._is_cuda = decoder.device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._is_cuda else None
        self._graphs: dict[int, list[torch.cuda.CUDAGraph]] = {}
        """Graphs of all layers, by number of tokens"""
        self._held: object = None
        """The decoder's buffers, which the graphs read and write"""
        groups = range(len(cache.groups) or 1)
        spare = [(cache.blocks_of(group) - 1) * cache.block_size for group in groups]
        self._spare_slots = torch.tensor(spare, device=decoder.device)[:, None]
        """Slot of each cache group to which padded tokens write"""
        shape = (2 + len(spare), self.sizes[0])
        self._inputs = torch.zeros(shape, dtype=torch.int64, device=decoder.device)
        """Token ids, positions and each group's slots of the present step, which graphs read"""
        self._padded = {size: self._padded_batch(size) for size in self.sizes}

    def run(self, batch: StepBatch) -> Tensor:
        """Return the hidden states of a batch without images; see `Decoder.forward`.

        The batch has at most `sizes[0]` tokens. A size that was not captured runs without graphs.
        """
        size = token_bucket(len(batch.token_ids))
        graphs = self._graphs.get(size)
        if self._is_cuda and graphs is None:
            return self._decoder.forward(batch, self._cache)
        self._fill_in(batch)
        for layer in range(self._decoder.spec.num_layers):
            if graphs is not None:
                graphs[layer].replay()
            else:
                self._decoder.compute_piece(layer, self._padded[size], self._cache)
            self._decoder.mix(layer, batch, self._cache)
        return self._decoder.finish(batch)

    def capture(self, tokens: int) -> None:
        """Capture the pieces of steps of `tokens` tokens, which is one of `sizes`.

        The decoder must have reserved its buffers, which then stay in place. On the CPU the pieces
        run.
        """
        self._inputs[2:] = self._spare_slots
        layers, batch = range(self._decoder.spec.num_layers), self._padded[tokens]
        if not self._is_cuda:
            for layer in layers:
                self._decoder.compute_piece(layer, batch, self._cache)
            return
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                for layer in layers:
                    self._decoder.compute_piece(layer, batch, self._cache)
        torch.cuda.current_stream().wait_stream(stream)
        graphs = []
        for layer in layers:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                self._decoder.compute_piece(layer, batch, self._cache)
            graphs.append(graph)
        self._graphs[tokens] = graphs
        self._held = self._decoder.buffers

    def _padded_batch(self, tokens: int) -> StepBatch:
        """Return a batch of `tokens` padding tokens in the graphs' inputs, without a sequence."""
        device = self._inputs.device
        token_ids, positions, *slots = self._inputs[:, :tokens]
        tables = torch.zeros((0, 1), dtype=torch.int32, device=device)
        batch = StepBatch(
            token_ids=token_ids,
            positions=positions,
            slots=slots[0],
            query_starts=torch.zeros(1, dtype=torch.int32, device=device),
            context_lengths=torch.zeros(0, dtype=torch.int32, device=device),
            block_tables=tables,
            num_decodes=0,
            query_lengths_host=(),
            context_lengths_host=(),
        )
        return batch.with_groups(slots[1:], [tables] * (len(slots) - 1))

    def _fill_in(self, batch: StepBatch) -> None:
        """Copy a step's integers to the inputs. Ids and positions of padding are arbitrary."""
        tokens = len(batch.token_ids)
        token_ids, positions, *slots = self._inputs
        token_ids[:tokens].copy_(batch.token_ids)
        positions[:tokens].copy_(batch.positions)
        for number, each in enumerate(slots):
            each[:tokens].copy_(batch.of_group(number).slots)
        self._inputs[2:, tokens:] = self._spare_slots
