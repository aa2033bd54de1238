"""File of one rank's packed weights, which later starts read instead of packing them again.

After the header come the weights in the order in which loading packs them, each at a multiple of
4 KiB, and an index in JSON.
"""

import contextlib
import fcntl
import json
import logging
import os
import shutil
import struct
import sys
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from stat import S_ISREG

import numpy as np
import torch
from torch import Tensor

__all__ = ["PackedFile"]

_LOG = logging.getLogger("loop")
_HEADER = struct.Struct("<16sQQI")
"""Magic, place and size of the index in bytes, and CRC-32 of the index"""
_MAGIC = b"tokenwire packed"
_ALIGNMENT = 4096
_PIECE_BYTES = 1 << 20
"""Bytes that a checksum covers: few enough to be in a core's cache when they are summed"""
_WORD = 8
_MODE = 0o600
_NICENESS = 19
_DTYPES = {str(each): each for each in (torch.uint8, torch.int8, torch.bfloat16)}


@dataclass(frozen=True, slots=True)
class _Entry:
    """A packed weight in the file."""

    what: str
    """Name of the product or expert whose weight was packed, and of the packed form"""
    dtype: str
    num_bytes: int
    place: int
    """Offset of the weight in the file, in bytes"""
    sums: Sequence[int]
    """Checksums of the weight's pieces"""


class _DamagedError(Exception):
    """The file does not hold the packed weights. The message gives the reason."""


