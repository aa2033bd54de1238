"""Staging buffer of a step's integers: one allocation, so that one copy moves them to the device.

On the CPU the model reads the buffer itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.engine.batch.buckets import table_width

__all__ = ["DeviceFields", "HostFields", "Staging"]

_ALIGNMENT = 16
"""Alignment of the block tables' offset, in bytes"""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepFields(Generic[T]):
    """A step's integers."""

    token_ids: T
    """int64 [tokens]"""
    positions: T
    """int64 [tokens]"""
    slots: T
    """int64 [groups, tokens]"""
    sources: T
    """int64 [tokens], index of the token id among those drawn on the device, followed by
    `token_ids`; not filled in if no token was drawn"""
    output_rows: T
    """int64 [tokens]; only the first entries, one per output row, are filled in"""
    query_starts: T
    """int32 [sequences + 1]"""
    output_starts: T
    """int32 [sequences + 1]"""
    shared_tokens: T
    """int32 [1]; not filled in if the number is not known"""
    context_lengths: T
    """int32 [sequences]"""
    run_starts: T
    """int32 [runs + 1], first token of each run between states"""
    run_sources: T
    """int32 [runs]"""
    run_targets: T
    """int32 [runs]"""
    block_tables: T
    """int32 [sequences, groups, `table_width`], filled in already; entries past a sequence's blocks
    are arbitrary"""


HostFields: TypeAlias = StepFields[npt.NDArray[np.signedinteger[Any]]]
"""Fields on the host, for the caller to fill in"""
DeviceFields: TypeAlias = StepFields[Tensor]
"""Integers of a step on the model's device"""


class Staging:
    """Staging of one step after another. Fields of a step are valid until the next one.

    A GPU has two pinned host buffers, used in turn: one is written while the other may still be
    copied. The one device buffer is written and read in launch order. It keeps its address, which
    CUDA graphs rely on, until a step exceeds the reserved size.
    """

    def __init__(
        self, device: torch.device, groups: int = 1, *, copies: bool | None = None
    ) -> None:
        """groups: number of cache groups, each of which has its own tables.

        copies: whether the device has its own memory; None = True for a GPU.
        """
        self._device = device
        is_cuda = device.type == "cuda"
        self._copies = is_cuda if copies is None else copies
        self._hosts = [
            _HostBuffer(groups, pinned=is_cuda, packs=self._copies)
            for _ in range(2 if is_cuda else 1)
        ]
        self._groups = groups
        self._on_device: Tensor | None = None

    def reserve(self, tokens: int, sequences: int, blocks: int, runs: int = 0) -> None:
        """Reserve memory for steps of up to this size.

        blocks: number of blocks of the longest sequence. runs: number of runs of tokens between
        recurrent states.
        """
        for host in self._hosts:
            host.grow(tokens, sequences, blocks, runs)

    def lay_out(
        self, tokens: int, tables: Sequence[list[int]], least_blocks: int = 1, runs: int = 0
    ) -> HostFields:
        """Return the fields of a step to fill in.

        tables: the blocks of the first sequence in each group, then those of the next sequence.
        least_blocks: number of blocks of a sequence for which the tables must be wide enough.

        A list in `tables` may only grow from step to step: only blocks added to the same list
        object are copied.
        """
        widest = max(least_blocks, *map(len, tables))
        sequences = len(tables) // self._groups
        if not self._hosts[0].holds(tokens, sequences, widest, runs):
            self.reserve(2 * tokens, 2 * sequences, 2 * widest, 2 * runs)
        self._hosts.reverse()
        return self._hosts[0].lay_out(tokens, tables, widest, runs)

    def send(self) -> DeviceFields:
        """Start the copy of the filled-in fields, and return them on the device."""
        host = self._hosts[0]
        if not self._copies:
            return host.views(host.memory)
        if self._on_device is None or self._on_device.shape != host.memory.shape:
            self._on_device = torch.empty_like(host.memory, device=self._device)
        host.copy_to(self._on_device)
        return host.views(self._on_device)


