"""Choice of the type of cached keys and values."""

import torch

from services.common.settings import StartupError
from services.engine.kernels.library import InstructionSet, native
from services.engine.model.architecture.spec import ModelSpec

__all__ = ["WIDEST_HEAD", "require_fp8", "resolve_kv_dtype"]

_COMPUTED = (torch.float32, torch.bfloat16)
"""Types that the kernels compute in"""
_LEAST_FP8 = (8, 9)
"""Least compute capability that converts FP8"""
_MULTIPLIED = (torch.float16, torch.bfloat16)
"""Types that a GPU's kernels compute in"""
WIDEST_HEAD = 512
"""Widest heads of the kernels of a GPU"""
_NAMED = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
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
    reason = _reason(spec, dtype, device, is_fp8=wanted == torch.float8_e4m3fn)
    if name == "auto" and reason is None and dtype == torch.float32 and _converts_float16():
        return torch.float16
    if wanted != dtype and reason is not None:
        raise StartupError(f"--kv-dtype {name}: {reason}. Start without it.")
    return wanted


def require_fp8(capability: tuple[int, int]) -> None:
    """Raise StartupError unless a GPU of this compute capability reads caches in FP8."""
    if capability < _LEAST_FP8:
        raise StartupError(
            "--kv-dtype fp8 needs a GPU of compute capability 8.9 (L4, H100, …), and this one "
            f"has {capability[0]}.{capability[1]}. Start without it."
        )


def _converts_float16() -> bool:
    return native is not None and native.instruction_set() >= InstructionSet.AVX2


def _reason(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, *, is_fp8: bool
) -> str | None:
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
        return _reason_on_gpu(spec, dtype, is_fp8)
    if is_fp8:
        return "a CPU keeps keys and values in 8 bits with --kv-dtype int8"
    if native is None or dtype not in _COMPUTED:
        return "only the compiled CPU kernels convert it, and they compute in float32 or bfloat16"
    return None


def _reason_on_gpu(spec: ModelSpec, dtype: torch.dtype, is_fp8: bool) -> str | None:
    if not is_fp8:
        return "a GPU keeps keys and values in --dtype or fp8"
    if dtype not in _MULTIPLIED:
        return "attention over FP8 is computed in --dtype bfloat16 or float16"
    if spec.widest_head > WIDEST_HEAD:
        return f"heads wider than {WIDEST_HEAD} are computed by torch, in --dtype"
    return None
