"""First steps on a CPU, before the first request: torch loads and initializes its parts in them.

A GPU runs its largest step before the first request anyway.
"""

import torch

from services.engine.batch.step_batch import StateSegments, StepBatch
from services.engine.model.attention import KVCache
from services.engine.model.model import Model

__all__ = ["run_first_steps"]

_PROMPT = 2
"""Number of tokens of the prompt: two rows use other kernels than one row, a decode"""


def run_first_steps(decoder: Model, cache: KVCache) -> None:
    """Compute a prompt, and a decode behind it, in the first block of `cache`."""
    steps = [range(_PROMPT)]
    if not decoder.computes_whole_prompts:
        steps.append(range(_PROMPT, _PROMPT + 1))
    for positions in steps:
        hidden = decoder.forward(_batch(decoder, positions), cache)
        if decoder.computes_logits:
            decoder.logits(hidden[-1:])
        else:
            decoder.states(hidden)


def _batch(decoder: Model, positions: range) -> StepBatch:
    """Return a batch of one sequence in the first block."""
    device, count = decoder.device, len(positions)
    places = torch.tensor(positions, dtype=torch.int64, device=device)
    return StepBatch(
        token_ids=torch.zeros(count, dtype=torch.int64, device=device),
        positions=places,
        slots=places,
        query_starts=torch.tensor([0, count], dtype=torch.int32, device=device),
        context_lengths=torch.tensor([positions.stop], dtype=torch.int32, device=device),
        block_tables=torch.zeros((1, 1), dtype=torch.int32, device=device),
        num_decodes=0 if positions.start == 0 else 1,
        query_lengths_host=(count,),
        states=StateSegments.from_zeros([count], device) if decoder.state_bytes else None,
        context_lengths_host=(positions.stop,),
    )
