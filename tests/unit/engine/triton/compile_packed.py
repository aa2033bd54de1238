"""The kernels of packed weights for GPUs that need not be there."""

from collections.abc import Iterator
from typing import Any

from services.engine.model.operators import byte_products, packed_experts, packed_kernels
from services.engine.model.operators.packed_weights import PackedForm
from services.engine.model.operators.product_tiles import MOST_DIVIDED, ProductTile
from tests.unit.engine.triton.gpus import OF_EACH_MEMORY, SHARED_MEMORY, Compiled, compile_kernel

__all__ = ["compile_all"]

HOPPER = 90
TYPES = {
    **dict.fromkeys(("out", "rows", "bias", "biases"), "*bf16"),
    **dict.fromkeys(("codes", "numbers", "values", "arrivals"), "*i32"),
    **dict.fromkeys(("order", "block_experts", "block_count"), "*i32"),
    "sums": "*fp32",
    **dict.fromkeys(("count", "inputs", "outputs", "out_stride", "tiles", "span"), "i32"),
    **dict.fromkeys(("choices", "first", "stored_outputs", "code_stride", "number_stride"), "i32"),
}
ALIGNED = (
    *("out", "rows", "bias", "biases", "codes", "numbers", "values", "arrivals", "sums"),
    *("inputs", "outputs", "stored_outputs", "code_stride", "number_stride"),
)
GPTQ = PackedForm(4, 128, "float16", "zero")
Q4_K = PackedForm(4, 32, "small", "small")
Q5_K = PackedForm(5, 32, "small", "small")
Q6_K = PackedForm(6, 16, "level", None)
Q8_0 = PackedForm(8, 32, "float16", None)
NF4 = PackedForm(4, 64, "float32", None, tuple(number / 7 for number in range(-8, 8)))
TERMS = {NF4: 2}
GATE = {"per_row": 4, "nonlinearity": "silu", "alpha": 1.0, "limit": 0.0}
DOWN = GATE | {"per_row": 1, "nonlinearity": None}


def compile_all(capability: int) -> Iterator[Compiled]:
    """Yield the products of several forms, their decoding, and those of experts.

    Hopper has all tiles and all forms. Others have one kernel of each kind, and their own tiles:
    decoding takes the same instructions on all.
    """
    yield from _hopper() if capability == HOPPER else _other(capability)
    yield from _bytes(capability)


def _hopper() -> Iterator[Compiled]:
    few, *_, most = packed_kernels._TILES
    largest = packed_kernels._LARGE_TILES[-1]
    for tile in (*packed_kernels._TILES, *packed_kernels._LARGE_TILES):
        yield _product(GPTQ, tile, HOPPER)
    for form in (Q4_K, Q5_K, Q6_K, Q8_0):
        yield _product(form, largest, HOPPER)
    for form in (Q5_K, Q6_K):
        yield _product(form, few, HOPPER)
    for tile in packed_kernels._VALUE_TILES:
        yield _product(NF4, tile, HOPPER)
    yield _product(Q4_K, most, HOPPER, dtype="fp16", adds=True, whole=False)
    for form in (GPTQ, Q5_K, Q6_K, NF4):
        yield _decoding(form, HOPPER)
    for tile in (*packed_kernels._EXPERT_TILES, largest):
        yield _experts(Q4_K, GATE, tile, HOPPER)
    for form, products in ((GPTQ, GATE), (Q6_K, DOWN)):
        yield _experts(form, products, largest, HOPPER)
    yield _experts(NF4, GATE, packed_kernels._VALUE_TILES[-1], HOPPER)
    yield _ordering(largest.rows, HOPPER)


def _other(capability: int) -> Iterator[Compiled]:
    few, *_, most = packed_kernels._TILES
    yield _product(GPTQ, few, capability)
    yield _product(Q6_K, most, capability)
    yield _product(NF4, packed_kernels._VALUE_TILES[-1], capability)
    if capability in OF_EACH_MEMORY:  # their tiles are larger
        for tile in packed_kernels._LARGE_TILES:
            yield _product(GPTQ, tile, capability)
        yield _product(Q6_K, packed_kernels._LARGE_TILES[-1], capability)
    yield _decoding(GPTQ, capability)
    tile = packed_kernels._EXPERT_TILES[-1]
    yield _experts(Q4_K, GATE, tile, capability)
    yield _ordering(tile.rows, capability)


