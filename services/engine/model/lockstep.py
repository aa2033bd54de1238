"""Lockstep of ranks: rank 0 announces each computation, and all ranks run it.

An announcement is a plan between hosts: an order of a few integers and, on the CPU, the tensors. On
a GPU, tensors travel from device to device, so that no device waits for a host.
"""

from abc import abstractmethod
from array import array
from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from services.engine.batch.buckets import table_width
from services.engine.batch.step_batch import OutputRows, PaddedStep, StateSegments, StepBatch
from services.engine.model.adapters.adapters import AdapterChange, ConvertedAdapter
from services.engine.model.adapters.reading import AdapterReading
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention import AttentionBackend, KVCache
from services.engine.model.decoder import Decoder, DecoderWeights
from services.engine.model.model import Model
from services.engine.model.operators.interface import Operators
from services.engine.ranks.group import RankGroup

__all__ = ["Announcements", "Follower", "LeadingDecoder"]

_ALIGNMENT = 4
"""Alignment of a batch's tensors, in int32: Triton compiles kernels for pointers
to multiples of 16 bytes"""


class _Task(IntEnum):
    """First number of an order; the docstring of each names the numbers that follow."""

    PASS = 0
    """Tokens, width of the block tables, number of these, decodes, 1 if there are output rows, 1 if
    there are adapters, rows of the block tables, number of output rows, most chunks of a padded
    step or 0, number of runs between states, and of each run its length, and of each sequence:
    query length, context length; with output rows, the number of these; with adapters, the
    adapter's number"""
    GRAPH = 1
    """Numbers of PASS, for a padded step that runs as a CUDA graph"""
    LOGITS = 2
    """First row and end of the last pass's rows whose logits are computed"""
    LOGITS_OF = 3
    """Number of rows, which follow the order"""
    CAPTURE = 4
    """Numbers of PASS, for a padded step whose CUDA graph is captured"""
    COPY = 5
    """Blocks of the cache to copy: cache group, source and target each"""
    ADAPTER = 6
    """An AdapterChange and the adapter's number; with READ, its directory follows"""


class Announcements(Model):
    """Part of rank 0's model that has the other ranks compute each call along with it."""

    def lead(self, ranks: RankGroup) -> None:
        """Announce to these ranks from now on."""
        self._ranks = ranks
        self._padding = torch.zeros(_ALIGNMENT, dtype=torch.int32, device=self.device)

    @property
    @abstractmethod
    def shared_rows(self) -> Tensor:
        """Hidden states [rows, hidden_size] of the last pass, which all ranks have."""

    @torch.inference_mode()
    def announce(self, batch: StepBatch, *, as_graph: bool = False, captures: bool = False) -> None:
        outputs = batch.output_rows
        task = _Task.CAPTURE if captures else _Task.GRAPH if as_graph else _Task.PASS
        order = array("q", (task, len(batch.token_ids)))
        order.extend((batch.block_tables.shape[1], 1 + len(batch.further_groups)))
        order.extend((batch.num_decodes, outputs is not None))
        runs = () if batch.states is None else batch.states.lengths_host
        order.append(bool(batch.adapters_host))
        rows = 0 if outputs is None else len(outputs.indices)
        most_chunks = 0 if batch.padded is None else batch.padded.most_chunks
        order.extend((len(batch.context_lengths), rows, most_chunks))
        order.extend((len(runs), *runs))
        order.extend(batch.query_lengths_host)
        order.extend(batch.context_lengths_host)
        if outputs is not None:
            order.extend(outputs.lengths_host)
        order.extend(batch.adapters_host)
        self._send(order, self._pack(batch))

    @torch.inference_mode()
    def announce_logits(self, hidden: Tensor) -> None:
        rows = _rows_within(hidden, self.shared_rows)
        if rows is None:
            order = array("q", (_Task.LOGITS_OF, len(hidden)))
            self._send(order, hidden.contiguous())
        else:  # all ranks have the same hidden states
            self._send(array("q", (_Task.LOGITS, rows.start, rows.stop)))

    def announce_copies(self, copies: Sequence[tuple[int, int, int]]) -> None:
        self._send(array("q", (_Task.COPY, *chain.from_iterable(copies))))

    def announce_adapter(self, change: AdapterChange, number: int, directory: str = "") -> None:
        order = array("q", (_Task.ADAPTER, change, number))
        self._ranks.send(_plan(order) + directory.encode())

    def agree_on_adapter(self, failure: str, num_bytes: int) -> tuple[str, int]:
        return self._ranks.first_of(failure), self._ranks.total(num_bytes)

    @property
    def has_argmax(self) -> bool:
        return False  # each rank has logits of a part of the vocabulary

    def _send(self, order: "array[int]", tensor: Tensor | None = None) -> None:
        plan = _plan(order)
        if tensor is None:
            self._ranks.send(plan)
        elif self.device.type == "cpu":
            self._ranks.send(plan + tensor.view(-1).view(torch.uint8).numpy().tobytes())
        else:
            self._ranks.send(plan)
            self._ranks.broadcast(tensor)

    def _pack(self, batch: StepBatch) -> Tensor:
        """Join the batch's tensors into one, int32."""
        groups = (batch, *batch.further_groups)
        tensors = [batch.token_ids, batch.positions, *(group.slots for group in groups)]
        tensors += [batch.query_starts, batch.context_lengths]
        tensors += [group.block_tables for group in groups]
        if batch.output_rows is not None:
            tensors += [batch.output_rows.indices, batch.output_rows.starts]
        if batch.padded is not None:
            tensors.append(batch.padded.counts)
        if (states := batch.states) is not None:
            tensors += [states.starts, states.sources, states.targets]
        parts = []
        for tensor in tensors:
            part = tensor.reshape(-1).view(torch.int32)
            parts += [part, self._padding[: -len(part) % _ALIGNMENT]]
        return torch.cat(parts)


