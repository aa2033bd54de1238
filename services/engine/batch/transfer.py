"""Asynchronous copies between host and device. On the CPU nothing is copied."""

import torch
from torch import Tensor

__all__ = ["HostCopy", "to_device"]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor's copy on a device, for later launches, without waiting.

    An ordinary copy of memory that is not pinned waits for everything launched before it.
    """
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """A tensor's copy to the host, complete once everything launched before it has run."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> Tensor:
        """Wait for the copy, and return it."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
