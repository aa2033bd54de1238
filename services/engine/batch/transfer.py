"""Between the host and a device, without waiting for either. On the CPU nothing is copied."""

import torch
from torch import Tensor

__all__ = ["Fetch", "to_device"]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on a device, for what is launched from now on; the host does not wait.

    An ordinary copy of memory that is not pinned waits for everything launched before it.
    """
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class Fetch:
    """A tensor on its way to the host, there once what was launched before has run."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> Tensor:
        """The tensor on the host; returns when it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
