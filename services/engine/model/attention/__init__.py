"""Attention over a paged KV cache, behind one interface for all backends."""

import logging

import torch

from services.common.settings import StartupError
from services.engine.kernels.library import native
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.architecture.tiling import runs_in_tiles
from services.engine.model.attention.interface import AttentionBackend, AttentionStep, KVCache
from services.engine.model.attention.kv_dtype import require_fp8, resolve_kv_dtype
from services.engine.model.attention.native_backend import NativeAttention, TiledAttention
from services.engine.model.attention.pair_scores import PairScores
from services.engine.model.attention.text_backend import TextAttention
from services.engine.model.attention.torch_backend import TorchAttention
from tokenwire.extras import install_command

__all__ = ["AttentionBackend", "AttentionStep", "KVCache", "choose_backend"]

_LOG = logging.getLogger("loop")
_LEAST_CAPABILITY = (8, 0)
"""Least compute capability that the fast kernels need"""


def choose_backend(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    *,
    pair_scores: PairScores | None = None,
    tiled: bool = True,
    with_xformers: bool = False,
    kv_dtype: str = "model",
) -> AttentionBackend:
    """Return the fastest backend for this machine, dtype and shape.

    pair_scores: addends to the scores; torch computes attention with them. tiled: whether the
    operators read and write tiles where the machine has the kernels. with_xformers: decode with
    xformers' kernel on a GPU. kv_dtype: type of the cache, as for `resolve_kv_dtype`. Raises
    StartupError if xformers is not installed or can't run on the installed Triton, or the cache
    can't have that type.
    """
    cached = resolve_kv_dtype(kv_dtype, spec, dtype, device)
    if pair_scores is not None:
        return TextAttention(spec, dtype, device, pair_scores)
    if device.type == "cuda":
        return _on_cuda(spec, dtype, device, cached, with_xformers)
    is_plain = all(layer.is_plain for layer in spec.attention_layers.values())
    if spec.is_encoder and is_plain and not (tiled and runs_in_tiles(spec, dtype, device)):
        return TextAttention(spec, dtype, device)
    if native is None or device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return TorchAttention(spec, dtype, device)
    in_tiles = tiled and runs_in_tiles(spec, dtype, device)
    if in_tiles and cached == dtype:
        return TiledAttention(native, spec)
    return NativeAttention(native, spec, cached, tiled=in_tiles)


def _on_cuda(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype,
    with_xformers: bool,
) -> AttentionBackend:
    """Return a backend over pages, or torch's if that can't run; the log has the reason.

    Raises StartupError if torch would have to read another type of cache than `dtype`.
    """
    capability = torch.cuda.get_device_capability(device)
    is_narrow = kv_dtype != dtype
    if is_narrow:
        require_fp8(capability)
    if capability < _LEAST_CAPABILITY:
        _LOG.warning(
            "torch computes attention, several times slower: the fast kernels need a GPU of "
            "compute capability 8.0, and this one has %d.%d",
            *capability,
        )
        return TorchAttention(spec, dtype, device)
    if with_xformers and is_narrow:
        raise StartupError("xformers reads no FP8. Start without --attention or --kv-dtype.")
    if with_xformers:
        return _with_xformers(spec, dtype, device)
    try:
        # Imported here, because only GPU machines need Triton.
        from services.engine.model.attention.paged_backend import PagedAttention
    except ImportError as error:
        if is_narrow:
            command = install_command("gpu")
            raise StartupError(
                f"--kv-dtype fp8: {error}; `{command}` installs what it needs."
            ) from error
        _LOG.warning(
            "torch computes attention, several times slower: %s; `%s` installs the fast kernels",
            error,
            install_command("gpu"),
        )
        return TorchAttention(spec, dtype, device)
    return PagedAttention(spec, dtype, device, kv_dtype)


def _with_xformers(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> AttentionBackend:
    try:
        # Imported here, because it takes seconds and is seldom installed.
        from services.engine.model.attention.xformers_backend import XformersAttention
    except ImportError as error:
        command = install_command("xformers")
        raise StartupError(
            f"--attention xformers: {error}; `{command}` installs what it needs."
        ) from error
    return XformersAttention(spec, dtype, device)
