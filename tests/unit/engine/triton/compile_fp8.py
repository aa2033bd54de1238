"""The kernels of FP8 products for GPUs that need not be there."""

from collections.abc import Iterator
from typing import Any

from services.engine.model.operators import fp8_products, fp8_rounding
from services.engine.model.operators.fp8_products import TILES, Tile
from services.engine.model.operators.product_tiles import MOST_DIVIDED
from tests.unit.engine.triton.gpus import Compiled, compile_kernel

__all__ = ["compile_all"]

LEAST_CAPABILITY = 89
DESCRIPTORS = 90
"""Least capability with a tensor memory accelerator"""
SPILLING = 100
"""Capability at which groups take a smaller tile"""
TYPES = {
    **dict.fromkeys(("out", "bias"), "*bf16"),
    **dict.fromkeys(("sums", "scales", "row_scales"), "*fp32"),
    **dict.fromkeys(("count", "adds", "inputs", "outputs", "span", "width", "groups"), "i32"),
    "arrivals": "*i32",
    **dict.fromkeys(("weight", "descriptor"), "*fp8e4nv"),
    "numbers": "*u8",
    "rows": "*bf16",
}
ALIGNED = (
    *(name for name, each in TYPES.items() if each.startswith("*")),
    *("inputs", "outputs", "span", "width"),
)
ROUNDING: dict[str, Any] = {"largest": 448.0}
FP8_PRODUCTS = ("e4m3", "kind::f8f6f4")
"""Parts of the names of the instructions that multiply FP8; the second is that of B200"""


def compile_all(capability: int) -> Iterator[Compiled]:
    """Yield every kernel of FP8; none for GPUs that do not multiply it."""
    if capability < LEAST_CAPABILITY:
        return
    for kernel, constants in (
        (fp8_rounding._round_rows, {"tile": 4096}),
        (fp8_rounding._round_groups, {"group": 128, "tile": 8}),
    ):
        compiled = compile_kernel(kernel, capability, TYPES, ROUNDING | constants, ALIGNED)
        compiled.check()
        yield compiled
    few, *_, most, largest = TILES
    yield from (_product(tile, capability) for tile in TILES)
    grouped = most if capability == SPILLING else largest
    yield from (_product(tile, capability, group=128) for tile in (few, grouped))
    yield _product(few, capability, is_even=False)
    if capability >= DESCRIPTORS:
        yield from (_product(tile.with_descriptor(), capability) for tile in TILES)


def _product(
    tile: Tile, capability: int, *, group: int | None = None, is_even: bool = True
) -> Compiled:
    tile_inputs = group or 128
    types = TYPES | {"rows": "*fp8e4nv"}
    if tile.by_descriptor:
        types["descriptor"] = f"tensordesc<fp8e4nv[{tile.outputs},{tile_inputs}]>"
    constants = {
        "is_grouped": group is not None,
        "is_even": is_even,
        **({} if tile.by_descriptor else {"descriptor": None}),
        "most_divided": MOST_DIVIDED,
        "tile_rows": tile.rows,
        "tile_outputs": tile.outputs,
        "tile_inputs": tile_inputs,
    }
    aligned = tuple(name for name in ALIGNED if types[name].startswith(("*", "i")))
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    kernel = fp8_products._multiply_fp8
    compiled = compile_kernel(kernel, capability, types, constants, aligned, **options)
    compiled.check(pipelined=True)
    assert not compiled.is_dependent or compiled.early_reads == {"weight"}, "weights come late"
    assert any(name in compiled.ptx for name in FP8_PRODUCTS), "the product is not of FP8"
    return compiled
