"""Check that a loaded model computes sequences in one step as it computes each alone."""

from collections.abc import Sequence

import torch
from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.model.architecture.cache_groups import layer_groups
from services.engine.model.model import Model

__all__ = ["separates_sequences"]

_LENGTHS = (9, 13)
_CHUNKS = ((4, 6), (5, 7))
"""Numbers of tokens of each sequence in two steps"""
_TOLERANCE = 0.15
"""Tolerated mean difference, in standard deviations of the hidden states. Rounding to 8 bits gives
a few hundredths, another token or another position about one"""


def separates_sequences(model: Model) -> bool:
    """Return whether sequences that share steps, in chunks, have the hidden states of each alone.

    They differ if a layer combines tokens other than by attention, or counts positions itself.
    """
    with model.device:  # where tensors are made
        ids = (torch.arange(sum(_LENGTHS)) * 31 + 7) % model.spec.vocab_size
        sequences = ids.split_with_sizes(list(_LENGTHS))
        alone = [_run(model, [tokens], [[len(tokens)]])[0] for tokens in sequences]
        together = _run(model, sequences, _CHUNKS)
    for mine, other in zip(alone, together, strict=True):
        difference = (mine - other).abs().mean() / mine.std().clamp(min=1e-6)
        if not difference < _TOLERANCE:
            return False
    return True


def _run(model: Model, sequences: Sequence[Tensor], steps: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the hidden states of each sequence, which has a block of its own."""
    cache = model.allocate_cache(len(sequences))
    groups, size = len(layer_groups(model.spec)), cache.block_size
    tables = torch.arange(len(sequences), dtype=torch.int32)[:, None]
    done = [0] * len(sequences)
    states: list[list[Tensor]] = [[] for _ in sequences]
    for counts in steps:
        spans = [range(first, first + count) for first, count in zip(done, counts, strict=True)]
        positions = torch.tensor([place for span in spans for place in span])
        owners = torch.repeat_interleave(torch.arange(len(spans)), torch.tensor(counts))
        done = [span.stop for span in spans]
        batch = StepBatch(
            token_ids=torch.cat(
                [each[span.start : span.stop] for each, span in zip(sequences, spans, strict=True)]
            ),
            positions=positions,
            slots=owners * size + positions,
            query_starts=torch.tensor([0, *counts]).cumsum(0).int(),
            context_lengths=torch.tensor(done, dtype=torch.int32),
            block_tables=tables,
            num_decodes=0,
            query_lengths_host=tuple(counts),
            context_lengths_host=tuple(done),
        )
        batch = batch.with_groups([batch.slots] * (groups - 1), [tables] * (groups - 1))
        hidden = model.states(model.compute(batch, cache))  # all ranks do
        for number, part in enumerate(hidden.split_with_sizes(list(counts))):
            states[number].append(part)
    return [torch.cat(parts) for parts in states]
