"""Asynchronous copies between host and device. On the CPU nothing is copied."""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["HostCopy", "Laps", "Mark", "copy_rows", "rows_of", "staging_buffer", "to_device"]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor's copy on a device, for later launches, without waiting.

    An ordinary copy of memory that is not pinned waits for everything launched before it.
    """
    if device.type == "cpu":
        return tensor
    pinned = tensor.pin_memory() if device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)


def staging_buffer(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return host memory with arbitrary content, to fill in and hand to `to_device` once.

    It is pinned for a GPU. Torch reuses pinned memory, but only after the copies from it have run.
    """
    return torch.empty(*shape, dtype=dtype, pin_memory=device.type == "cuda")


def rows_of(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Return some rows of a tensor, in ascending order: a view if the rows are consecutive.

    Indexing with a list would wait for the device.
    """
    first, last = rows[0], rows[-1]
    if last - first + 1 == len(rows):
        return tensor[first : last + 1]
    return copy_rows(tensor, rows)


def copy_rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Return a copy of some rows of a tensor, without waiting for the device."""
    return tensor.index_select(0, to_device(torch.tensor(rows, dtype=torch.int64), tensor.device))


class Mark:
    """A mark in the order of launches. On the CPU it is reached at once."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> None:
        """Wait until everything launched before has run."""
        if self._event is not None:
            self._event.synchronize()


class Laps:
    """Times of parts of what is launched. A GPU measures them, so that the host need not wait."""

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        """clock: returns seconds; it is read on the CPU alone."""
        self._clock = clock
        self._is_cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._readings: list[float] = []
        self.end()

    def end(self) -> None:
        """End a part of the launches; the next one begins."""
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._readings.append(self._clock())

    def seconds(self) -> list[float]:
        """Wait until all parts have run. Return the seconds of each."""
        if not self._is_cuda:
            return [end - begin for begin, end in itertools.pairwise(self._readings)]
        self._events[-1].synchronize()
        pairs = itertools.pairwise(self._events)
        return [begin.elapsed_time(end) / 1000 for begin, end in pairs]


class HostCopy:
    """A tensor's copy to the host, complete once everything launched before it has run."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
        self._copied = Mark(tensor.device)

    def wait(self) -> Tensor:
        """Wait for the copy, and return it."""
        self._copied.wait()
        return self._host
