"""Process that multiplies by mapped experts while it may not read the pages of the others.

The process imports this module, so it imports no transformers.
"""

import ctypes
import mmap
from pathlib import Path

import numpy as np
import torch

from services.common.gguf.ggml_types import GgmlType
from services.engine.kernels.library import native
from services.engine.model.architecture.activation import SWIGLU
from services.engine.model.checkpoint.gguf_groups import read_groups
from services.engine.model.checkpoint.quantized import QuantizedWeight
from services.engine.model.operators.grouped_operators import GroupedOperators
from services.engine.model.operators.interface import ExpertWeights

EXPERTS, WIDTH = 6, 256
KEPT = (1, 4)
"""Experts whose pages may be read"""


def mix_without_others(folder: Path, chosen: tuple[int, int]) -> None:
    """Multiply by the chosen experts while the pages of all but KEPT can't be read."""
    assert native is not None
    files = [_without_others(folder / name) for name in ("gate", "up", "down")]
    operators = GroupedOperators(native, torch.float32)
    experts = (
        ExpertWeights(gate, up, down, None, None, None)
        for gate, up, down in zip(*files, strict=True)
    )
    mixture = operators.mixture(experts, EXPERTS, len(chosen), SWIGLU)
    rows, out = torch.randn(1, WIDTH), torch.zeros(1, WIDTH)
    mixture.add_to(rows, torch.tensor([chosen]), torch.ones(1, len(chosen)), out)
    assert out.abs().sum() > 0


def _without_others(file: Path) -> list[QuantizedWeight]:
    with file.open("rb") as opened:
        memory = mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_PRIVATE)
    data = torch.frombuffer(memory, dtype=torch.uint8).numpy()
    experts = [part.reshape(WIDTH, -1) for part in np.split(data, EXPERTS)]
    weights = [read_groups(expert, GgmlType.Q8_0, mapped=True) for expert in experts]
    assert experts[0].nbytes % mmap.PAGESIZE == 0
    for number, expert in enumerate(experts):
        if number not in KEPT:
            size = ctypes.c_size_t(expert.nbytes)
            ctypes.CDLL(None).mprotect(ctypes.c_void_p(expert.ctypes.data), size, 0)
    return [weight for weight in weights if weight is not None]
