"""The kernels of low-rank additions, for GPUs that need not be there."""

from collections.abc import Iterator
from typing import Any

import triton.language as tl

from services.engine.model.operators import low_rank_kernels
from tests.unit.engine.triton.gpus import OF_EACH_MEMORY, Compiled, compile_kernel

__all__ = ["compile_all"]

COUNTS = ("count", "inputs", "row_stride", "out_stride", "turns", "most_rank")
DTYPES = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
KNOWN = {
    **dict.fromkeys(COUNTS, "i32"),
    "low": "*fp32",
    "numbers": "*i32",
    "order": "*i64",
    "table": "*i64",
}


def compile_all(capability: int) -> Iterator[Compiled]:
    """Yield both kernels, for float32 scores too.

    A GPU with the most memory has each dtype, and a GPU of each kind few rows and many; others have
    many rows, whose tiles take the most memory.
    """
    names = DTYPES if capability == OF_EACH_MEMORY[-1] else ("bf16",)
    for name in names:
        dtype = DTYPES[name]
        for tile_rows in (16, 64) if capability in OF_EACH_MEMORY else (64,):
            shape: dict[str, Any] = {
                "parts": 3,
                "fields": low_rank_kernels.FIELDS,
                "tile_rows": tile_rows,
                "tile_ranks": low_rank_kernels._RANKS,
            }
            warps = low_rank_kernels.count_warps(tile_rows)
            inner = {"tile_inputs": low_rank_kernels.count_inputs(tile_rows)}
            outer = {
                "dtype": dtype,
                "tile_outputs": low_rank_kernels.count_outputs(tile_rows),
                "splits": low_rank_kernels.SPLITS[tile_rows][0],
            }
            types = {"rows": f"*{name}", **KNOWN}
            aligned = ("low", "rows", "table", "inputs", "row_stride", "out_stride", "out")
            shrink, expand = low_rank_kernels._shrink, low_rank_kernels._expand
            kernels = [(shrink, shape | inner, types)]
            kernels += [
                (expand, shape | outer, types | {"out": f"*{out}"}) for out in {name, "fp32"}
            ]
            for kernel, constants, own in kernels:
                compiled = compile_kernel(
                    kernel, capability, own, constants, aligned, num_warps=warps
                )
                compiled.check()
                yield compiled
