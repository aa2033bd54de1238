"""Choice of the type of cached keys and values."""

import torch

from services.common.settings import StartupError
from services.engine.kernels.library import InstructionSet, native
from services.engine.model.architecture.spec import ModelSpec

__all__ = ["resolve_kv_dtype"]

_COMPUTED = (torch.float32, torch.bfloat16)
"""Types that the kernels compute in"""
_NAMED = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
}


def resolve_kv_dtype(
    name: str, spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> torch.dtype:
    """Return the type of the cache that `name` asks for.

    name: a value of --kv-dtype: a type, "model" (which means `dtype`), or "auto" (the same, but
    float16 instead of float32 where the CPU converts it; its precision is 8 times bfloat16's).
    Raises StartupError with the reason if the cache can't have that type.
    """
    wanted = _NAMED.get(name, dtype)
    reason = _reason(spec, dtype, device)
    if name == "auto" and reason is None and dtype == torch.float32 and _converts_float16():
        return torch.float16
    if wanted != dtype and reason is not None:
        raise StartupError(f"--kv-dtype {name}: {reason}. Start without it.")
    return wanted


def _converts_float16() -> bool:
    return native is not None and native.instruction_set() >= InstructionSet.AVX2


def _reason(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why keys and values can't have another type than `dtype`; None if they can."""
    if spec.is_encoder:
        return f"{spec.architecture} is an encoder, which keeps nothing of earlier tokens"
    if spec.latent_layers or spec.compressed_layers:
        return f"{spec.architecture} keeps latents instead of keys and values, in --dtype"
    if spec.relative_layers:
        return f"{spec.architecture} keeps keys and values in rows for torch, in --dtype"
    if not spec.paged_layers:
        return f"{spec.architecture} keeps states, and neither keys nor values"
    if device.type != "cpu":
        return "a GPU keeps keys and values in --dtype"
    if native is None or dtype not in _COMPUTED:
        return "only the compiled CPU kernels convert it, and they compute in float32 or bfloat16"
    return None
