"""Triton's interpreter with products in bfloat16, without work that it repeats at each call."""

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """Make Triton's interpreter run kernels in less than half of its time.

    - It patches triton.language at each launch and again at each call of a function of a kernel.
      Here the launch patches what all these functions see.
    - It checks each sum and product of integers for overflow, in integers of 64 bits. An index
      that overflows reads or writes another place, so comparisons of the outputs find it too.
    - It makes a table of dtypes for each tensor.
    """
    if "TRITON_INTERPRET" not in os.environ:
        yield
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    language = interpreter.tl
    patch_functions: Callable[[Any], object] = interpreter._patch_lang
    any_function = SimpleNamespace(__globals__={"tl": language, "core": language.core})
    unchecked = interpreter.InterpreterOptions(sanitize_overflow=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", lambda _: patch_functions(any_function))
        patch.setattr(interpreter.InterpretedFunction, "__call__", _call)
        patch.setattr(interpreter.interpreter_builder, "options", unchecked)
        patch.setattr(interpreter, "_get_np_dtype", _Dtypes(interpreter._get_np_dtype))
        _compute_bfloat16(interpreter, patch)
        yield


def _compute_bfloat16(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """Make the interpreter compute products and conversions in bfloat16 as a GPU does.

    It multiplies the bits as integers, and rounds half away from zero without a carry.
    """
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    language = interpreter.tl
    own = {name: getattr(builder, name) for name in ("cast_impl", "create_fp_to_fp")}
    fma, dot = builder.create_fma, builder.create_dot

    def is_half(value: Any) -> bool:
        return bool(value.dtype.scalar == language.bfloat16)

    def converted(name: str) -> Callable[..., Any]:
        def convert(self: Any, source: Any, kind: Any, *further: Any) -> Any:
            target = kind.scalar
            if is_half(source) and target.is_floating():
                widened = handle(_as_float32(source.data), language.float32)
                is_wide = target == language.float32
                return widened if is_wide else own[name](self, widened, kind, *further)
            if source.dtype.scalar == language.float32 and target == language.bfloat16:
                return handle(_as_bfloat16(source.data), target)
            return own[name](self, source, kind, *further)

        return convert

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if not is_half(z):
            return fma(self, x, y, z)
        one, other, addend = (_as_float32(each.data).astype(np.float64) for each in (x, y, z))
        exact = (one * other + addend).astype(np.float32)
        return handle(_as_bfloat16(exact), language.bfloat16)

    def create_dot(self: Any, a: Any, b: Any, *further: Any) -> Any:
        if is_half(a):
            a, b = (handle(_as_float32(each.data), language.float32) for each in (a, b))
        return dot(self, a, b, *further)

    for name in own:
        patch.setattr(builder, name, converted(name))
    patch.setattr(builder, "create_fma", create_fma)
    patch.setattr(builder, "create_dot", create_dot)

    def get_bf16(self: Any, value: float) -> Any:
        return handle(_as_bfloat16(np.array([value], np.float32)), language.bfloat16)

    patch.setattr(builder, "get_bf16", get_bf16, raising=False)


def _as_float32(bits: Any) -> Any:
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _as_bfloat16(numbers: Any) -> Any:
    """Round to the nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(numbers), 0x7FC0, rounded).astype(np.uint16)


def _call(function: Any, *args: object, **options: object) -> object:
    """Call a function of a kernel that runs."""
    return function.rewrite()(*args, **options)


class _Dtypes:
    """numpy's dtypes for those of Triton."""

    def __init__(self, find: Callable[[Any], np.dtype[Any]]) -> None:
        self._find = find
        self._found: dict[str, np.dtype[Any]] = {}

    def __call__(self, dtype: Any) -> np.dtype[Any]:
        name = dtype.scalar.name
        if name not in self._found:
            self._found[name] = self._find(dtype)
        return self._found[name]