class LeadingDecoder(Announcements, Decoder):
    """Decoder of rank 0."""

    def __init__(
        self,
        ranks: RankGroup,
        spec: ModelSpec,
        dtype: torch.dtype,
        weights: DecoderWeights,
        operators: Operators,
        attention: AttentionBackend,
    ) -> None:
        super().__init__(spec, dtype, weights, operators, attention)
        self.lead(ranks)

    @property
    def shared_rows(self) -> Tensor:
        return self._activations.hidden


class Follower:
    """Computation of a rank other than 0.

    Batches of one shape lie at the same addresses, which CUDA graphs rely on. With graphs, a batch
    that is larger than reserved lies elsewhere.
    """

    def __init__(
        self,
        decoder: Model,
        cache: KVCache,
        ranks: RankGroup,
        run_graph: Callable[[StepBatch], Tensor] | None = None,
        capture: Callable[[StepBatch], None] | None = None,
        read_adapter: Callable[[Path], ConvertedAdapter] | None = None,
    ) -> None:
        """run_graph: runs a padded step as a graph and returns its hidden states; capture:
        captures the graph of its size; read_adapter: runs in a thread; None = there are none."""
        self._decoder = decoder
        self._cache = cache
        self._ranks = ranks
        self._run_graph = run_graph
        self._capture = capture
        self._reading = None if read_adapter is None else AdapterReading(read_adapter)
        self._memory = self._allocate(0)
        """Tensors of the present batch"""

    def reserve(self, tokens: int, sequences: int, blocks: int) -> None:
        """Reserve memory for batches of up to this size. blocks: those of one sequence."""
        groups = len(self._cache.groups) or 1
        runs = tokens if self._cache.states else 0
        sizes = _sizes(tokens, sequences, table_width(blocks), groups, tokens, runs, is_padded=True)
        size = sum(_aligned(sizes))
        if size > len(self._memory):
            self._memory = self._allocate(size)

    @torch.inference_mode()
    def run(self) -> None:
        """Compute what rank 0 announces until it dissolves the group. Raises RankLostError."""
        decoder = self._decoder
        hidden = torch.empty(0)
        while plan := self._ranks.receive():
            order, tensors = _split(plan)
            match order[0]:
                case _Task.LOGITS:
                    decoder.compute_logits(hidden[order[1] : order[2]])
                case _Task.LOGITS_OF:
                    rows = torch.empty(
                        (order[1], decoder.spec.hidden_size),
                        dtype=decoder.dtype,
                        device=decoder.device,
                    )
                    decoder.compute_logits(self._receive(rows, tensors))
                case _Task.COPY:
                    copies = zip(order[1::3], order[2::3], order[3::3], strict=True)
                    self._cache.copy_blocks(list(copies))
                case _Task.ADAPTER:
                    self._change_adapters(AdapterChange(order[1]), order[2], bytes(tensors))
                case _Task.CAPTURE if self._capture is not None:
                    self._capture(self._batch(order, tensors))
                case _Task.GRAPH if self._run_graph is not None:
                    hidden = self._run_graph(self._batch(order, tensors))
                case _:
                    hidden = decoder.compute(self._batch(order, tensors), self._cache)

    def _change_adapters(self, change: AdapterChange, number: int, directory: bytes) -> None:
        adapters = self._decoder.adapters
        assert adapters is not None
        assert self._reading is not None
        match change:
            case AdapterChange.READ:
                self._reading.start(number, Path(directory.decode()))
            case AdapterChange.INSERT:
                adapter, failure = self._reading.take(number)
                failure = self._ranks.first_of(failure)
                self._ranks.total(0 if adapter is None else adapter.num_bytes)
                if adapter is not None and not failure:
                    adapters.insert(number, adapter)
            case AdapterChange.DROP:
                adapters.unload(number)

    def _batch(self, order: list[int], tensors: memoryview) -> StepBatch:
        tokens, width, groups, num_decodes, keeps_some, is_adapted, *further = order[1:]
        sequences, rows, most_chunks, num_runs, *lengths = further
        runs, lengths = tuple(lengths[:num_runs]), lengths[num_runs:]
        count = len(lengths) // (2 + keeps_some + is_adapted)
        queries, contexts, kept = (tuple(lengths[i * count : (i + 1) * count]) for i in range(3))
        adapters = tuple(lengths[-count:]) if is_adapted else ()
        kept_rows = rows if keeps_some else None
        is_padded = most_chunks > 0
        sizes = _sizes(tokens, sequences, width, groups, kept_rows, num_runs, is_padded=is_padded)
        aligned = _aligned(sizes)
        packed = self._receive(self._memory_of(sum(aligned)), tensors)
        places = zip(packed.split_with_sizes(aligned), sizes, strict=True)
        parts = [part[:size] for part, size in places]
        token_ids, positions, *slots = (part.view(torch.int64) for part in parts[: 2 + groups])
        query_starts, context_lengths, *rest = parts[2 + groups :]
        tables, outputs = [part.view(sequences, width) for part in rest[:groups]], rest[groups:]
        states = None
        if runs:
            *outputs, starts, sources, targets = outputs
            states = StateSegments(starts, sources, targets, runs)
        padded = PaddedStep(outputs.pop(), most_chunks) if is_padded else None
        batch = StepBatch(
            token_ids=token_ids,
            positions=positions,
            slots=slots[0],
            query_starts=query_starts,
            context_lengths=context_lengths,
            block_tables=tables[0],
            num_decodes=num_decodes,
            query_lengths_host=queries,
            context_lengths_host=contexts,
            adapters_host=adapters,
            states=states,
            output_rows=OutputRows(outputs[0].view(torch.int64), outputs[1], kept)
            if keeps_some
            else None,
            padded=padded,
        )
        return batch.with_groups(slots[1:], tables[1:])

    def _memory_of(self, size: int) -> Tensor:
        """Return the memory of a batch, int32 [size]."""
        if size > len(self._memory):
            if self._run_graph is not None:
                return self._allocate(size)
            self._memory = self._allocate(2 * size)
        return self._memory[:size]

    def _allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=self._decoder.device)

    def _receive(self, into: Tensor, tensors: memoryview) -> Tensor:
        """Fill a contiguous tensor with rank 0's values."""
        if into.device.type == "cpu":
            into.view(-1).view(torch.uint8).numpy()[:] = tensors
            return into
        return self._ranks.broadcast(into)