class _HostBuffer:
    """Host memory of a step: fields of varying length, then the block tables at a fixed offset.

    The tables stay in place from step to step, because few sequences get a new block in a step.
    If the buffer is copied, the tables are packed behind the fields, at their present width.
    """

    def __init__(self, groups: int, *, pinned: bool, packs: bool) -> None:
        self._groups = groups
        self._pinned = pinned
        self._packs = packs
        self._tokens = self._rows = self._columns = self._runs = 0
        self._shape = (0, 0, 0, 0)
        """Numbers of tokens, sequences, runs and table columns of the current step"""
        self._views: dict[int, DeviceFields] = {}
        """Fields of the current step, by the address of their memory"""
        self._copied: torch.cuda.Event | None = None
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._tables_at = 0
        """Offset of the block tables, in bytes"""
        self._table: npt.NDArray[np.int32] = np.zeros((0, 0), dtype=np.int32)
        self._filled: list[tuple[list[int], int]] = []
        """List of blocks of each row of the tables, and the number of its blocks that are copied"""
        self._fields: HostFields | None = None

    def holds(self, tokens: int, sequences: int, blocks: int, runs: int) -> bool:
        """Return whether a step of this size fits."""
        fields_fit = tokens <= self._tokens and sequences <= self._rows and runs <= self._runs
        return fields_fit and blocks <= self._columns

    def grow(self, tokens: int, sequences: int, blocks: int, runs: int) -> None:
        """Reallocate so that a step of this size fits. Empties the tables."""
        columns = table_width(blocks)
        self._tokens, self._runs = max(self._tokens, tokens), max(self._runs, runs)
        self._rows, self._columns = max(self._rows, sequences), max(self._columns, columns)
        self._tables_at = _fields_size(self._tokens, self._rows, self._runs, self._groups)
        rows = self._rows * self._groups
        size = self._tables_at + 4 * rows * self._columns
        self.memory = torch.zeros(size, dtype=torch.uint8, pin_memory=self._pinned)
        tables = self.memory[self._tables_at :].view(torch.int32).view(rows, -1)
        self._table = (torch.zeros_like(tables) if self._packs else tables).numpy()
        self._filled = [([], 0)] * rows
        self._fields = None

    def lay_out(
        self, tokens: int, tables: Sequence[list[int]], widest: int, runs: int
    ) -> HostFields:
        """Return the fields of a step. Waits until the last copy from this buffer has completed."""
        if self._copied is not None:
            self._copied.synchronize()
        for row, blocks in enumerate(tables):
            held, count = self._filled[row]
            if held is not blocks or count != len(blocks):
                start = count if held is blocks else 0
                self._table[row, start : len(blocks)] = blocks[start:]
                self._filled[row] = (blocks, len(blocks))
        shape = (tokens, len(tables) // self._groups, runs, table_width(widest))
        if self._fields is None or shape != self._shape:
            self._shape = shape
            self._views = {}
            staged = self.views(self.memory)
            fields = StepFields(*(getattr(staged, name).numpy() for name in _NAMES))
            filled = self._table.reshape(self._rows, self._groups, -1)
            _, rows, _, columns = self._shape
            self._fields = replace(fields, block_tables=filled[:rows, :, :columns])
        return self._fields

    def copy_to(self, memory: Tensor) -> None:
        """Start the copy of the current step's part to the same offset in the device's memory."""
        tokens, sequences, runs, _ = self._shape
        packed = self.views(self.memory).block_tables.numpy()
        assert self._fields is not None
        packed[:] = self._fields.block_tables
        begin = self._tables_at - _fields_size(tokens, sequences, runs, self._groups)
        end = self._tables_at + packed.nbytes
        memory[begin:end].copy_(self.memory[begin:end], non_blocking=True)
        if memory.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def views(self, memory: Tensor) -> DeviceFields:
        """Return the current step's fields in `memory`, which has the layout of this buffer."""
        address = memory.data_ptr()
        if address not in self._views:
            self._views[address] = self._view(memory)
        return self._views[address]

    def _view(self, memory: Tensor) -> DeviceFields:
        tokens, sequences, runs, columns = self._shape
        end = self._tables_at
        groups = self._groups
        begin = end - _fields_size(tokens, sequences, runs, groups)
        ints_at = begin + 8 * (4 + groups) * tokens
        longs = memory[begin:ints_at].view(torch.int64)
        ints = memory[ints_at:end].view(torch.int32)
        if self._packs:
            size = 4 * sequences * groups * columns
            tables = memory[end : end + size].view(torch.int32).view(sequences, groups, columns)
        else:
            tables = memory[end:].view(torch.int32).view(self._rows, groups, self._columns)
        singles, slots = longs.view(4 + groups, tokens).tensor_split((4,))
        token_ids, positions, sources, output_rows = singles
        query_starts, output_starts = ints[: 2 * sequences + 2].view(2, sequences + 1)
        shared_tokens, rest = ints[2 * sequences + 2 :].tensor_split((1,))
        context_lengths, rest = rest.tensor_split((sequences,))
        run_starts, run_sources, run_targets = rest[: 3 * runs + 1].split_with_sizes(
            (runs + 1, runs, runs)
        )
        return StepFields(
            token_ids,
            positions,
            slots,
            sources,
            output_rows,
            query_starts,
            output_starts,
            shared_tokens,
            context_lengths=context_lengths,
            run_starts=run_starts,
            run_sources=run_sources,
            run_targets=run_targets,
            block_tables=tables[:sequences, :, :columns],
        )


_NAMES = tuple(StepFields.__dataclass_fields__)


def _fields_size(tokens: int, sequences: int, runs: int, groups: int) -> int:
    """Return the aligned bytes of all fields but the block tables.

    The int64 fields have four numbers per token and one more per group. The int32 fields have three
    numbers per sequence, three per run, and four in addition.
    """
    size = 8 * (4 + groups) * tokens + 4 * (3 * sequences + 3 * runs + 4)
    return -(-size // _ALIGNMENT) * _ALIGNMENT
