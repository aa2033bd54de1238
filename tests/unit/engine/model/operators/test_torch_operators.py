"""Operators in plain torch on a device that is not a CPU: torch's meta device, without numbers."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from services.engine.model.operators.torch_operators import TorchOperators

META = torch.device("meta")


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators that torch computes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(function))
        return function(*args, **kwargs or {})


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


@pytest.mark.parametrize("biased", [False, True])
def test_gpu_computes_logits_in_float32_in_one_pass(biased: bool) -> None:
    """Logits rounded to bfloat16 tie at the top, and another token may win."""
    operators = TorchOperators(torch.bfloat16, META)
    product = operators.projection(empty(48, 32), empty(48) if biased else None)
    rows, logits = empty(3, 32), empty(3, 48, dtype=torch.float32)
    with _Calls() as calls:
        product.into(rows, logits)
    assert calls.names == ["aten.mm.dtype_out", *["aten.add_.Tensor"] * biased]
