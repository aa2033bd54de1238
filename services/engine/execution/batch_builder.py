"""Batches of step plans."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.engine.batch.buckets import MixedSize
from services.engine.batch.filling import fill_lengths, fill_output_rows, fill_slots
from services.engine.batch.shared_prefixes import LEAST_ROWS, Prefix, find_prefixes
from services.engine.batch.staging import DeviceFields, HostFields, Staging
from services.engine.batch.step_batch import (
    OutputRows,
    PaddedStep,
    SharedPrefixes,
    StateSegments,
    StepBatch,
)
from services.engine.batch.transfer import to_device
from services.engine.execution.step_images import NO_IMAGES, ImageFields, StepImages
from services.engine.model.attention import KVCache
from services.engine.model.model import Model
from services.engine.scheduling.sequence import TokenSequence
from services.engine.scheduling.sequence_cache import StateRun
from services.engine.scheduling.step_plan import StepPlan

__all__ = ["BatchBuilder", "DeviceTokens", "adapters_of"]

_LOG = logging.getLogger("loop")
_MOST_RUNS = 3
"""Most runs of a chunk that do not end at a regular snapshot, but at the chunk's last borders"""


@dataclass(frozen=True, slots=True)
class DeviceTokens:
    """Newest tokens of sequences, which were drawn on the device and are not on the host yet."""

    ids: Tensor
    """int64 [rows]"""
    indices: Mapping[TokenSequence, int]
    """Index of each sequence's newest token in `ids`"""


class BatchBuilder:
    """Builder of flat batches, whose integers lie in one staging buffer.

    Once it is reserved the buffer stays in place, because graphs hold its address: larger steps lie
    in another one.
    """

    def __init__(self, decoder: Model, cache: KVCache, *, pads: bool) -> None:
        """pads: whether steps are padded, so that all that they read must be staged."""
        self._cache = cache
        self._device = decoder.device
        self._reads_shared_once = decoder.reads_shared_once
        groups = range(len(cache.groups) or 1)
        self._stages_positions = pads and decoder.spec.has_grid_positions
        axes = 3 if self._stages_positions else 0
        self._staging = Staging(decoder.device, len(groups), axes)
        self._larger_staging = Staging(decoder.device, len(groups), axes)
        self._is_reserved = False
        self.oversized_steps = 0
        """Number of steps that were larger than reserved"""
        self._spare = [[cache.blocks_of(group) - 1] for group in groups]
        """Block of each cache group that padded rows write to"""
        self._spare_run = StateRun(1, -1, cache.num_slots - 1)
        """Run of a padded row"""
        self.images = StepImages(decoder.spec, decoder.dtype, decoder.device)

    def reserve(self, tokens: int, sequences: int, blocks: int) -> None:
        """Reserve the staging buffer of steps of up to this size, as `Staging.reserve` does."""
        runs = 0
        if self._cache.states:
            runs = _MOST_RUNS * sequences + tokens // self._cache.block_size
        self._staging.reserve(tokens, sequences, blocks, runs)
        self._is_reserved = True

    def build(
        self,
        plan: StepPlan,
        drawn: DeviceTokens | None = None,
        padding: int = 0,
        least_blocks: int = 1,
        *,
        shares: bool = False,
        size: MixedSize | None = None,
        stages_adapters: bool = False,
    ) -> StepBatch:
        """Build the plan's batch.

        drawn: the newest tokens of the sequences that have one in flight. padding: number of rows
        to add to a plan without chunks. least_blocks: parameter of `Staging.lay_out`. shares:
        whether to build it as if decodes shared a prefix. size: size to which the step is padded,
        which has chunks or no sequence at all; None = it is not padded so. stages_adapters: whether
        a graph reads which tokens have adapters.
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
        tokens = sum(counts)
        if size is not None:
            tables += self._spare * (size.sequences - len(counts))
            tokens, least_blocks = size.tokens, size.width
        staging = self._staging_of(tokens, tables, least_blocks, len(runs))
        fields = staging.lay_out(tokens, tables, least_blocks, len(runs))
        fill_lengths(fields, counts, ends)
        _fill_token_ids(fields, plan)
        fill_slots(fields, counts, self._cache.block_size, self._spare)
        if runs:
            _fill_runs(fields, runs)
        shares |= self._fill_prefixes(fields, len(decodes), shares)
        if drawn is not None:
            _fill_sources(fields, decodes, drawn)
        if is_partial := size is not None or outputs != counts:
            fill_output_rows(fields, outputs)
        if size is not None:
            fields.counts[:] = len(decodes), len(counts)
        if stages_adapters:
            _fill_adapters(fields, plan)
        stages_images = size is not None and self.images.are_staged
        images = self._images_of(plan, fields, stages_images=stages_images)
        staged = staging.send()
        if drawn is not None:
            known = torch.cat((drawn.ids, staged.token_ids))
            torch.index_select(known, 0, staged.sources, out=staged.token_ids)
        output_rows = None
        if is_partial:
            indices = staged.output_rows[: sum(outputs) if size is None else size.sequences]
            output_rows = OutputRows(indices, staged.output_starts, tuple(outputs))
        slots, tables_of_groups = staged.slots.unbind(), staged.block_tables.unbind(1)
        num_decodes = len(decodes) + padding
        batch = StepBatch(
            token_ids=staged.token_ids,
            positions=staged.positions,
            slots=slots[0],
            query_starts=staged.query_starts,
            context_lengths=staged.context_lengths,
            block_tables=tables_of_groups[0],
            num_decodes=num_decodes,
            query_lengths_host=tuple(counts),
            context_lengths_host=tuple(ends),
            prefixes=_prefixes(staged, num_decodes if size is None else None) if shares else None,
            adapters_host=() if stages_adapters else adapters_of(plan),
            adapters=staged.adapters if stages_adapters else None,
            output_rows=output_rows,
            states=_segments(staged, runs) if runs else None,
            images=images.rows,
            staged_images=self.images.staged(staged.image_rows) if stages_images else None,
            attended_host=_attended(plan, ends),
            token_types=self._token_types(plan, counts),
            rotary_positions=staged.rotary_positions
            if self._stages_positions
            else images.rotary_positions,
            padded=None if size is None else PaddedStep(staged.counts, size.most_chunks),
        )
        batch = batch.with_groups(slots[1:], tables_of_groups[1:])
        if images.visible_ends is None:
            return batch
        return batch.with_ends(images.visible_ends, self.images.groups_ahead)

    def _staging_of(
        self, tokens: int, tables: Sequence[list[int]], least_blocks: int, runs: int
    ) -> Staging:
        """Return the staging of a step. The parameters are those of `Staging.lay_out`."""
        if not self._is_reserved or self._staging.holds(tokens, tables, least_blocks, runs):
            return self._staging
        if not self.oversized_steps:
            _LOG.warning(
                "a step of %d tokens and %d block tables, the longest of %d blocks, is larger than "
                "the reserved memory: such steps run without CUDA graphs",
                tokens,
                len(tables),
                max(map(len, tables)),
            )
        self.oversized_steps += 1
        return self._larger_staging

    def _images_of(self, plan: StepPlan, fields: HostFields, *, stages_images: bool) -> ImageFields:
        """Return what images add to a step, and fill in its rotary positions if they are staged."""
        affect = self.images.affect(plan)
        if self._stages_positions:
            fields.rotary_positions[:] = fields.positions
            if affect:
                self.images.fill_positions(plan, fields, fields.rotary_positions)
        if stages_images:
            self.images.stage(plan, fields)
        if not affect:
            return NO_IMAGES
        has_positions = self.images.has_grid and not self._stages_positions
        has_rows = not stages_images
        return self.images.of(plan, fields, has_positions=has_positions, has_rows=has_rows)

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
        return to_device(torch.from_numpy(types), self._device)

    def _fill_prefixes(self, fields: HostFields, decodes: int, shares: bool) -> bool:
        """Fill in the prefixes that decodes share. Return whether there are any.

        shares: fill in the fields even if there are none.
        """
        found: list[Prefix] = []
        if self._reads_shared_once and decodes >= LEAST_ROWS:
            tables, lengths = fields.block_tables[:decodes, 0], fields.context_lengths[:decodes]
            found = find_prefixes(tables, lengths, self._cache.block_size)
        if not found and not shares:
            return False
        fields.shared_tokens[:] = 0
        ends = np.cumsum([len(prefix.rows) for prefix in found], dtype=np.int32)
        fields.prefix_starts[0] = 0
        fields.prefix_starts[1 : len(found) + 1] = ends
        fields.prefix_starts[len(found) + 1 :] = ends[-1] if found else 0
        for prefix, end in zip(found, ends.tolist(), strict=True):
            fields.prefix_rows[end - len(prefix.rows) : end] = prefix.rows
            fields.shared_tokens[prefix.rows] = prefix.blocks * self._cache.block_size
        return bool(found)


def adapters_of(plan: StepPlan) -> tuple[int, ...]:
    """Return the number of each sequence's adapter; empty if none has one."""
    numbers = [s.adapter for s in plan.decodes] + [c.sequence.adapter for c in plan.chunks]
    return tuple(numbers) if any(numbers) else ()


