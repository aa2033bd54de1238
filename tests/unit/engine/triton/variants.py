"""Counter of the variants that Triton would compile of a kernel for a GPU.

Triton compiles a kernel once more where an address is a multiple of 16 bytes in one launch and not
in another, or where an integer is 1 or a multiple of 16 in one alone.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

__all__ = ["Variants"]

_BACKEND = make_backend(GPUTarget("cuda", 90, 32))


class Variants:
    """Variants of each kernel that the interpreter runs, by the kernel's name."""

    def __init__(self) -> None:
        self.of: defaultdict[str, set[str]] = defaultdict(set)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the variants of what is launched in this context."""
        run = InterpretedFunction.run

        def counting(kernel: Any, *args: Any, **options: Any) -> Any:
            compiled = JITFunction(kernel.fn, **kernel.kwargs)
            bind = create_function_from_signature(compiled.signature, compiled.params, _BACKEND)
            given = {name: each for name, each in options.items() if name not in ("grid", "warmup")}
            _, specialization, others = bind(*args, **given)
            self.of[kernel.fn.__name__].add(f"{specialization} {others}")
            return run(kernel, *args, **options)

        with patch.object(InterpretedFunction, "run", counting):
            yield
