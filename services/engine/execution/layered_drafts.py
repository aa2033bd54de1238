"""Draft tokens of a head that has a layer of its own for each of them."""

from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.engine.batch.buckets import MixedSize, row_bucket
from services.engine.batch.step_batch import StepBatch
from services.engine.batch.transfer import Laps, to_device
from services.engine.execution.draft_model import MOST_GRAPH_TOKENS, count_longer
from services.engine.execution.head_drafts import HeadDrafts
from services.engine.execution.model_runner import StepCapacity
from services.engine.execution.step_graphs import StepGraphs
from services.engine.model.layered_head import LayeredHead
from services.engine.scheduling.draft_plan import DraftPart, DraftResult, PassTime

__all__ = ["LayeredDrafts"]


class LayeredDrafts(HeadDrafts):
    """A `LayeredHead` that makes draft tokens, its pages, and the hidden states it reads.

    All layers compute the same rows, one layer after another: the rows of new tokens, and the last
    rows of the pass before. In the pass before, the deeper layers read draft tokens in those rows,
    because the tokens were not known yet.
    """

    _head: LayeredHead
    _inputs: Tensor
    """Ids that rows read, int64 [2, layers, tokens]: their indices among the draft tokens of all
    layers and the known ids behind these; then the known ids themselves"""
    _reserved_inputs: Tensor
    """Memory of those that graphs read"""

    def reserve(self, capacity: StepCapacity, num_blocks: int) -> None:
        """Pad passes as steps with prompts are padded, and run them as CUDA graphs on a GPU."""
        rows = row_bucket(capacity.sequences)
        most = min(max(capacity.tokens, rows), MOST_GRAPH_TOKENS)
        self._sizes = self._chunk_sizes(most, rows, capacity.blocks)
        widest = max([capacity.blocks, *(size.width for size in self._sizes)])
        self._staging.reserve(max(capacity.tokens, rows), rows, widest)
        self._decoder.reserve(max(capacity.tokens, rows), rows)
        self._reserve_states(most)
        device = self._decoder.device
        inputs = torch.zeros(2, self.limits.layers, most, dtype=torch.int64, device=device)
        self._inputs = self._reserved_inputs = inputs
        self._chunk_graphs = StepGraphs(self._decoder, self._cache, self._run_layers)
        self.captures = [partial(self._capture_chunks, size) for size in self._sizes]

    @torch.inference_mode()
    def make(self, parts: Sequence[DraftPart]) -> DraftResult:
        if not parts:
            return DraftResult([], [])
        laps = Laps(self._decoder.device, self._clock)
        order = sorted(range(len(parts)), key=lambda i: -parts[i].length)
        placed = [parts[i] for i in order]
        self._begin(placed)
        size = self._size_of(placed)
        if self._chunk_graphs is None or size is None:
            drafting = [count_longer(placed, number) for number in range(self.limits.layers)]
            drawn = self._run_layers(self._prepare(placed), drafting)
        else:
            drawn = self._chunk_graphs.run(self._prepare(placed, size))
        laps.end()
        made: list[list[int]] = [[] for _ in parts]
        for i, tokens in zip(order, drawn.T.tolist(), strict=False):
            draft = takewhile(lambda token: 0 <= token < self._vocabulary_size, tokens)
            made[i] = list(draft)[: parts[i].length]
        [seconds] = laps.seconds()
        return DraftResult(made, [PassTime(sum(part.count for part in parts), seconds)])

    def _prepare(self, parts: Sequence[DraftPart], size: MixedSize | None = None) -> StepBatch:
        """Return the batch of a pass, and leave in `_inputs` what its layers read."""
        columns = len(parts) if size is None else size.sequences
        read = [
            np.concatenate(
                [_read_ids(part, number, place, columns) for place, part in enumerate(parts)]
            )
            for number in range(self.limits.layers)
        ]
        ids = np.split(read[0], np.cumsum([part.count for part in parts])[:-1])
        batch = self._lay_out(ids, parts, 0, size=size)
        count = batch.token_ids.shape[0]
        known = np.zeros((len(read), count), dtype=np.int64)
        known[:, : len(read[0])] = read
        np.minimum(known, self._most_id, out=known)
        places = len(read) * columns + np.arange(known.size).reshape(known.shape)
        sources = np.where(known < 0, -1 - known, places)
        inputs = to_device(torch.from_numpy(np.stack((sources, known))), self._decoder.device)
        if size is None:
            self._inputs = inputs
        else:
            self._inputs = self._reserved_inputs
            self._inputs[:, :, :count] = inputs
        return batch

    def _run_layers(self, batch: StepBatch, drafting: Sequence[int] | None = None) -> Tensor:
        """Run all layers, one after another. Return the ids that they draw, as `_draw` does.

        drafting: number of sequences for which each layer draws, the first ones; None = all.
        Returns int64 [layers, sequences], 0 for other sequences.
        """
        layers, tokens = self.limits.layers, batch.token_ids.shape[0]
        sequences, states = batch.context_lengths.shape[0], self._states[:tokens]
        sources, known = self._inputs[:, :, :tokens]
        drawn = known.new_zeros(layers * sequences)
        ids = torch.cat((drawn, known.flatten()))
        drawn = ids[: len(drawn)].view(layers, sequences)
        for number, source in enumerate(sources):
            if number:
                torch.index_select(ids, 0, source, out=batch.token_ids)
                batch.token_ids.clamp_(0, self._most_id)
            hidden, states = self._head.run_layer(number, batch, self._cache, states)
            count = sequences if drafting is None else drafting[number]
            drawn[number, :count] = self._draw(hidden[:count])
        return drawn


def _read_ids(
    part: DraftPart, number: int, place: int, columns: int
) -> npt.NDArray[np.signedinteger[Any]]:
    """Return the token that each row of a layer reads: a known one, or -1 - i for a draft token.

    number: number of the layer. place: row of the sequence in the batch. columns: number of rows
    of sequences; i is the index of a draft token among those of all layers, a layer in each row.

    A row that reads a draft token is computed again by the next pass.
    """
    known = part.sequence.tokens[part.start + number : part.end + number]
    missing = part.count - len(known)
    layers = np.arange(number - missing, number)
    return np.concatenate([known, -1 - (layers * columns + place)])
