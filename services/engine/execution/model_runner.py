"""Model runner: hidden states and logits of step plans."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from services.engine.batch.buckets import TOKEN_BUCKETS, row_bucket
from services.engine.batch.staging import DeviceFields, HostFields, Staging
from services.engine.batch.step_batch import OutputRows, StateSegments, StepBatch
from services.engine.batch.transfer import to_device
from services.engine.execution.adapter_files import convert_adapter
from services.engine.execution.decode_graphs import DecodeGraphs
from services.engine.execution.piece_graphs import PieceGraphs
from services.engine.execution.start_progress import StartProgress
from services.engine.execution.step_images import NO_IMAGES, StepImages
from services.engine.model.adapters.adapters import AdapterChange
from services.engine.model.adapters.reading import AdapterReading
from services.engine.model.attention import KVCache
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.model import Model
from services.engine.scheduling.cache_pools import BlockCopy
from services.engine.scheduling.sequence import TokenSequence
from services.engine.scheduling.sequence_cache import StateRun
from services.engine.scheduling.step_plan import StepPlan

__all__ = ["SCORED_ROWS", "DeviceTokens", "ModelRunner", "StepCapacity", "max_logit_rows"]

SCORED_ROWS = 256
"""Number of prompt rows whose logits are computed at a time"""


_LEAST_SHARERS = 32
"""Fewest rows of a decode step for which a shared beginning is read only once"""
_LEAST_SHARED = 512
"""Fewest tokens of a shared beginning that is read only once"""
_NOTHING = StepPlan([], [], 0, 0)
_MOST_RUNS = 3
"""Most runs of a chunk that do not end at a regular snapshot, but at the chunk's last borders"""


def max_logit_rows(max_running: int) -> int:
    """Return the most rows of logits of a step: one per running sequence, or a part of a prompt."""
    return max(max_running, SCORED_ROWS)


@dataclass(frozen=True, slots=True)
class DeviceTokens:
    """Newest tokens of sequences, which were drawn on the device and are not on the host yet."""

    ids: Tensor
    """int64 [rows]"""
    indices: Mapping[TokenSequence, int]
    """Index of each sequence's newest token in `ids`"""


@dataclass(frozen=True, slots=True)
class StepCapacity:
    """Size of the largest step."""

    tokens: int
    sequences: int
    blocks: int
    """Number of blocks of one sequence"""