def _fill_adapters(fields: HostFields, plan: StepPlan) -> None:
    """Fill in the number of each token's adapter; padding has none."""
    fields.adapters[:] = 0
    if numbers := adapters_of(plan):
        counts = [1] * len(plan.decodes) + [chunk.count for chunk in plan.chunks]
        fields.adapters[: sum(counts)] = np.repeat(numbers, counts)


def _attended(plan: StepPlan, ends: list[int]) -> tuple[int, ...]:
    """Return the number of each sequence's tokens that tokens attend to; empty if all."""
    sequences = [*plan.decodes, *(chunk.sequence for chunk in plan.chunks)]
    if not any(sequence.unattended_length for sequence in sequences):
        return ()
    pairs = zip(sequences, ends, strict=True)
    return tuple(end - sequence.unattended_length for sequence, end in pairs)


def _prefixes(staged: DeviceFields, decodes: int | None) -> SharedPrefixes:
    return SharedPrefixes(staged.shared_tokens[:decodes], staged.prefix_rows, staged.prefix_starts)


def _fill_token_ids(fields: HostFields, plan: StepPlan) -> None:
    """Fill in the ids of the plan's tokens; those of padding are 0."""
    ids, count = fields.token_ids, len(plan.decodes)
    ids[:count] = [sequence.newest for sequence in plan.decodes]
    end = count
    for chunk in plan.chunks:
        start, end = end, end + chunk.count
        known = chunk.count - len(chunk.draft)
        ids[start : start + known] = chunk.sequence.tokens[chunk.start : chunk.start + known]
        ids[start + known : end] = chunk.draft
    ids[end:] = 0


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
