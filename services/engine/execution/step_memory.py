"""Memory of steps on a GPU, measured by running the largest step before the first request."""

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from services.common.settings import StartupError
from services.engine.batch.buckets import decode_sizes, row_bucket, table_width
from services.engine.batch.step_batch import StateSegments, StepBatch
from services.engine.execution.model_runner import ModelRunner, StepCapacity, max_logit_rows
from services.engine.model.attention import KVCache
from services.engine.model.model import Model

__all__ = ["largest_step", "measure_captures", "measure_steps", "total_of_graphs", "usable_kernels"]

_DRAW_COPIES = 4
"""Copies of the logits that a draw with top-p makes: candidates, weights and their sums"""
_PREFIX = 1 << 17
"""Most tokens before the prompts of the largest step. Attention gathers them in pieces of a fixed
size, so that longer contexts take no more memory"""
_LEAST_GRAPH = 1 << 20
"""Fewest bytes that the driver keeps for a graph"""


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes that steps take in addition to weights and KV cache."""

    largest: int
    """Bytes of the largest step: activations, scratch memory, logits and draws"""
    graphs: int
    """Bytes of all CUDA graphs, and of the rows of images that they read"""

    @property
    def total(self) -> int:
        return self.largest + self.graphs


def measure_steps(decoder: Model, tokens: int, rows: int, capacity: StepCapacity | None) -> int:
    """Run the largest steps; return their bytes in addition to weights and KV cache.

    tokens: number of prompt tokens of a step. rows: number of its decodes. capacity: size of the
    CUDA graphs; None = there are none. All ranks must call this at the same time. Raises
    StartupError if the GPU can't run a step.
    """
    with usable_kernels():
        decoder.choose_kernels(tokens)
        slots = rows + -(-tokens // decoder.spec.context_length) if decoder.state_bytes else 0
        cache = decoder.allocate_cache(-(-tokens // decoder.block_size) + 2, num_states=slots)
        largest = _measure_largest(decoder, cache, tokens, rows)
        graphs = 0 if capacity is None else _measure_graphs(decoder, cache, capacity)
    del cache
    _release()
    return StepMemory(largest, graphs).total


@contextmanager
def usable_kernels() -> Iterator[None]:
    """Turn errors of the GPU or of a compiler into a StartupError of one sentence."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise StartupError(
            "The largest step does not fit into the GPU's memory; lower --max-step-tokens or "
            "--max-running."
        ) from None
    except Exception as error:
        why = " ".join(str(error).split())[:300] or type(error).__name__
        raise StartupError(f"The GPU can't run the model's kernels: {why}") from error


def largest_step(
    decoder: Model, cache: KVCache, tokens: int, rows: int, prefix: int = 0
) -> StepBatch:
    """Return a batch of `rows` decodes behind full contexts, and prompts of `tokens` tokens.

    Its block tables are as wide as a full context, and name blocks of `cache` in turn. prefix: most
    cached tokens before each prompt.
    """
    context, size = decoder.spec.context_length, decoder.block_size
    chunks = [min(context, tokens - start) for start in range(0, tokens, context)]
    queries = (*(1 for _ in range(rows)), *chunks)
    behind = [min(prefix, context - chunk) + chunk for chunk in chunks]
    contexts = (*(context for _ in range(rows)), *behind)
    total, width = sum(queries), table_width(-(-context // size))
    device = decoder.device
    slots = torch.arange(total, device=device) % (cache.num_blocks * size)
    tables = torch.arange(len(queries) * width, device=device) % cache.num_blocks
    starts = torch.tensor([0, *queries], dtype=torch.int32, device=device).cumsum(0)
    return StepBatch(
        token_ids=torch.zeros(total, dtype=torch.int64, device=device),
        positions=torch.arange(total, device=device) % context,
        slots=slots,
        query_starts=starts.to(torch.int32),
        context_lengths=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables=tables.to(torch.int32).view(len(queries), width),
        num_decodes=rows,
        query_lengths_host=queries,
        states=StateSegments.from_zeros(queries, device) if cache.states else None,
        context_lengths_host=contexts,
    )


def total_of_graphs(first: int, further: int, count: int) -> int:
    """Return the bytes of `count` graphs, which share the memory of the first, the largest one.

    further: bytes of each further graph.
    """
    return first + max(further, _LEAST_GRAPH) * (count - 1)


def _measure_largest(decoder: Model, cache: KVCache, tokens: int, rows: int) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    free_before = _release()
    torch.cuda.reset_peak_memory_stats()
    room = 0 if decoder.computes_whole_prompts else max(0, decoder.spec.context_length - tokens)
    for prefix in dict.fromkeys((min(room, _PREFIX), 0)):
        hidden = decoder.compute(largest_step(decoder, cache, tokens, rows, prefix), cache)
    copies = 0
    if decoder.computes_logits:
        logits = decoder.compute_logits(hidden[: max_logit_rows(rows)])
        copies = _DRAW_COPIES * logits.nbytes
    else:
        decoder.states(hidden)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    outside = free_before - _release()  # workspaces of libraries, and loaded kernels
    return peak + max(outside, 0) + copies


def _measure_graphs(decoder: Model, cache: KVCache, capacity: StepCapacity) -> int:
    runner = ModelRunner(decoder, cache, capacity)
    enough = capacity.blocks + row_bucket(capacity.sequences)  # so that no size is left out
    decodes = decode_sizes(capacity.sequences, capacity.blocks, enough)
    captured = measure_captures(
        [partial(runner.capture_graphs, [size], announces=False) for size in decodes]
    ) + measure_captures(
        [partial(runner.capture_mixed, [size], announces=False) for size in runner.mixed_sizes]
    )
    return captured + runner.image_bytes


def measure_captures(captures: Sequence[Callable[[], None]]) -> int:
    """Return the bytes of all captures, estimated from the first two. The largest is the first."""
    if not captures:
        return 0
    free = [_release()]
    for capture in captures[:2]:
        capture()
        free.append(_release())
    first, *further = (before - after for before, after in itertools.pairwise(free))
    return total_of_graphs(max(first, 0), max(further, default=0), len(captures))


def _release() -> int:
    """Release unused memory to the GPU; return the number of bytes that are then free."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]
