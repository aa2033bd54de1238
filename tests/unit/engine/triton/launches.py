"""Counter of the kernels that a GPU would launch for a call."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

__all__ = ["Launches"]


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names of the kernels of Triton and of the operations of torch that launch one, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self._is_in_kernel = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_free = func.is_view or "empty" in str(func) or "detach" in str(func)
        if not is_free and not self._is_in_kernel:
            self.names.append(str(func))
        return result

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what is launched in this context."""
        run = InterpretedFunction.run

        def counting(kernel: Any, *args: Any, **options: Any) -> Any:
            self.names.append(kernel.fn.__name__)
            self._is_in_kernel = True  # the interpreter computes with torch
            try:
                return run(kernel, *args, **options)
            finally:
                self._is_in_kernel = False

        with patch.object(InterpretedFunction, "run", counting), self:
            yield
