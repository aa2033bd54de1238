"""Model runner: hidden states and logits of step plans."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from services.engine.batch.buckets import (
    MixedSize,
    least_size,
    mixed_sizes,
    outweighs_graph,
    row_bucket,
)
from services.engine.batch.shared_prefixes import LEAST_ROWS
from services.engine.batch.step_batch import StepBatch
from services.engine.batch.transfer import to_device
from services.engine.execution.adapter_files import convert_adapter
from services.engine.execution.batch_builder import BatchBuilder, DeviceTokens, adapters_of
from services.engine.execution.start_progress import StartProgress
from services.engine.execution.step_graphs import StepGraphs
from services.engine.model.adapters.adapters import AdapterChange
from services.engine.model.adapters.reading import AdapterReading
from services.engine.model.attention import KVCache
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.model import Model
from services.engine.scheduling.cache_pools import BlockCopy
from services.engine.scheduling.step_plan import StepPlan

__all__ = ["SCORED_ROWS", "GraphExtent", "ModelRunner", "StepCapacity", "max_logit_rows"]

SCORED_ROWS = 256
"""Number of prompt rows whose logits are computed at a time"""
_NOTHING = StepPlan([], [], 0, 0)


def max_logit_rows(max_running: int) -> int:
    """Return the most rows of logits of a step: one per running sequence, or a part of a prompt."""
    return max(max_running, SCORED_ROWS)


@dataclass(frozen=True, slots=True)
class StepCapacity:
    """Size of the largest step."""

    tokens: int
    sequences: int
    blocks: int
    """Number of blocks of one sequence"""
    adapters: int = 0
    """Largest number of an adapter whose additions graphs hold; 0 = steps with adapters run without
    graphs"""


@dataclass(frozen=True, slots=True)
class GraphExtent:
    """Largest sizes of the steps that run as graphs, and all sizes of those with chunks."""

    tokens: int
    sequences: int
    """Number of sequences that decode"""
    rows: int
    """Number of sequences, or of rows whose hidden states a step returns"""
    blocks: int
    """Number of blocks of one sequence"""
    mixed_sizes: Sequence[MixedSize]

    @staticmethod
    def of(capacity: StepCapacity) -> "GraphExtent":
        """Return the extent of padded steps, for steps of up to `capacity`."""
        sequences = row_bucket(capacity.sequences)
        tokens = max(capacity.tokens, sequences)
        rows = max(sequences, row_bucket(max_logit_rows(capacity.sequences)))
        sizes = mixed_sizes(tokens, rows, capacity.blocks)
        widest = max([capacity.blocks, *(size.width for size in sizes)])
        return GraphExtent(tokens, sequences, rows, widest, sizes)


class ModelRunner:
    """Builds a flat batch from each plan, and runs it through the decoder."""

    def __init__(
        self, decoder: Model, cache: KVCache, graph_capacity: StepCapacity | None = None
    ) -> None:
        """graph_capacity: size of the largest step if steps are padded, and run as CUDA graphs on
        a GPU; None = they are not. Padding writes to the last block of each cache group."""
        self._decoder = decoder
        self._cache = cache
        self._batches = BatchBuilder(decoder, cache, pads=graph_capacity is not None)
        self._graphs: StepGraphs | None = None
        self._unpadded_steps = 0
        self._graphs_adapters = False
        """True if there are graphs of steps with adapters"""
        self.mixed_sizes: Sequence[MixedSize] = ()
        """Sizes of padded steps with chunks, largest first"""
        self._reading = AdapterReading(partial(convert_adapter, decoder))
        self.device = decoder.device
        if graph_capacity is not None:
            extent = GraphExtent.of(graph_capacity)
            self.mixed_sizes = extent.mixed_sizes
            self._batches.reserve(extent.tokens, extent.rows, extent.blocks)
            if self.mixed_sizes and decoder.runs_alone:
                self._batches.images.reserve(self.mixed_sizes[0].tokens)
            decoder.reserve(extent.tokens, extent.sequences)
            self._graphs = StepGraphs(decoder, cache)
            if graph_capacity.adapters and decoder.adapters is not None:
                self._graphs_adapters = decoder.adapters.are_capturable and decoder.runs_alone
                decoder.adapters.reserve(graph_capacity.adapters)

    @property
    def image_bytes(self) -> int:
        """Bytes that the runner reserves on the device for the rows of images."""
        return self._batches.images.reserved_bytes

    def forward(
        self, plan: StepPlan, drawn: DeviceTokens | None = None, *, taps: bool = True
    ) -> Tensor:
        """Compute the plan. Return hidden states [rows, hidden], valid until the next call.

        Rows are in the order of the plan: one per decode, `num_outputs` per chunk; there may be
        more behind them. drawn: the newest tokens of the sequences that have one in flight. taps:
        whether `tapped` will be read; graphs and several ranks copy in any case.
        """
        batch = None if self._graphs is None else self._padded(plan, drawn)
        if self._graphs is None or batch is None:
            self._unpadded_steps += self._graphs is not None
            self._decoder.taps_paused = not taps and self._decoder.runs_alone
            return self._decoder.forward(self._batches.build(plan, drawn), self._cache)
        self._decoder.taps_paused = False  # a size without a graph runs like other steps
        return self._graphs.run(batch)

    def tapped(self, plan: StepPlan) -> Sequence[Tensor]:
        """Return what `Model.tap` has copied of the tokens of a plan, right after its `forward`.

        The tensors [tokens, hidden_size] have the tokens in the order of the plan. They are valid
        until the next call.
        """
        tokens = len(plan.decodes) + sum(chunk.count for chunk in plan.chunks)
        return self._decoder.tapped(tokens)

    def _padded(self, plan: StepPlan, drawn: DeviceTokens | None) -> StepBatch | None:
        """Return the batch of a padded step; None if no graph can run the step."""
        numbers = adapters_of(plan)
        images = self._batches.images
        if (images.fill(plan) and not images.are_staged) or not self._graphs_hold(numbers):
            return None
        size, padding = None, 0
        if plan.chunks:
            size = self._mixed_size(plan)
            if size is None:
                return None
        else:
            padding = row_bucket(len(plan.decodes)) - len(plan.decodes)
        sequences = len(plan.decodes) + padding if size is None else size.sequences
        return self._batches.build(
            plan,
            drawn,
            padding,
            shares=bool(numbers) and self._may_share(sequences, has_chunks=size is not None),
            size=size,
            stages_adapters=bool(numbers),
        )

    def _graphs_hold(self, numbers: Sequence[int]) -> bool:
        """Return whether graphs hold the additions of these adapters, 0 = none."""
        adapters = self._decoder.adapters
        if not any(numbers) or adapters is None:
            return True
        return self._graphs_adapters and adapters.fit_graphs(numbers)

    def _may_share(self, sequences: int, *, has_chunks: bool) -> bool:
        """Return whether decodes of a padded step may share a prefix. A chunk is no decode."""
        return self._decoder.reads_shared_once and sequences - has_chunks >= LEAST_ROWS

    def _variants(self, sequences: int, *, has_chunks: bool) -> Iterator[tuple[bool, bool]]:
        """Yield whether decodes share prefixes and whether there are adapters, for all graphs.

        Steps with adapters have one graph for both, because each takes memory and time at start.
        """
        may_share = self._may_share(sequences, has_chunks=has_chunks)
        if self._graphs_adapters:
            yield may_share, True
        if may_share:
            yield True, False
        yield False, False

    def _mixed_size(self, plan: StepPlan) -> MixedSize | None:
        """Return the least size that holds a plan with chunks; None if none does."""
        decodes, chunks = len(plan.decodes), plan.chunks
        tokens = decodes + sum(chunk.count for chunk in chunks)
        if not self.mixed_sizes or tokens > self.mixed_sizes[0].tokens:
            return None
        if any(outweighs_graph(chunk.count, chunk.end) for chunk in chunks):
            return None
        sequences = [*plan.decodes, *(chunk.sequence for chunk in chunks)]
        blocks = max(len(table.blocks) for sequence in sequences for table in sequence.tables)
        rows = decodes + sum(max(chunk.num_outputs, 1) for chunk in chunks)
        return least_size(self.mixed_sizes, tokens, rows, len(chunks), blocks)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks of the cache, after all launched steps."""
        if copies:
            self._decoder.copy_blocks(self._cache, copies)

    def capture_graphs(
        self,
        sizes: Sequence[tuple[int, int]],
        progress: StartProgress | None = None,
        *,
        announces: bool = True,
    ) -> None:
        """Capture the graphs of padded decode steps: rows and blocks of the longest sequence.

        announces: whether the other ranks are told to do it; False = they do it by themselves.
        """
        if self._graphs is None:
            return
        capture = self._graphs.capture if announces else self._graphs.capture_here
        for rows, blocks in sizes:
            for shares, adapted in self._variants(rows, has_chunks=False):
                batch = self._batches.build(
                    _NOTHING, None, rows, blocks, shares=shares, stages_adapters=adapted
                )
                capture(batch)
            if progress is not None:
                progress.add()

    @property
    def ungraphed_steps(self) -> int:
        """Number of steps without a graph in an engine with graphs."""
        missed = 0 if self._graphs is None else self._graphs.missed_steps
        return self._unpadded_steps + missed

    @property
    def oversized_steps(self) -> int:
        """Number of steps that were larger than the reserved size, and so ran without graphs."""
        return self._batches.oversized_steps

    def capture_mixed(
        self,
        sizes: Sequence[MixedSize],
        progress: StartProgress | None = None,
        *,
        announces: bool = True,
    ) -> None:
        """Capture the graphs of padded steps with chunks, of some of `mixed_sizes`.

        announces: as of `capture_graphs`.
        """
        if self._graphs is None:
            return
        capture = self._graphs.capture if announces else self._graphs.capture_here
        for size in sizes:
            for shares, adapted in self._variants(size.sequences, has_chunks=True):
                batch = self._batches.build(
                    _NOTHING, shares=shares, size=size, stages_adapters=adapted
                )
                capture(batch)
            if progress is not None:
                progress.add()

    def logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        """Return the logits of some rows of `forward`'s result, valid until the next call.

        rows: in ascending order. Returns float32 [len(rows), vocabulary].
        """
        return self._decoder.logits(_rows_of(hidden, rows))

    def states(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        """Return the final hidden states of some rows of `forward`'s result, as float32.

        rows: in ascending order. Returns [len(rows), hidden_size].
        """
        return self._decoder.states(_rows_of(hidden, rows))

    @property
    def takes_adapters(self) -> bool:
        """True if `read_adapter` works with this model."""
        return self._decoder.adapters is not None

    @property
    def reads_adapters(self) -> bool:
        """True while adapters are read, or wait for `insert_adapter`."""
        return bool(self._reading)

    def read_adapter(self, number: int, directory: Path) -> None:
        """Begin to read an adapter while steps run."""
        self._decoder.announce_adapter(AdapterChange.READ, number, str(directory))
        self._reading.start(number, directory)

    def ready_adapters(self) -> Sequence[int]:
        """Return the numbers of the adapters that have been read."""
        return self._reading.ready()

    def insert_adapter(self, number: int) -> int:
        """Keep the weights of an adapter that was read; return their bytes.

        Raises CheckpointError if it could not be read.
        """
        assert self._decoder.adapters is not None
        self._decoder.announce_adapter(AdapterChange.INSERT, number)
        adapter, failure = self._reading.take(number)
        mine = 0 if adapter is None else adapter.num_bytes
        failure, num_bytes = self._decoder.agree_on_adapter(failure, mine)
        if adapter is None or failure:
            raise CheckpointError(failure)
        self._decoder.adapters.insert(number, adapter)
        return num_bytes

    def unload_adapter(self, number: int) -> None:
        """Drop the weights of an adapter that no sequence has."""
        assert self._decoder.adapters is not None
        self._decoder.announce_adapter(AdapterChange.DROP, number)
        self._decoder.adapters.unload(number)

    @property
    def finds_most_likely(self) -> bool:
        """True if `most_likely` works with this model."""
        return self._decoder.has_argmax

    def most_likely(self, hidden: Tensor, rows: list[int]) -> list[int]:
        """Return each row's id with the highest logit, the lowest id of several; -1 for NaN."""
        ids: list[int] = self._decoder.argmax(_rows_of(hidden, rows)).tolist()
        return ids

    def release_memory(self) -> None:
        """Return memory that no tensor uses to the GPU: the pieces may be too small for a step."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wait(self) -> None:
        """Wait until everything launched so far has run."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _rows_of(hidden: Tensor, rows: Sequence[int]) -> Tensor:
    if isinstance(rows, range):
        return hidden[rows.start : rows.stop]
    if not rows or rows[-1] == len(rows) - 1:
        return hidden[: len(rows)]
    index = to_device(torch.tensor(rows, dtype=torch.int64), hidden.device)
    return hidden.index_select(0, index)
