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

__all__ = ["HostFields", "Staging"]

_ALIGNMENT = 16
"""Bytes; the block tables begin at a multiple of it"""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepFields(Generic[T]):
    """A step's integers."""

    token_ids: T
    """int64 [tokens]"""
    positions: T
    """int64 [tokens]"""
    slots: T
    """int64 [tokens]"""
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
    """int32 [1]; not filled in if it is not known"""
    context_lengths: T
    """int32 [sequences]"""
    block_tables: T
    """int32 [sequences, `table_width`], already filled; arbitrary past a sequence's blocks"""


HostFields: TypeAlias = StepFields[npt.NDArray[np.signedinteger[Any]]]
"""Fields on the host, for the caller to fill in"""
DeviceFields: TypeAlias = StepFields[Tensor]
"""The same integers on the model's device"""


class Staging:
    """Staging of one step after another. Fields of a step are valid until the next one.

    A GPU has two pinned host buffers, used in turn: one is written while the other may still be
    copied. The one device buffer is written and read in launch order. It keeps its address, which
    CUDA graphs rely on, until a step exceeds the reserved size.
    """

    def __init__(self, device: torch.device, *, copies: bool | None = None) -> None:
        """copies: the device has memory of its own; None = if it is a GPU."""
        self._device = device
        is_cuda = device.type == "cuda"
        self._copies = is_cuda if copies is None else copies
        self._hosts = [
            _HostBuffer(pinned=is_cuda, packs=self._copies) for _ in range(2 if is_cuda else 1)
        ]
        self._on_device: Tensor | None = None

    def reserve(self, tokens: int, sequences: int, blocks: int) -> None:
        """Reserve memory for steps of up to this size. blocks: of one sequence."""
        for host in self._hosts:
            host.grow(tokens, sequences, blocks)

    def lay_out(
        self, tokens: int, tables: Sequence[list[int]], least_blocks: int = 1
    ) -> HostFields:
        """Return the fields of a step to fill in. tables: the blocks of each of its sequences.

        least_blocks: the tables are at least as wide as for a sequence of so many blocks.

        A list in `tables` may only grow from step to step: only blocks added to the same list
        object are copied.
        """
        widest = max(least_blocks, *map(len, tables))
        if not self._hosts[0].holds(tokens, len(tables), widest):
            self.reserve(2 * tokens, 2 * len(tables), 2 * widest)
        self._hosts.reverse()
        return self._hosts[0].lay_out(tokens, tables, widest)

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
    """Host memory: fields of varying length, which end where the block tables begin.

    The tables stay in place from step to step, because few sequences get a new block in a step.
    Where the buffer is copied, they are packed behind the fields, at the width in use.
    """

    def __init__(self, *, pinned: bool, packs: bool) -> None:
        self._pinned = pinned
        self._packs = packs
        self._tokens = self._rows = self._columns = 0
        self._shape = (0, 0, 0)
        """Tokens, sequences and table columns of the current step"""
        self._views: dict[int, DeviceFields] = {}
        """Fields of the current step, by the address of their memory"""
        self._copied: torch.cuda.Event | None = None
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._tables_at = 0
        """Offset of the block tables, in bytes"""
        self._table: npt.NDArray[np.int32] = np.zeros((0, 0), dtype=np.int32)
        self._filled: list[tuple[list[int], int]] = []
        """By row of the tables, its list of blocks and how many of them are copied"""
        self._fields: HostFields | None = None

    def holds(self, tokens: int, sequences: int, blocks: int) -> bool:
        """Return whether a step of this size fits."""
        return tokens <= self._tokens and sequences <= self._rows and blocks <= self._columns

    def grow(self, tokens: int, sequences: int, blocks: int) -> None:
        """Reallocate so that a step of this size fits. Empties the tables."""
        columns = table_width(blocks)
        self._tokens = max(self._tokens, tokens)
        self._rows, self._columns = max(self._rows, sequences), max(self._columns, columns)
        self._tables_at = _fields_size(self._tokens, self._rows)
        size = self._tables_at + 4 * self._rows * self._columns
        self.memory = torch.zeros(size, dtype=torch.uint8, pin_memory=self._pinned)
        tables = self.memory[self._tables_at :].view(torch.int32).view(self._rows, -1)
        self._table = (torch.zeros_like(tables) if self._packs else tables).numpy()
        self._filled = [([], 0)] * self._rows
        self._fields = None

    def lay_out(self, tokens: int, tables: Sequence[list[int]], widest: int) -> HostFields:
        """Return the fields of a step, after the copy of the last step from here has completed."""
        if self._copied is not None:
            self._copied.synchronize()
        for row, blocks in enumerate(tables):
            held, count = self._filled[row]
            if held is not blocks or count != len(blocks):
                start = count if held is blocks else 0
                self._table[row, start : len(blocks)] = blocks[start:]
                self._filled[row] = (blocks, len(blocks))
        shape = (tokens, len(tables), table_width(widest))
        if self._fields is None or shape != self._shape:
            self._shape = shape
            self._views = {}
            staged = self.views(self.memory)
            fields = StepFields(*(getattr(staged, name).numpy() for name in _NAMES))
            rows, columns = self._shape[1:]
            self._fields = replace(fields, block_tables=self._table[:rows, :columns])
        return self._fields

    def copy_to(self, memory: Tensor) -> None:
        """Start the copy of the current step's part to the same offset in the device's memory."""
        tokens, sequences, columns = self._shape
        packed = self.views(self.memory).block_tables.numpy()
        packed[:] = self._table[:sequences, :columns]
        begin = self._tables_at - _fields_size(tokens, sequences)
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
        tokens, sequences, columns = self._shape
        end = self._tables_at
        begin = end - _fields_size(tokens, sequences)
        longs = memory[begin : begin + 40 * tokens].view(torch.int64)
        ints = memory[begin + 40 * tokens : end].view(torch.int32)
        if self._packs:
            size = 4 * sequences * columns
            tables = memory[end : end + size].view(torch.int32).view(sequences, columns)
        else:
            tables = memory[end:].view(torch.int32).view(self._rows, self._columns)
        token_ids, positions, slots, sources, output_rows = longs.view(5, tokens)
        query_starts, output_starts = ints[: 2 * sequences + 2].view(2, sequences + 1)
        shared_tokens, rest = ints[2 * sequences + 2 :].tensor_split((1,))
        return StepFields(
            token_ids,
            positions,
            slots,
            sources,
            output_rows,
            query_starts,
            output_starts,
            shared_tokens,
            context_lengths=rest[:sequences],
            block_tables=tables[:sequences, :columns],
        )


_NAMES = tuple(StepFields.__dataclass_fields__)


def _fields_size(tokens: int, sequences: int) -> int:
    """Return the aligned bytes of five int64 per token, and three int32 per sequence and beside."""
    size = 40 * tokens + 4 * (3 * sequences + 3)
    return -(-size // _ALIGNMENT) * _ALIGNMENT
