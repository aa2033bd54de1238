"""Choice among the implementations of Mamba-2's scan."""

import torch

from services.engine.kernels.library import native
from services.engine.model.architecture.mamba_shape import MambaShape
from services.engine.model.mixers.mamba_scan import MambaScan
from services.engine.model.mixers.native_mamba_scan import NativeMambaScan
from services.engine.model.mixers.runs import RunGroups
from services.engine.model.mixers.torch_mamba_scan import TorchMambaScan

__all__ = ["choose_mamba_scan"]


def choose_mamba_scan(
    shape: MambaShape, dtype: torch.dtype, device: torch.device, groups: RunGroups
) -> MambaScan:
    """Return the fastest implementation for this machine, dtype and shape."""
    if native is None or device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return TorchMambaScan(shape, dtype, device, groups)
    return NativeMambaScan(native, shape, dtype)
