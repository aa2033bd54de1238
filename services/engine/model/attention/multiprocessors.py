"""Number of multiprocessors of a device, which a launch must keep busy."""

from functools import cache

import torch

__all__ = ["count_multiprocessors"]

_INTERPRETED = 132
"""Number for the CPU, where Triton's interpreter runs the kernels: that of an H100"""


@cache
def count_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU, or of its part that this process may use."""
    if device.type != "cuda":
        return _INTERPRETED
    return torch.cuda.get_device_properties(device).multi_processor_count
