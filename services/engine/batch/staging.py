"""Where a step's integers are laid out: in one stretch of memory, which one copy takes to a device.

On the CPU the stretch itself is what the model reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.engine.batch.buckets import table_width

__all__ = ["Fields", "Staging"]

_ALIGNMENT = 16
"""Bytes; what lies before the block tables ends at a multiple of it"""


@dataclass(frozen=True, slots=True)
class Fields:
    """A step's integers on the host, to be filled in."""

    token_ids: npt.NDArray[np.int64]
    """int64 [tokens]"""
    positions: npt.NDArray[np.int64]
    """int64 [tokens]"""
    slots: npt.NDArray[np.int64]
    """int64 [tokens]"""
    sources: npt.NDArray[np.int64]
    """int64 [tokens], where a token id that is still on the device lies among its like, or -1"""
    kept: npt.NDArray[np.int64]
    """int64 [tokens], of which some, in front, are filled in"""
    query_starts: npt.NDArray[np.int32]
    """int32 [sequences + 1]"""
    kept_starts: npt.NDArray[np.int32]
    """int32 [sequences + 1]"""
    context_lengths: npt.NDArray[np.int32]
    """int32 [sequences]"""
    block_tables: npt.NDArray[np.int32]
    """int32 [sequences, `table_width`], filled in already; behind a sequence's blocks stand any"""


@dataclass(frozen=True, slots=True)
class Staged:
    """The same where the model reads them, as tensors."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    sources: Tensor
    kept: Tensor
    query_starts: Tensor
    kept_starts: Tensor
    context_lengths: Tensor
    block_tables: Tensor


class Staging:
    """Lays out one step after another. What it gave for one is valid until the next.

    For a device there are two stretches of pinned memory, which take turns: one is written while
    the other may still be copied. On the device there is one, written and read in the order of what
    is launched. It lies where it lay before, unless a step is larger than any before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        is_cuda = device.type == "cuda"
        self._hosts = [_Stretch(pinned=is_cuda) for _ in range(2 if is_cuda else 1)]
        self._on_device: Tensor | None = None

    def reserve(self, tokens: int, sequences: int, blocks: int) -> None:
        """Make room for steps of so many tokens and sequences with so many blocks each."""
        for host in self._hosts:
            host.grow(tokens, sequences, blocks)

    def lay_out(self, tokens: int, tables: Sequence[list[int]]) -> Fields:
        """Room for the integers of a step; `tables` are the blocks of each of its sequences.

        A sequence's list of blocks may only grow from step to step; it is known by its identity.
        """
        widest = max(map(len, tables))
        if not self._hosts[0].holds(tokens, len(tables), widest):
            self.reserve(2 * tokens, 2 * len(tables), 2 * widest)
        self._hosts.reverse()
        return self._hosts[0].lay_out(tokens, tables, widest)

    def send(self) -> Staged:
        """What was filled in, on the device."""
        host = self._hosts[0]
        if self._device.type == "cpu":
            return host.views(host.memory)
        if self._on_device is None or self._on_device.shape != host.memory.shape:
            self._on_device = torch.empty_like(host.memory, device=self._device)
        host.copy_to(self._on_device)
        return host.views(self._on_device)


class _Stretch:
    """Host memory: fields of varying length, then the block tables, which begin at a fixed place.

    The tables stay from step to step, since few sequences get a block in each.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._tokens = self._rows = self._columns = 0
        self._shape = (0, 0, 0)
        """Tokens, sequences and columns of the step at hand"""
        self._views: dict[int, Staged] = {}
        """Of the step at hand, by the address of the memory that they view"""
        self._copied: torch.cuda.Event | None = None
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._table: npt.NDArray[np.int32] = np.zeros((0, 0), dtype=np.int32)
        self._filled: list[tuple[list[int], int]] = []
        """By row of the tables, the blocks that it holds, and how many they were"""
        self._fields: Fields | None = None

    def holds(self, tokens: int, sequences: int, blocks: int) -> bool:
        """Whether a step of this size fits."""
        return tokens <= self._tokens and sequences <= self._rows and blocks <= self._columns

    def grow(self, tokens: int, sequences: int, blocks: int) -> None:
        """Until a step of this size fits. The tables are empty again."""
        columns = table_width(blocks)
        self._tokens = max(self._tokens, tokens)
        self._rows, self._columns = max(self._rows, sequences), max(self._columns, columns)
        size = _fields_size(self._tokens, self._rows) + 4 * self._rows * self._columns
        self.memory = torch.zeros(size, dtype=torch.uint8, pin_memory=self._pinned)
        begin = self._tables_at
        self._table = self.memory[begin:].view(torch.int32).view(self._rows, -1).numpy()
        self._filled = [([], 0)] * self._rows
        self._fields = None

    def lay_out(self, tokens: int, tables: Sequence[list[int]], widest: int) -> Fields:
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
            self._fields = Fields(*(getattr(staged, name).numpy() for name in _NAMES))
        return self._fields

    def copy_to(self, memory: Tensor) -> None:
        """Copy what the step at hand uses to the same place in the device's memory."""
        tokens, sequences, _ = self._shape
        begin = self._tables_at - _fields_size(tokens, sequences)
        end = self._tables_at + 4 * sequences * self._columns
        memory[begin:end].copy_(self.memory[begin:end], non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()

    def views(self, memory: Tensor) -> Staged:
        """The fields of the step at hand in `memory`, which is laid out like this one."""
        address = memory.data_ptr()
        if address not in self._views:
            self._views[address] = self._view(memory)
        return self._views[address]

    def _view(self, memory: Tensor) -> Staged:
        tokens, sequences, columns = self._shape
        end = self._tables_at
        begin = end - _fields_size(tokens, sequences)
        longs = memory[begin : begin + 40 * tokens].view(torch.int64)
        ints = memory[begin + 40 * tokens : end].view(torch.int32)
        tables = memory[end:].view(torch.int32).view(self._rows, self._columns)
        token_ids, positions, slots, sources, kept = longs.view(5, tokens)
        query_starts, kept_starts = ints[: 2 * sequences + 2].view(2, sequences + 1)
        rest = ints[2 * sequences + 2 :]
        return Staged(
            token_ids,
            positions,
            slots,
            sources,
            kept,
            query_starts,
            kept_starts,
            context_lengths=rest[:sequences],
            block_tables=tables[:sequences, :columns],
        )

    @property
    def _tables_at(self) -> int:
        return _fields_size(self._tokens, self._rows)


_NAMES = tuple(Fields.__dataclass_fields__)


def _fields_size(tokens: int, sequences: int) -> int:
    """Bytes before the tables: five int64 for each token, three int32 for each sequence and two."""
    size = 40 * tokens + 4 * (3 * sequences + 2)
    return -(-size // _ALIGNMENT) * _ALIGNMENT