class ModelRunner:
    """Builds a flat batch from each plan, and runs it through the decoder."""

    def __init__(
        self, decoder: Model, cache: KVCache, graph_capacity: StepCapacity | None = None
    ) -> None:
        """graph_capacity: size of the largest step if steps are padded, and run as CUDA graphs on
        a GPU; None = they are not. Padding writes to the last block of each cache group."""
        self._decoder = decoder
        self._cache = cache
        groups = range(len(cache.groups) or 1)
        self._staging = Staging(decoder.device, len(groups))
        self._spare = [[cache.blocks_of(group) - 1] for group in groups]
        """Block of each cache group that padded rows write to"""
        self._spare_run = StateRun(1, -1, cache.num_slots - 1)
        """Run of a padded row"""
        self._graphs: DecodeGraphs | None = None
        self._pieces: PieceGraphs | None = None
        self._reading = AdapterReading(partial(convert_adapter, decoder))
        self._images = StepImages(decoder.spec, decoder.dtype, decoder.device)
        self.device = decoder.device
        if graph_capacity is not None:
            rows = row_bucket(graph_capacity.sequences)
            tokens = max(graph_capacity.tokens, rows)
            runs = _MOST_RUNS * rows + tokens // cache.block_size if cache.states else 0
            self._staging.reserve(tokens, rows, graph_capacity.blocks, runs)
            decoder.reserve(tokens, rows)
            self._graphs = DecodeGraphs(decoder, cache)
            if decoder.runs_in_pieces and tokens >= TOKEN_BUCKETS[0]:
                self._pieces = PieceGraphs(decoder, cache, tokens)

    def forward(self, plan: StepPlan, drawn: DeviceTokens | None = None) -> Tensor:
        """Compute the plan. Return hidden states [rows, hidden], valid until the next call.

        Rows are in the order of the plan: one per decode, `num_outputs` per chunk. drawn: the
        newest tokens of the sequences that have one in flight.
        """
        if self._graphs is None or self._images.affect(plan) or _adapters(plan):
            return self._decoder.forward(self._batch(plan, drawn), self._cache)
        if plan.chunks:
            batch = self._batch(plan, drawn)
            if self._pieces is None or len(batch.token_ids) > self._pieces.sizes[0]:
                return self._decoder.forward(batch, self._cache)
            return self._pieces.run(batch)
        padding = row_bucket(len(plan.decodes)) - len(plan.decodes)
        return self._graphs.run(self._batch(plan, drawn, padding))

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
            if rows >= _LEAST_SHARERS and self._decoder.reads_shared_once:
                capture(self._batch(_NOTHING, None, rows, blocks, shares=True))
            capture(self._batch(_NOTHING, None, rows, blocks))
            if progress is not None:
                progress.add()

    @property
    def piece_sizes(self) -> Sequence[int]:
        """Numbers of tokens of padded steps with prompts that may run in pieces, largest first."""
        return () if self._pieces is None else self._pieces.sizes

    def capture_pieces(self, sizes: Sequence[int], progress: StartProgress | None = None) -> None:
        """Capture the graphs of padded steps with prompts, of some of `piece_sizes`."""
        for size in sizes:
            if self._pieces is not None:
                self._pieces.capture(size)
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

    def _batch(
        self,
        plan: StepPlan,
        drawn: DeviceTokens | None,
        padding: int = 0,
        least_blocks: int = 1,
        *,
        shares: bool = False,
    ) -> StepBatch:
        """Build the plan's batch.

        padding: number of rows to add to a plan without chunks. least_blocks: parameter of
        `Staging.lay_out`. shares: whether to build it as if contexts began with the same blocks.
        """
        decodes, chunks = plan.decodes, plan.chunks
        # a padded row is a sequence of one token, in the spare block
        counts = [1] * (len(decodes) + padding) + [chunk.count for chunk in chunks]
        ends = [s.length + s.in_flight for s in decodes] + [chunk.end for chunk in chunks]
        ends += [1] * padding
        sequences = [*decodes, *(chunk.sequence for chunk in chunks)]
        tables = [table.blocks for sequence in sequences for table in sequence.tables]
        tables += self._spare * padding
        outputs = [1] * (len(decodes) + padding) + [chunk.num_outputs for chunk in chunks]
        runs: list[StateRun] = []
        if self._cache.states:
            runs = [run for each in sequences if each.states for run in each.states.runs]
            runs += [self._spare_run] * padding
        fields = self._staging.lay_out(sum(counts), tables, least_blocks, len(runs))
        fields.query_starts[0] = 0
        np.cumsum(counts, out=fields.query_starts[1:])
        fields.context_lengths[:] = ends
        _fill_token_ids(fields, plan, padding)
        self._fill_slots(fields, counts)
        if runs:
            _fill_runs(fields, runs)
        shared = self._shared_blocks(fields, len(decodes)) * self._cache.block_size
        fields.shared_tokens[0] = shared
        if drawn is not None:
            _fill_sources(fields, decodes, drawn)
        if is_partial := outputs != counts:
            _fill_output_rows(fields, outputs)
        images = self._images.of(plan, fields) if self._images.affect(plan) else NO_IMAGES
        staged = self._staging.send()
        if drawn is not None:
            known = torch.cat((drawn.ids, staged.token_ids))
            torch.index_select(known, 0, staged.sources, out=staged.token_ids)
        output_rows = None
        if is_partial:
            indices = staged.output_rows[: sum(outputs)]
            output_rows = OutputRows(indices, staged.output_starts, tuple(outputs))
        slots, tables_of_groups = staged.slots.unbind(), staged.block_tables.unbind(1)
        batch = StepBatch(
            token_ids=staged.token_ids,
            positions=staged.positions,
            slots=slots[0],
            query_starts=staged.query_starts,
            context_lengths=staged.context_lengths,
            block_tables=tables_of_groups[0],
            num_decodes=len(decodes) + padding,
            query_lengths_host=tuple(counts),
            context_lengths_host=tuple(ends),
            shared_tokens=staged.shared_tokens if shared or shares else None,
            adapters_host=_adapters(plan),
            output_rows=output_rows,
            states=_segments(staged, runs) if runs else None,
            images=images.rows,
            attended_host=_attended(plan, ends),
            token_types=self._token_types(plan, counts),
            rotary_positions=images.rotary_positions,
        )
        batch = batch.with_groups(slots[1:], tables_of_groups[1:])
        if images.visible_ends is None:
            return batch
        return batch.with_ends(images.visible_ends, self._images.groups_ahead)

    def _token_types(self, plan: StepPlan, counts: list[int]) -> Tensor | None:
        """Return the type of each token, 1 in the second text of a pair; None without pairs."""
        if all(chunk.sequence.second_text is None for chunk in plan.chunks):
            return None
        types = np.zeros(sum(counts), dtype=np.int64)
        end = sum(counts[: len(counts) - len(plan.chunks)])
        for chunk in plan.chunks:
            end += chunk.count
            if (second := chunk.sequence.second_text) is not None and second < chunk.end:
                types[end - chunk.end + max(second, chunk.start) : end] = 1
        return to_device(torch.from_numpy(types), self.device)

    def _shared_blocks(self, fields: HostFields, decodes: int) -> int:
        """Return the number of leading blocks that all decodes share; 0 = too few to gain time."""
        size = self._cache.block_size
        least = _LEAST_SHARED // size
        if decodes < _LEAST_SHARERS or not self._decoder.reads_shared_once:
            return 0
        most = (int(fields.context_lengths[:decodes].min()) - 1) // size
        tables = fields.block_tables[:decodes, 0, :most]
        if most < least or (tables[:, least - 1] != tables[0, least - 1]).any():
            return 0
        differs = (tables != tables[0]).any(axis=0)
        return int(differs.argmax()) if differs.any() else most

    def _fill_slots(self, fields: HostFields, counts: list[int]) -> None:
        """Fill in positions and slots. counts: tokens of each sequence."""
        positions, contexts = fields.positions, fields.context_lengths
        owners = np.arange(len(counts))
        if len(positions) > len(counts):
            owners = np.repeat(owners, counts)
            shifts = (contexts - fields.query_starts[1:])[owners]
            np.add(np.arange(len(positions)), shifts, out=positions)
        else:
            np.subtract(contexts, 1, out=positions)
        blocks, offsets = np.divmod(positions, self._cache.block_size)
        slots = fields.block_tables[owners, :, blocks].astype(np.int64) * self._cache.block_size
        np.add(slots, offsets[:, None], out=fields.slots.T)


