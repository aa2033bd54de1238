"""Which dtype the model computes in."""

import torch

__all__ = ["resolve_dtype"]

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def resolve_dtype(name: str) -> torch.dtype:
    """The dtype of a --dtype value. Raises ValueError for a name that is not one.

    `auto` is bfloat16 where the hardware multiplies it (CUDA, AMX, AVX-512 BF16) and float32
    elsewhere, because emulated bfloat16 is slower than float32.
    """
    if name == "auto":
        return torch.bfloat16 if _multiplies_bfloat16() else torch.float32
    if name not in _DTYPES:
        raise ValueError(f"dtype {name} is not one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _multiplies_bfloat16() -> bool:
    if torch.cuda.is_available():
        return True
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