def _sizes(
    tokens: int,
    sequences: int,
    width: int,
    groups: int,
    rows: int | None,
    runs: int,
    *,
    is_padded: bool,
) -> list[int]:
    """Return the sizes of a batch's tensors in the order of `_pack`, in int32.

    groups: number of cache groups; rows: number of output rows, None = the batch has none; runs:
    number of runs between states; is_padded: whether it is a padded step with chunks.
    """
    sizes = [2 * tokens] * (2 + groups) + [sequences + 1, sequences]
    sizes += [sequences * width] * groups
    if rows is not None:
        sizes += [2 * rows, sequences + 1]
    if is_padded:
        sizes.append(2)
    return [*sizes, runs + 1, runs, runs] if runs else sizes


def _aligned(sizes: list[int]) -> list[int]:
    return [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]


def _plan(order: "array[int]") -> bytes:
    """Return the beginning of a plan, which its tensors follow."""
    return array("q", (len(order),)).tobytes() + order.tobytes()


def _split(plan: bytearray) -> tuple[list[int], memoryview]:
    """Return a plan's order and tensors."""
    [count] = memoryview(plan)[:8].cast("q")
    end = 8 * (1 + count)
    return memoryview(plan)[8:end].cast("q").tolist(), memoryview(plan)[end:]


def _rows_within(part: Tensor, whole: Tensor) -> range | None:
    """Return the rows of `whole` that `part` is a view of; None if it has its own memory."""
    row_bytes = whole.stride(0) * whole.itemsize
    first, rest = divmod(part.data_ptr() - whole.data_ptr(), row_bytes)
    if rest or not 0 <= first < len(whole) or part.stride() != whole.stride():
        return None
    return range(first, first + len(part))
