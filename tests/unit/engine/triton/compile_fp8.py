"""The kernels of FP8 products for GPUs that need not be there."""

from collections.abc import Iterator
from typing import Any

from services.engine.model.operators import fp8_kernels
from tests.unit.engine.triton.gpus import Compiled, compile_kernel

__all__ = ["compile_all"]

LEAST_CAPABILITY = 89
TYPES = {
    "out": "*bf16",
    "bias": "*bf16",
    "weight": "*fp8e4nv",
    "numbers": "*u8",
    "scales": "*fp32",
    "row_scales": "*fp32",
    "count": "i32",
    "rows": "*bf16",
    "row": "*bf16",
}
POINTERS = tuple(name for name, each in TYPES.items() if each.startswith("*"))
ROUNDING = {"width": 4096, "largest": 448.0}
ROW = {"inputs": 4096, "outputs": 6144, "groups": 32, "adds": True}
SHAPE = {"inputs": 4096, "outputs": 6144, "groups": 32, "group": 128, "adds": True}
FP8_PRODUCTS = ("e4m3", "kind::f8f6f4")
"""Parts of the names of the instructions that multiply FP8; the second is that of B200"""


def compile_all(capability: int) -> Iterator[Compiled]:
    """Yield every kernel of FP8; none for GPUs that do not multiply it."""
    if capability < LEAST_CAPABILITY:
        return
    groups = {"groups": 32, "group": 128, "tile": 8}
    kernels: list[tuple[Any, dict[str, Any]]] = [
        (fp8_kernels._round_rows, ROUNDING | {"tile": 1024}),
        (fp8_kernels._round_groups, ROUNDING | groups),
        *(
            (fp8_kernels._multiply_row, ROW | {"tile_outputs": fp8_kernels._ROW_OUTPUTS} | tiles)
            for tiles in (
                {"groups": 1, "tile_groups": 1, "tile_inputs": 1024},
                {"tile_groups": 8, "tile_inputs": 128},
            )
        ),
    ]
    for kernel, constants in kernels:
        compiled = compile_kernel(kernel, capability, TYPES, constants, POINTERS)
        compiled.check()
        yield compiled
    for tile in dict.fromkeys(fp8_kernels._TILES + fp8_kernels._NARROW_TILES):
        compiled = compile_kernel(
            fp8_kernels._multiply_groups,
            capability,
            TYPES | {"rows": "*fp8e4nv"},
            SHAPE | {"tile_rows": tile.rows, "tile_outputs": tile.outputs},
            POINTERS,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        compiled.check(pipelined=True)
        assert any(name in compiled.ptx for name in FP8_PRODUCTS), "the product is not of FP8"
        yield compiled
