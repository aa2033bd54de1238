"""Compiles the kernels of FP8 products for GPUs that need not be there.

`python -m tests.unit.engine.triton.compile_fp8 89 90` prints a line for each kernel.
"""

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from services.engine.model.operators import fp8_kernels
from tests.unit.engine.triton.compile_attention import _resources

SHARED_MEMORY = 99 << 10
TYPES = {
    "out": "*bf16",
    "bias": "*bf16",
    "weight": "*fp8e4nv",
    "numbers": "*u8",
    "scales": "*fp32",
    "row_scales": "*fp32",
    "count": "i32",
}
ROW = {"inputs": 4096, "outputs": 6144, "groups": 32, "adds": True}
SHAPE = {"inputs": 4096, "outputs": 6144, "groups": 32, "group": 128, "adds": True}


def main() -> None:
    for capability in map(int, sys.argv[1:]):
        rounding = {"width": 4096, "largest": 448.0}
        _compile(fp8_kernels._round_rows, capability, rounding | {"tile": 1024})
        groups = {"groups": 32, "group": 128, "tile": 8}
        _compile(fp8_kernels._round_groups, capability, rounding | groups)
        for tiles in (
            {"groups": 1, "tile_groups": 1, "tile_inputs": 1024},
            {"tile_groups": 8, "tile_inputs": 128},
        ):
            sizes = {"tile_outputs": fp8_kernels._ROW_OUTPUTS}
            _compile(fp8_kernels._multiply_row, capability, ROW | sizes | tiles)
        for tile in dict.fromkeys(fp8_kernels._TILES + fp8_kernels._NARROW_TILES):
            sizes = {"tile_rows": tile.rows, "tile_outputs": tile.outputs}
            options = {"num_warps": tile.warps, "num_stages": tile.stages}
            _compile(fp8_kernels._multiply_groups, capability, SHAPE | sizes, **options)


def _compile(kernel: Any, capability: int, constants: dict[str, Any], **options: int) -> None:
    names = kernel.arg_names
    is_product = kernel is fp8_kernels._multiply_groups
    types = TYPES | {"rows": "*fp8e4nv" if is_product else "*bf16", "row": "*bf16"}
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*")
    }
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = compiled.asm["ptx"]
    used = _resources(ptx, capability)
    print(kernel.__name__, capability, constants, compiled.metadata.shared, used)
    assert compiled.metadata.shared <= SHARED_MEMORY, constants
    assert used["spilled"] <= 128, constants
    assert "e4m3" in ptx or not is_product, "the product is not of FP8"
    assert "cp.async" in ptx or not is_product, constants


if __name__ == "__main__":
    main()
