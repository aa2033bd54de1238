"""Staging buffer of a step's integers: one allocation, so that one copy moves them to the device.

On the CPU the model reads the buffer itself.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.engine.batch.buckets import table_width
from services.engine.batch.shared_prefixes import most_prefixes

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
    rotary_positions: T
    """int64 [axes, tokens], as in `StepBatch`"""
    query_starts: T
    """int32 [sequences + 1]"""
    output_starts: T
    """int32 [sequences + 1]"""
    context_lengths: T
    """int32 [sequences]"""
    counts: T
    """int32 [2], as in `PaddedStep`; filled in for padded steps with chunks alone"""
    shared_tokens: T
    """int32 [sequences], as in `SharedPrefixes`; not filled in if no prefix is shared"""
    prefix_rows: T
    """int32 [sequences], as in `SharedPrefixes`"""
    prefix_starts: T
    """int32 [`most_prefixes` + 1], as in `SharedPrefixes`"""
    run_starts: T
    """int32 [runs + 1], first token of each run between states"""
    run_sources: T
    """int32 [runs]"""
    run_targets: T
    """int32 [runs]"""
    adapters: T
    """int32 [tokens], as in `StepBatch`; filled in only if a graph adds what adapters add"""
    image_rows: T
    """int32 [tokens], as in `StagedImages`; filled in only if a graph reads them"""
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
    CUDA graphs rely on, as long as `holds` is true of all steps.
    """

    def __init__(
        self, device: torch.device, groups: int = 1, axes: int = 0, *, copies: bool | None = None
    ) -> None:
        """groups: number of cache groups, each of which has its own tables.

        axes: number of rotary positions of a token; 0 = they are its position.

        copies: whether the device has its own memory; None = True for a GPU.
        """
        self._device = device
        is_cuda = device.type == "cuda"
        self._copies = is_cuda if copies is None else copies
        self._hosts = [
            _HostBuffer(groups, axes, pinned=is_cuda, packs=self._copies)
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

    def holds(
        self, tokens: int, tables: Sequence[list[int]], least_blocks: int = 1, runs: int = 0
    ) -> bool:
        """Return whether a step fits into the present memory; parameters of `lay_out`."""
        widest, sequences = self._extent(tables, least_blocks)
        return self._hosts[0].holds(tokens, sequences, widest, runs)

    def lay_out(
        self, tokens: int, tables: Sequence[list[int]], least_blocks: int = 1, runs: int = 0
    ) -> HostFields:
        """Return the fields of a step to fill in; move to larger memory if it does not fit.

        tables: the blocks of the first sequence in each group, then those of the next sequence.
        least_blocks: number of blocks of a sequence for which the tables must be wide enough.

        A list in `tables` may only grow from step to step: only blocks added to the same list
        object are copied.
        """
        widest, sequences = self._extent(tables, least_blocks)
        if not self._hosts[0].holds(tokens, sequences, widest, runs):
            self.reserve(2 * tokens, 2 * sequences, 2 * widest, 2 * runs)
        self._hosts.reverse()
        return self._hosts[0].lay_out(tokens, tables, widest, runs)

    def _extent(self, tables: Sequence[list[int]], least_blocks: int) -> tuple[int, int]:
        """Return the blocks of the widest table, and the number of sequences."""
        return max(least_blocks, *map(len, tables)), len(tables) // self._groups

    def send(self) -> DeviceFields:
        """Start the copy of the filled-in fields, and return them on the device."""
        host = self._hosts[0]
        if not self._copies:
            return host.views(host.memory)
        if self._on_device is None or self._on_device.shape != host.memory.shape:
            self._on_device = torch.empty_like(host.memory, device=self._device)
        host.copy_to(self._on_device)
        return host.views(self._on_device)


@dataclass(frozen=True, slots=True)
class _Shape:
    """Size of a step."""

    tokens: int
    sequences: int
    runs: int
    columns: int
    """Columns of the block tables"""


_Sizes: TypeAlias = Mapping[str, tuple[int, ...]]
"""Dimensions of fields, by name, in the order in which they lie in memory"""


class _HostBuffer:
    """Host memory of a step: fields of varying length, then the block tables at a fixed offset.

    The tables stay in place from step to step, because few sequences get a new block in a step.
    If the buffer is copied, the tables are packed behind the fields, at their present width.
    """

    def __init__(self, groups: int, axes: int, *, pinned: bool, packs: bool) -> None:
        self._groups = groups
        self._axes = axes
        self._pinned = pinned
        self._packs = packs
        self._tokens = self._rows = self._columns = self._runs = 0
        self._shape = _Shape(0, 0, 0, 0)
        """Size of the current step"""
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
        largest = _Shape(self._tokens, self._rows, self._runs, self._columns)
        self._tables_at = self._fields_size(largest)
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
        shape = _Shape(tokens, len(tables) // self._groups, runs, table_width(widest))
        if self._fields is None or shape != self._shape:
            self._shape = shape
            self._views = {}
            staged = self.views(self.memory)
            fields = StepFields(*(getattr(staged, name).numpy() for name in _NAMES))
            filled = self._table.reshape(self._rows, self._groups, -1)
            tables_of_step = filled[: shape.sequences, :, : shape.columns]
            self._fields = replace(fields, block_tables=tables_of_step)
        return self._fields

    def copy_to(self, memory: Tensor) -> None:
        """Start the copy of the current step's part to the same offset in the device's memory."""
        packed = self.views(self.memory).block_tables.numpy()
        assert self._fields is not None
        packed[:] = self._fields.block_tables
        begin = self._tables_at - self._fields_size(self._shape)
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
        shape, groups, end = self._shape, self._groups, self._tables_at
        longs, ints = self._long_fields(shape), _int_fields(shape)
        begin = end - self._fields_size(shape)
        ints_at = begin + 8 * _count(longs)
        rows, columns = self._rows, self._columns
        if self._packs:
            rows, columns = shape.sequences, shape.columns
        tables = memory[end : end + 4 * rows * groups * columns].view(torch.int32)
        return StepFields(
            **_split(memory[begin:ints_at].view(torch.int64), longs),
            **_split(memory[ints_at:end].view(torch.int32), ints),
            block_tables=tables.view(rows, groups, columns)[: shape.sequences, :, : shape.columns],
        )

    def _long_fields(self, shape: _Shape) -> _Sizes:
        """Return the int64 fields of a step."""
        tokens = (shape.tokens,)
        return {
            "token_ids": tokens,
            "positions": tokens,
            "slots": (self._groups, *tokens),
            "sources": tokens,
            "output_rows": tokens,
            "rotary_positions": (self._axes, *tokens),
        }

    def _fields_size(self, shape: _Shape) -> int:
        """Return the aligned bytes of all fields but the block tables."""
        size = 8 * _count(self._long_fields(shape)) + 4 * _count(_int_fields(shape))
        return -(-size // _ALIGNMENT) * _ALIGNMENT


_NAMES = tuple(StepFields.__dataclass_fields__)


def _int_fields(shape: _Shape) -> _Sizes:
    """Return the int32 fields of a step, without the block tables."""
    sequences, runs = shape.sequences, shape.runs
    return {
        "query_starts": (sequences + 1,),
        "output_starts": (sequences + 1,),
        "context_lengths": (sequences,),
        "counts": (2,),
        "shared_tokens": (sequences,),
        "prefix_rows": (sequences,),
        "prefix_starts": (most_prefixes(sequences) + 1,),
        "run_starts": (runs + 1,),
        "run_sources": (runs,),
        "run_targets": (runs,),
        "adapters": (shape.tokens,),
        "image_rows": (shape.tokens,),
    }


def _split(memory: Tensor, sizes: _Sizes) -> dict[str, Tensor]:
    """Return the fields that lie in memory, by name. There may be more memory behind them."""
    counts = [math.prod(each) for each in sizes.values()]
    parts = memory[: sum(counts)].split_with_sizes(counts)
    named = zip(sizes.items(), parts, strict=True)
    return {name: part.view(size) if len(size) > 1 else part for (name, size), part in named}


def _count(sizes: _Sizes) -> int:
    return sum(map(math.prod, sizes.values()))
