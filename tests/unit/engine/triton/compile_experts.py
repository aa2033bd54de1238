"""The experts' kernels for GPUs that need not be there."""

from collections.abc import Iterator
from typing import Any

from services.engine.model.operators import expert_kernels
from tests.unit.engine.triton.gpus import SHARED_MEMORY, Compiled, compile_kernel

__all__ = ["compile_all"]

FP8_CAPABILITY = 89
TYPES = {
    "chosen": "*i64",
    "scores": "*fp32",
    "choices": "i32",
    "factors": "*fp32",
    **dict.fromkeys(("order", "block_experts", "block_count", "counts"), "*i32"),
}
ALIGNED = ("out", "rows", "weights", "scales", "biases", "products", "chosen")
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


def compile_all(capability: int) -> Iterator[Compiled]:
    """Yield the kernels that sort rows by expert, and every tile of the products."""
    choosing = {"experts": 100, "padded_experts": 128, "per_row": 8, "normalized": True}
    yield _compile(expert_kernels._choose, capability, "bf16", choosing, num_warps=1)
    yield _compile(expert_kernels._count_choices, capability, "bf16", {"chunk": 1024})
    yield _compile(expert_kernels._place_choices, capability, "bf16", SORTING)
    summing = {"per_row": 4, "outputs": 2880, "tile": 1024}
    yield _compile(expert_kernels._add_sums, capability, "bf16", summing)
    first, *_, last = expert_kernels.TILES
    for tile in expert_kernels.TILES:
        yield _compile_product(capability, "bf16", GATE, tile)
        if tile.rows in (16, 128):
            yield _compile_product(capability, "bf16", GATE, tile, "mxfp4")
            if capability >= FP8_CAPABILITY:
                yield _compile_product(capability, "bf16", GATE, tile, "fp8 groups")
    yield _compile_product(capability, "bf16", DOWN, last)
    if capability >= FP8_CAPABILITY:
        yield _compile_product(capability, "bf16", DOWN, last, "fp8")
    yield _compile_product(capability, "fp16", GATE | {"nonlinearity": "gelu"}, first)


def _compile_product(
    capability: int, dtype: str, constants: dict[str, Any], tile: Any, weights: str = "plain"
) -> Compiled:
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
    compiled = _compile(
        expert_kernels._multiply, capability, dtype, constants | sizes, weights, **options
    )
    compiled.check(pipelined=True)
    # The tiles are those of all GPUs, so each must fit the one with the least shared memory.
    assert compiled.shared <= min(SHARED_MEMORY.values()), compiled
    # MXFP4's 0.5 is decoded from a subnormal number, which such a product would take for 0.
    assert weights != "mxfp4" or "mul.ftz" not in compiled.ptx, compiled
    return compiled


def _compile(
    kernel: Any,
    capability: int,
    dtype: str,
    constants: dict[str, Any],
    weights: str = "plain",
    **options: int,
) -> Compiled:
    types = TYPES | dict.fromkeys(("out", "rows", "weights", "biases", "products"), f"*{dtype}")
    if weights == "mxfp4":
        types |= {"weights": "*u8", "scales": "*u8"}
    elif weights != "plain":
        types |= {"weights": "*fp8e4nv", "scales": "*fp32"}
    compiled = compile_kernel(kernel, capability, types, constants, ALIGNED, **options)
    compiled.check()
    return compiled