def _product(
    form: PackedForm,
    tile: ProductTile,
    capability: int,
    *,
    dtype: str = "bf16",
    adds: bool = False,
    whole: bool = True,
) -> Compiled:
    constants: dict[str, Any] = {"adds": adds, "whole": whole, "bias": None, "tile": tile}
    return _compile(packed_kernels._multiply_packed, form, tile, capability, constants, dtype)


def _experts(
    form: PackedForm, constants: dict[str, Any], tile: ProductTile, capability: int
) -> Compiled:
    whole = constants | {"whole": True, "tile": tile}
    return _compile(packed_experts._multiply_experts, form, tile, capability, whole, "bf16")


def _compile(
    kernel: Any,
    form: PackedForm,
    tile: ProductTile,
    capability: int,
    constants: dict[str, Any],
    dtype: str,
) -> Compiled:
    compiled = compile_kernel(
        kernel,
        capability,
        TYPES | dict.fromkeys(("out", "rows"), f"*{dtype}"),
        _of_form(form) | constants,
        ALIGNED,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    compiled.check(pipelined=not form.values)
    assert not compiled.is_dependent or compiled.early_reads == {"codes"}, "weights come late"
    # Further tiles are for certain GPUs; these must fit the one with the least shared memory.
    if tile in packed_kernels._TILES:
        assert compiled.shared <= min(SHARED_MEMORY.values()), compiled
    # B200's tensor cores read weights from a memory of their own, where decoded ones are not.
    assert "mma.sync" in compiled.ptx or "wgmma" in compiled.ptx, compiled
    if not form.values:
        # Codes are subnormal numbers, which a product must not take for 0.
        assert "fma.rn.bf16" in compiled.ptx or "fma.rn.f16" in compiled.ptx, compiled
        assert "ftz.bf16" not in compiled.ptx, compiled
        assert "ftz.f16" not in compiled.ptx, compiled
    return compiled


def _decoding(form: PackedForm, capability: int) -> Compiled:
    constants = _of_form(form) | {"tile_outputs": packed_kernels._DECODED_OUTPUTS}
    kernel = packed_kernels._decode_packed
    compiled = compile_kernel(kernel, capability, TYPES, constants, ALIGNED)
    compiled.check()
    return compiled


def _ordering(rows: int, capability: int) -> Compiled:
    types = TYPES | {"columns": "*i32"}
    constants = {"per_row": 4, "tile_rows": rows, "tile_columns": packed_experts._ORDERED_COLUMNS}
    kernel = packed_experts._order_inputs
    compiled = compile_kernel(kernel, capability, types, constants, (*ALIGNED, "columns"))
    compiled.check()
    return compiled


def _bytes(capability: int) -> Iterator[Compiled]:
    """Yield the kernels of products in int8."""
    types = TYPES | {"numbers": "*i8", "width": "i32", "row_scales": "*fp32", "scales": "*fp32"}
    kernel = byte_products._round_to_bytes
    rounding = compile_kernel(kernel, capability, types, {"tile": 1024}, (*ALIGNED, "width"))
    rounding.check()
    yield rounding
    types |= {"rows": "*i8", "sums": "*i32"}
    for tile in byte_products.TILES:
        constants: dict[str, Any] = {"adds": True, "whole": True, "bias": None}
        constants |= {"tile_rows": tile.rows, "tile_outputs": tile.outputs, "tile_inputs": 128}
        if tile.rows > MOST_DIVIDED:
            constants["sums"] = None
        compiled = compile_kernel(
            byte_products._multiply_bytes,
            capability,
            types,
            constants,
            (*ALIGNED, "span"),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        compiled.check(pipelined=True)
        assert compiled.shared <= min(SHARED_MEMORY.values()), compiled
        assert "s8" in compiled.ptx, compiled
        yield compiled


def _of_form(form: PackedForm) -> dict[str, Any]:
    terms = TERMS.get(form, 0)
    return {"form": form, "terms": terms} | ({} if terms else {"values": None})
