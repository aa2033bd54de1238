"""Triton's interpreter without work that it repeats at each call and operation."""

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
        yield


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
