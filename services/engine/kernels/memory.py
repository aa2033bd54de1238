"""CPU memory in huge pages, which make a pass over the weights 10 to 30 % faster."""

import contextlib
import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from services.engine.kernels.packed_file import PackedFile

__all__ = ["Arena", "allocate", "give_back_files", "give_back_freed", "populate_behind", "touch"]

_SLAB_BYTES = 64 << 20
_TOUCHED_AT_ONCE = 8
_POPULATED_AT_ONCE = 8 << 20
"""Bytes that one call faults in; during the call, the process can't map other memory"""
_MADV_POPULATE_WRITE = 23
"""Number of an advice of Linux 5.14 that Python does not define"""
_NICENESS = 19
_ALIGNMENT = 64
"""Bytes of a cache line"""


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate a zeroed CPU tensor in a mapping of its own, in huge pages if available.

    Small tensors would waste the rest of a page: take those from an `Arena`.
    """
    elements = max(prod(shape), 1)  # a mapping can't be empty
    memory = mmap.mmap(-1, elements * dtype.itemsize, flags=mmap.MAP_PRIVATE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # Linux built without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=elements)[: prod(shape)].view(shape)


def touch(tensors: Iterable[Tensor]) -> None:
    """Fault in the pages of zeroed CPU tensors now rather than on first use.

    The first write to a huge page takes 0.2 ms, and 4 to 14 ms in a virtual machine whose host must
    allocate it too; a host allocates several pages in parallel. A machine that lacks the memory
    kills the process here.
    """
    with ThreadPoolExecutor(_TOUCHED_AT_ONCE) as pool:
        for _ in pool.map(_touch, tensors):
            pass


def populate_behind(tensors: Sequence[Tensor]) -> threading.Thread:
    """Fault in the pages of CPU tensors in a thread, and leave their content.

    A KV cache of many gigabytes takes seconds, in which the first steps use only its first pages.
    Steps may write to the tensors meanwhile. As with `touch`, a machine that lacks the memory kills
    the process. Systems without such a call fault the pages in before this returns.
    Returns the thread.
    """
    pieces = [
        (tensor.data_ptr() + first, min(_POPULATED_AT_ONCE, tensor.nbytes - first))
        for first in range(0, max((each.nbytes for each in tensors), default=0), _POPULATED_AT_ONCE)
        for tensor in tensors
        if first < tensor.nbytes
    ]
    if pieces and not _populate(*pieces[0]):
        touch(tensors)
        pieces = []
    thread = threading.Thread(target=_populate_all, args=(pieces[1:], tensors), daemon=True)
    thread.start()
    return thread


def _populate_all(pieces: Sequence[tuple[int, int]], held: Sequence[Tensor]) -> None:
    """Fault in pieces, each an address and a size in bytes. held: tensors to keep meanwhile."""
    if sys.platform.startswith("linux"):  # where each thread has its own niceness
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    for address, num_bytes in pieces:
        _populate(address, num_bytes)


def _populate(address: int, num_bytes: int) -> bool:
    """Fault in a piece's pages; return False if the system has no such call."""
    if not sys.platform.startswith("linux"):
        return False
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    length = ctypes.c_size_t(address + num_bytes - first)
    madvise = ctypes.CDLL(None).madvise
    return bool(madvise(ctypes.c_void_p(first), length, _MADV_POPULATE_WRITE) == 0)


def _touch(tensor: Tensor) -> None:
    # One byte of each page. numpy, because torch would start more threads in each pool thread.
    tensor.view(-1).view(torch.uint8).numpy()[:: mmap.PAGESIZE] = 0


def give_back_files(files: Iterable[Path]) -> None:
    """Return the pages of mapped files to the system. Views read them again when they use them.

    Writes to private mappings of these files are lost.
    """
    if not sys.platform.startswith("linux"):
        return
    names = {str(file.resolve()) for file in files}
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, _, *name = line.split(maxsplit=5)
        if name and name[0] in names:
            begin, end = (int(address, 16) for address in addresses.split("-"))
            length = ctypes.c_size_t(end - begin)
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), length, mmap.MADV_DONTNEED)


def give_back_freed() -> None:
    """Return freed memory, which the allocator keeps, to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)


class Arena:
    """Allocator of tensors from large slabs; a slab lives as long as any tensor in it."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self.file: PackedFile | None = None
        """File that keeps packed weights for later starts; None = they are packed at every start"""

    def packed(self, what: str, pack: Callable[[], Tensor]) -> Tensor:
        """Return the next packed weight, flat: from the file if it is there, or else from `pack`.

        what: name of the product and of its form. Weights are packed in the same order at each
        start.
        """
        if self.file is None:
            return pack()
        if (form := self.file.form(what)) is not None:
            target = self.take(*form)
            if self.file.read(target):
                return target
        packed = pack()
        self.file.add(what, packed)
        return packed

    def take(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Allocate a zeroed tensor [elements], aligned to a cache line."""
        num_bytes = elements * dtype.itemsize
        if self._used + num_bytes > self._slab.numel():
            self._slab = allocate((max(_SLAB_BYTES, num_bytes),), torch.uint8)
            self._used = 0
        taken = self._slab[self._used : self._used + num_bytes].view(dtype)
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return taken

    def copy(self, tensor: Tensor) -> Tensor:
        """Copy a flat tensor into the arena."""
        return self.take(tensor.numel(), tensor.dtype).copy_(tensor)
