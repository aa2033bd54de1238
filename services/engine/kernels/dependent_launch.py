"""Programmatic dependent launch: a kernel of a GPU starts while the one before it ends.

The kernels of a decode layer take some microseconds each, and the GPU idles between two of them.
From compute capability 9.0 on, a kernel with this attribute starts once all programs of the one
before allow it. It computes addresses, loads weights, and then waits until all kernels before have
ended.
The CUDA programming guide calls this "programmatic dependent launch", the PTX manual
`griddepcontrol`. CUDA graphs hold such launches.

Every kernel that is launched with `launch_options` keeps these rules:

- Each program calls `grid_waits.wait_for_writes`, and no branch or return comes before the call. A
  kernel that ends without waiting could end before the kernel in front of it, and the next kernel
  would read what is not yet written.
- Before the call it reads weights alone, which no kernel of a step writes, and it writes nothing:
  the kernel in front may still read what this one overwrites.
- The next kernel may start once this one has waited, so at most two run at the same time.

A kernel without the attribute, such as one of cuBLAS, starts when the one before has ended.
"""

from functools import cache

import torch

__all__ = ["has_dependent_launch", "launch_options", "use_dependent_launch"]

_LEAST_CAPABILITY = (9, 0)


class _Switch:
    """Choice of the operator for this process."""

    is_on = False


def use_dependent_launch(is_on: bool) -> None:
    """Choose whether launches from now on have the attribute; captured graphs stay as they are."""
    _Switch.is_on = is_on


@cache
def has_dependent_launch(device: torch.device) -> bool:
    """Return whether a device is a GPU of NVIDIA that has programmatic dependent launch."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


def launch_options(device: torch.device) -> dict[str, bool]:
    """Return the arguments by which a launch on this device says whether it is a dependent one."""
    if _Switch.is_on and has_dependent_launch(device):
        return {"is_dependent": True, "launch_pdl": True}
    return {"is_dependent": False}
