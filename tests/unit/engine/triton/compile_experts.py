"""Compiles the experts' kernels for GPUs that need not be there.

`python -m tests.unit.engine.triton.compile_experts 80 90` prints a line for each kernel.
"""

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from services.engine.model.operators import expert_kernels
from tests.unit.engine.triton.compile_attention import _resources

SHARED_MEMORY = 99 << 10
FP8_CAPABILITY = 89
POINTERS = {"order", "block_experts", "block_count", "counts"}
SORTING = {"experts": 128, "padded_experts": 128, "tile_rows": 16, "chunk": 1024}
GATE = {
    "per_row": 4,
    "inputs": 2880,
    "outputs": 2880,
    "nonlinearity": "clamped_swiglu",
    "alpha": 1.702,
    "limit": 7.0,
}
DOWN = GATE | {"per_row": 1, "nonlinearity": None}


def main() -> None:
    for capability in map(int, sys.argv[1:]):
        choosing = {"experts": 100, "padded_experts": 128, "per_row": 8, "normalized": True}
        _compile(expert_kernels._choose, capability, "bf16", choosing, num_warps=1)
        _compile(expert_kernels._count_choices, capability, "bf16", {"chunk": 1024})
        _compile(expert_kernels._place_choices, capability, "bf16", SORTING)
        summing = {"per_row": 4, "outputs": 2880, "tile": 1024}
        _compile(expert_kernels._add_sums, capability, "bf16", summing)
        for tile in expert_kernels.TILES:
            _compile_product(capability, "bf16", GATE, tile)
            if tile.rows in (16, 128):
                _compile_product(capability, "bf16", GATE, tile, "mxfp4")
                if capability >= FP8_CAPABILITY:
                    _compile_product(capability, "bf16", GATE, tile, "fp8 groups")
        first, *_, last = expert_kernels.TILES
        _compile_product(capability, "bf16", DOWN, last)
        if capability >= FP8_CAPABILITY:
            _compile_product(capability, "bf16", DOWN, last, "fp8")
        _compile_product(capability, "fp16", GATE | {"nonlinearity": "gelu"}, first)


def _compile_product(
    capability: int, dtype: str, constants: dict[str, Any], tile: Any, weights: str = "plain"
) -> None:
    products = 1 if constants["nonlinearity"] is None else 2
    sizes = {
        "tile_rows": tile.rows,
        "tile_outputs": tile.outputs // products,
        "tile_inputs": tile.inputs,
        "groups": {"fp8": 1, "fp8 groups": 23}.get(weights, 0),
        "group_inputs": 128 if weights == "fp8 groups" else 2880,
    }
    if weights == "plain":
        sizes["scales"] = None
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    _compile(expert_kernels._multiply, capability, dtype, constants | sizes, weights, **options)


def _compile(
    kernel: Any,
    capability: int,
    dtype: str,
    constants: dict[str, Any],
    weights: str = "plain",
    **options: int,
) -> None:
    types = {
        "chosen": "*i64",
        "scores": "*fp32",
        "choices": "i32",
        "factors": "*fp32",
        **dict.fromkeys(POINTERS, "*i32"),
        **dict.fromkeys(("out", "rows", "weights", "biases", "products"), f"*{dtype}"),
    }
    if weights == "mxfp4":
        types |= {"weights": "*u8", "scales": "*u8"}
    elif weights != "plain":
        types |= {"weights": "*fp8e4nv", "scales": "*fp32"}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name in ("out", "rows", "weights", "scales", "biases", "products", "chosen")
        if name in names
    }
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=options)
    used = _resources(compiled.asm["ptx"], capability)
    is_pipelined = "cp.async" in compiled.asm["ptx"]
    print(kernel.__name__, capability, dtype, weights, compiled.metadata.shared, used, is_pipelined)
    assert compiled.metadata.shared <= SHARED_MEMORY, constants
    assert used["spilled"] <= 128, constants
    # MXFP4's 0.5 is decoded from a subnormal number, which such a product would take for 0.
    assert weights != "mxfp4" or "mul.ftz" not in compiled.asm["ptx"], constants
    assert is_pipelined or kernel is not expert_kernels._multiply, constants


if __name__ == "__main__":
    main()
