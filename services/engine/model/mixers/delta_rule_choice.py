"""Choice among the implementations of the gated delta rule."""

import torch

from services.engine.kernels.library import native
from services.engine.model.mixers.delta_rule import DeltaRule, DeltaShape
from services.engine.model.mixers.native_delta_rule import NativeDeltaRule
from services.engine.model.mixers.torch_delta_rule import TorchDeltaRule

__all__ = ["choose_delta_rule"]


def choose_delta_rule(shape: DeltaShape, dtype: torch.dtype, device: torch.device) -> DeltaRule:
    """Return the fastest implementation for this machine, dtype and shape."""
    if native is None or device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return TorchDeltaRule(shape, dtype, device)
    return NativeDeltaRule(native, shape, dtype)
