"""Choice among the implementations of Mamba's selective scan."""

import torch

from services.engine.kernels.library import native
from services.engine.model.architecture.selective_shape import SelectiveShape
from services.engine.model.mixers.native_selective_scan import NativeSelectiveScan
from services.engine.model.mixers.runs import RunGroups
from services.engine.model.mixers.selective_scan import SelectiveScan
from services.engine.model.mixers.torch_selective_scan import TorchSelectiveScan

__all__ = ["choose_selective_scan"]


def choose_selective_scan(
    shape: SelectiveShape, dtype: torch.dtype, device: torch.device, groups: RunGroups
) -> SelectiveScan:
    """Return the fastest implementation for this machine, dtype and shape."""
    if native is None or device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return TorchSelectiveScan(shape, dtype, device, groups)
    return NativeSelectiveScan(native, shape, dtype)