def _adapters(plan: StepPlan) -> tuple[int, ...]:
    """Return the number of each sequence's adapter; empty if none has one."""
    numbers = [s.adapter for s in plan.decodes] + [c.sequence.adapter for c in plan.chunks]
    return tuple(numbers) if any(numbers) else ()


def _attended(plan: StepPlan, ends: list[int]) -> tuple[int, ...]:
    """Return the number of each sequence's tokens that tokens attend to; empty if all."""
    sequences = [*plan.decodes, *(chunk.sequence for chunk in plan.chunks)]
    if not any(sequence.unattended_length for sequence in sequences):
        return ()
    pairs = zip(sequences, ends, strict=True)
    return tuple(end - sequence.unattended_length for sequence, end in pairs)


def _fill_token_ids(fields: HostFields, plan: StepPlan, padding: int) -> None:
    ids, count = fields.token_ids, len(plan.decodes)
    ids[:count] = [sequence.newest for sequence in plan.decodes]
    ids[len(ids) - padding :] = 0
    for start, chunk in zip(fields.query_starts[count:].tolist(), plan.chunks, strict=False):
        known = chunk.count - len(chunk.draft)
        ids[start : start + known] = chunk.sequence.tokens[chunk.start : chunk.start + known]
        ids[start + known : start + chunk.count] = chunk.draft


def _fill_sources(
    fields: HostFields, decodes: Sequence[TokenSequence], drawn: DeviceTokens
) -> None:
    """Fill in the index of each token id: among the drawn ids, or in the ids behind them."""
    first = len(drawn.ids)
    fields.sources[:] = np.arange(first, first + len(fields.sources))
    fields.sources[: len(decodes)] = [
        drawn.indices.get(sequence, row) if sequence.in_flight else row
        for row, sequence in enumerate(decodes, start=first)
    ]


def _fill_runs(fields: HostFields, runs: Sequence[StateRun]) -> None:
    """Fill in the runs between states."""
    lengths, fields.run_sources[:], fields.run_targets[:] = zip(*runs, strict=True)
    fields.run_starts[0] = 0
    np.cumsum(lengths, out=fields.run_starts[1:])


def _segments(staged: DeviceFields, runs: Sequence[StateRun]) -> StateSegments:
    lengths = tuple(run.length for run in runs)
    return StateSegments(staged.run_starts, staged.run_sources, staged.run_targets, lengths)


def _fill_output_rows(fields: HostFields, outputs: list[int]) -> None:
    """Fill in the last rows of each sequence. outputs: rows of each sequence."""
    starts = fields.output_starts
    starts[0] = 0
    np.cumsum(outputs, out=starts[1:])
    # a row's distance from the last row of its sequence is the same in both numberings
    shifts = np.repeat(fields.query_starts[1:] - starts[1:], outputs)
    np.add(np.arange(len(shifts)), shifts, out=fields.output_rows[: len(shifts)])


def _rows_of(hidden: Tensor, rows: Sequence[int]) -> Tensor:
    if isinstance(rows, range):
        return hidden[rows.start : rows.stop]
    if not rows or rows[-1] == len(rows) - 1:
        return hidden[: len(rows)]
    index = to_device(torch.tensor(rows, dtype=torch.int64), hidden.device)
    return hidden.index_select(0, index)