class PackedFile:
    """The packed weights of one model and rank, which are read, or packed and then written.

    Reads stop at the first weight that differs from the expected one: the file is removed, and the
    rest is packed. Failures of the disk are warnings, and cost only the packing.
    """

    def __init__(self, directory: Path, name: str, key: str) -> None:
        """Open the file `name` if it was written for `key`, a fingerprint of everything that
        decides the packed bytes. Raises OSError for a directory that can't be opened."""
        self._name = name
        self._key = key
        self._path = directory / name
        self._directory = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        self._pool = ThreadPoolExecutor(max(1, torch.get_num_threads()))
        self._packed: list[tuple[str, Tensor]] = []
        self._next = 0
        self._keeps = True
        """True if packed weights are written to the file"""
        self._file: int | None = None
        self._entries: Sequence[_Entry] = ()
        try:
            self._file = self._opened(os.O_RDONLY)
            self._entries = self._index(self._file)
        except FileNotFoundError:
            pass
        except (OSError, _DamagedError) as error:
            _LOG.info("packing the weights anew: %s: %s", self._path, error)
            self._close()

    @property
    def is_read(self) -> bool:
        """True if all weights so far were read from the file."""
        return self._file is not None

    def form(self, what: str) -> tuple[int, torch.dtype] | None:
        """Return the size and type of the next weight; None if it has to be packed."""
        if self._file is None:
            return None
        entry = self._entries[self._next] if self._next < len(self._entries) else None
        if entry is None or entry.what != what:
            self._drop(f"it has no {what} in this place")
            return None
        dtype = _DTYPES[entry.dtype]
        return entry.num_bytes // dtype.itemsize, dtype

    def read(self, target: Tensor) -> bool:
        """Read the next weight into the flat `target`, which has its `form`. Return whether it is
        complete."""
        assert self._file is not None
        entry = self._entries[self._next]
        data = _bytes(target)
        firsts = range(0, entry.num_bytes, _PIECE_BYTES)
        file = self._file

        def read_piece(first: int) -> int | None:
            piece = data[first : first + _PIECE_BYTES]
            return _sum(piece) if _fill(file, piece, entry.place + first) else None

        # All pieces end before the file may be closed, so none raises.
        if list(self._pool.map(read_piece, firsts)) != list(entry.sums):
            self._drop("a piece of it can't be read, or has another checksum")
            return False
        self._next += 1
        return True

    def add(self, what: str, packed: Tensor) -> None:
        """Record a packed weight. The caller must not change it afterwards."""
        if self._keeps:
            self._packed.append((what, packed))

    def publish(self) -> threading.Thread:
        """Write the packed weights in a thread, after the last weight. Returns the thread.

        The file appears under its name only when it is complete and on the disk.
        """
        if self._file is not None and self._next < len(self._entries):
            self._drop("it holds more weights than the model")
        if self._file is not None:
            with contextlib.suppress(OSError):  # --packed-size keeps the files used last
                os.utime(self._file)
            _LOG.info("read the packed weights from %s", self._path)
        elif self._keeps and not self._packed:
            _LOG.warning("--packed-cache has no effect: these weights are not packed here")
        self._close()
        thread = threading.Thread(target=self._write, daemon=True)
        thread.start()
        return thread

    def _opened(self, flags: int, name: str | None = None) -> int:
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        file = os.open(name or self._name, flags, _MODE, dir_fd=self._directory)
        found = os.fstat(file)
        if not S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            os.close(file)
            raise _DamagedError("it is no file of this user")
        return file

    def _index(self, file: int) -> Sequence[_Entry]:
        header = os.pread(file, _HEADER.size, 0)
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise _DamagedError("it is no file of packed weights")
        _, place, num_bytes, checksum = _HEADER.unpack(header)
        if os.fstat(file).st_size != place + num_bytes:
            raise _DamagedError("it is truncated")
        index = os.pread(file, num_bytes, place)
        if zlib.crc32(index) != checksum:
            raise _DamagedError("its index is damaged")
        content = json.loads(index)
        if content["key"] != self._key:
            raise _DamagedError("the model's files or the program have changed")
        return [_Entry(**entry) for entry in content["entries"]]

    def _drop(self, reason: str) -> None:
        """Remove the file, so that the next start writes it anew."""
        _LOG.warning("packing the weights, and removing %s: %s", self._path, reason)
        self._keeps = False
        self._close()
        with contextlib.suppress(OSError):
            os.unlink(self._name, dir_fd=self._directory)

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self) -> None:
        try:
            if self._packed:
                self._write_all()
        except (OSError, _DamagedError) as error:
            _LOG.warning("the packed weights are not kept in %s: %s", self._path, error)
        finally:
            self._packed.clear()
            self._pool.shutdown()
            os.close(self._directory)

    def _write_all(self) -> None:
        if sys.platform.startswith("linux"):  # where each thread has a niceness of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        needed = sum(_rounded(packed.nbytes) for _, packed in self._packed)
        free = shutil.disk_usage(self._directory).free
        if free < needed:
            raise _DamagedError(f"{needed:,} bytes are needed, and {free:,} are free")
        # One name for all attempts, so that a process that was killed leaves one file at most.
        name = f"{self._name}.new"
        file = self._opened(os.O_WRONLY | os.O_CREAT, name)
        try:
            if not self._is_alone(file, name):
                return
            try:
                os.ftruncate(file, 0)
                self._write_to(file)
                os.rename(name, self._name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
            except OSError:
                os.unlink(name, dir_fd=self._directory)
                raise
        finally:
            os.close(file)
        os.fsync(self._directory)
        _LOG.info("kept %.2f GiB of packed weights in %s", needed / 2**30, self._path)

    def _is_alone(self, file: int, name: str) -> bool:
        """Return whether no other process writes this file, or has just published it."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            there = os.stat(name, dir_fd=self._directory, follow_symlinks=False)
        except (BlockingIOError, FileNotFoundError):
            return False
        return os.path.samestat(there, os.fstat(file))

    def _write_to(self, file: int) -> None:
        place, entries = _ALIGNMENT, []
        for what, packed in self._packed:
            data = _bytes(packed)
            sums = []
            for first in range(0, len(data), _PIECE_BYTES):
                piece = data[first : first + _PIECE_BYTES]
                sums.append(_sum(piece))
                _write_at(file, piece, place + first)
            entries.append(asdict(_Entry(what, str(packed.dtype), len(data), place, sums)))
            place += _rounded(len(data))
        index = json.dumps({"key": self._key, "entries": entries}).encode()
        _write_at(file, memoryview(index), place)
        header = _HEADER.pack(_MAGIC, place, len(index), zlib.crc32(index))
        _write_at(file, memoryview(header), 0)
        os.fsync(file)


def _fill(file: int, data: memoryview, place: int) -> bool:
    """Fill `data` from byte `place` of the file. Return whether the file has enough bytes."""
    done = 0
    with contextlib.suppress(OSError):
        while done < len(data) and (count := os.preadv(file, [data[done:]], place + done)):
            done += count
    return done == len(data)


def _write_at(file: int, data: memoryview, place: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], place + done)


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _bytes(flat: Tensor) -> memoryview:
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _sum(piece: memoryview) -> int:
    """Return the sum of a piece's 64-bit words, modulo 2 ** 64: as fast as memory is read."""
    whole = len(piece) // _WORD * _WORD
    words, rest = np.frombuffer(piece[:whole], np.uint64), np.frombuffer(piece[whole:], np.uint8)
    return (int(np.add.reduce(words)) + int(np.add.reduce(rest, dtype=np.uint64))) % 2**64
