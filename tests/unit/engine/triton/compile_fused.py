"""The kernels between matrix products, for GPUs that need not be there."""

from collections.abc import Iterator

from services.engine.model.operators import fused_kernels
from tests.unit.engine.triton.gpus import Compiled, compile_kernel

__all__ = ["compile_all"]

COUNTS = ("row_stride", "out_stride", "columns", "token_stride", "num_heads", "num_queries", "half")
NUMBERS = dict.fromkeys(("epsilon", "alpha", "limit"), "fp32")
SIZES = dict.fromkeys(COUNTS, "i32")
KINDS = tuple(fused_kernels._KINDS.values())
KERNELS = [
    *((fused_kernels._norm, {"adds": adds, "width": 4096}) for adds in (False, True)),
    *(
        (fused_kernels._rotate, {"has_norms": norms, "tile_heads": 4, "width": 64})
        for norms in (False, True)
    ),
    *(
        (fused_kernels._activate, {"kind": kind, "gated": gated, "width": 1024})
        for kind in KINDS
        for gated in (False, True)
    ),
]


def compile_all(capability: int) -> Iterator[Compiled]:
    """Yield every kernel between products, for each dtype."""
    for dtype in ("bf16", "fp16", "fp32"):
        known = {"cosines": "*fp32", "sines": "*fp32", **SIZES, **NUMBERS}
        for kernel, constants in KERNELS:
            types = {name: known.get(name, f"*{dtype}") for name in kernel.arg_names}
            compiled = compile_kernel(kernel, capability, types, constants)
            compiled.check()
            yield compiled
