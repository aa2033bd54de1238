"""The kernels between matrix products, for GPUs that need not be there."""

from collections.abc import Iterator
from typing import Any

from services.engine.model.operators import fused_kernels
from tests.unit.engine.triton.gpus import OF_EACH_MEMORY, Compiled, compile_kernel

__all__ = ["compile_all"]

COUNTS = (
    *("row_stride", "out_stride", "columns", "token_stride", "num_heads", "num_queries", "half"),
    "groups",
)
NUMBERS = dict.fromkeys(("epsilon", "alpha", "limit"), "fp32")
SIZES = dict.fromkeys(COUNTS, "i32")
KINDS = tuple(fused_kernels._KINDS.values())
EXACT: dict[str, Any] = {"numbers": None, "scales": None, "largest": 448.0, "group": 1}
"""Constants of kernels that do not round their output to FP8"""
ROUNDED = {"numbers": "*u8", "scales": "*fp32"}
KERNELS: list[tuple[Any, dict[str, Any]]] = [
    *((fused_kernels._norm, {"adds": adds, "width": 4096} | EXACT) for adds in (False, True)),
    *(
        (fused_kernels._rotate, {"has_norms": norms, "tile_heads": 4, "width": 64})
        for norms in (False, True)
    ),
    *(
        (fused_kernels._activate, {"kind": kind, "gated": gated, "width": 1024} | EXACT)
        for kind in KINDS
        for gated in (False, True)
    ),
]


ROUNDING: list[tuple[Any, dict[str, Any], int]] = [
    (fused_kernels._norm, {"adds": False, "width": 4096}, 4096),
    (fused_kernels._norm, {"adds": False, "width": 8192}, 128),
    (fused_kernels._activate, {"kind": 0, "gated": True, "width": 16384}, 16384),
    (fused_kernels._activate, {"kind": 0, "gated": True, "width": 1024}, 128),
]
"""Kernels that round their output, their constants, and the number of values with one scale"""


def compile_all(capability: int) -> Iterator[Compiled]:
    """Yield every kernel between products, for each dtype on a GPU of each kind of memory."""
    for dtype in ("bf16", "fp16", "fp32") if capability in OF_EACH_MEMORY else ("bf16",):
        known = {"cosines": "*fp32", "sines": "*fp32", **SIZES, **NUMBERS}
        for kernel, constants in KERNELS:
            types = {name: known.get(name, f"*{dtype}") for name in kernel.arg_names}
            compiled = compile_kernel(kernel, capability, types, constants)
            compiled.check()
            if compiled.is_dependent and kernel is fused_kernels._norm:
                assert compiled.early_reads == {"weight"}, "weights come late"
            yield compiled
    for kernel, constants, group in ROUNDING:
        types = {name: ({**known, **ROUNDED}).get(name, "*bf16") for name in kernel.arg_names}
        constants = constants | {"largest": 448.0, "group": group}
        warps = fused_kernels._warps(constants["width"])
        compiled = compile_kernel(kernel, capability, types, constants, num_warps=warps)
        compiled.check()
        yield compiled
