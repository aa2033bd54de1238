"""Attention over a paged cache. Nothing outside this folder knows which backend is at work."""

import torch
from torch import Tensor

from services.engine.kernels.library import native
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.architecture.tiling import runs_in_tiles
from services.engine.model.attention.interface import AttentionBackend, KVCache
from services.engine.model.attention.native_backend import NativeAttention, TiledAttention
from services.engine.model.attention.torch_backend import TorchAttention

__all__ = ["AttentionBackend", "KVCache", "choose_backend"]


def choose_backend(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    sinks: tuple[Tensor, ...] | None = None,
) -> AttentionBackend:
    """The fastest backend that this machine, this dtype and this shape allow.

    `sinks`: for each layer, float32 [heads], where the family has them.
    """
    if device.type == "cuda":
        # Only here, so that xformers is needed only where it is used.
        from services.engine.model.attention.xformers_backend import XformersAttention

        return XformersAttention(spec, dtype, device, sinks)
    if native is None or device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return TorchAttention(spec, dtype, device, sinks)
    if runs_in_tiles(spec, dtype, device):
        return TiledAttention(native, spec, sinks)
    return NativeAttention(native, spec, dtype, sinks)
