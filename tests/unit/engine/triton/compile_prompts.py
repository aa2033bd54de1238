"""The kernels of long prompts, for GPUs that need not be there."""

from collections.abc import Iterator

from services.engine.model.attention import prompt_kernels, wide_kernel
from services.engine.model.attention.paged_tiles import power_of_two
from services.engine.model.attention.wide_kernel import WIDE_TILES, WideTile
from tests.unit.engine.triton.gpus import SHARED_MEMORY, Compiled, compile_kernel

__all__ = ["compile_all"]

FP8 = 89
"""Least capability with instructions for FP8"""
DESCRIPTORS = 90
"""Least capability with a tensor memory accelerator"""
WIDE = 256
"""Width of a head that may exceed the shared memory"""
SHAPES = ((8, 4, 128, False), (8, 8, 64, True), (2, 5, 256, False))
"""Key heads, query heads of each, width of a head, and whether there are sinks"""
TYPES = {
    **dict.fromkeys(("out", "queries", "pages", "right"), "*bf16"),
    **dict.fromkeys(("left", "sums", "left_sums", "right_sums", "sinks"), "*fp32"),
    **dict.fromkeys(("first", "count", "context", "query_stride"), "i32"),
    "table": "*i32",
}
ALIGNED = tuple(name for name, each in TYPES.items() if each.startswith("*") and name != "table")


def compile_all(capability: int) -> Iterator[Compiled]:
    """Yield every kernel of long prompts."""
    gather = {"page_size": 64, "width": 128, "columns": 1024}
    gather |= {"tile_tokens": 8, "tile_columns": 1024}
    plain = {"exponents": None, "page_stride": 64 * 1024}
    yield compile_kernel(prompt_kernels._gather_tokens, capability, TYPES, gather | plain, ALIGNED)
    if capability >= FP8:
        types = TYPES | {"pages": "*fp8e4nv", "exponents": "*u8"}
        sizes = gather | {"page_stride": 64 * (1024 + 8)}
        yield compile_kernel(prompt_kernels._gather_tokens, capability, types, sizes, ALIGNED)
    absences: tuple[dict[str, None], ...] = (
        {},
        {"right": None, "right_sums": None},
        {"sinks": None, "sums": None},
    )
    for absent in absences:
        sizes = {"heads": 32, "width": 128, "padded_heads": 32, "padded_width": 128}
        merge = prompt_kernels._merge_attention
        compiled = compile_kernel(merge, capability, TYPES, sizes | absent, ALIGNED, num_warps=8)
        compiled.check()
        yield compiled
    if capability < DESCRIPTORS:
        return
    for tile in WIDE_TILES:
        for kv_heads, group, head_dim, has_sinks in SHAPES:
            if tile.takes(head_dim, head_dim, group):
                compiled = _wide(tile, kv_heads, group, head_dim, has_sinks, capability)
                # The engine leaves out a tile that a GPU can't launch.
                if compiled.shared <= SHARED_MEMORY[capability] or head_dim < WIDE:
                    compiled.check(pipelined=True)
                yield compiled


def _wide(
    tile: WideTile, kv_heads: int, group: int, head_dim: int, has_sinks: bool, capability: int
) -> Compiled:
    constants = {
        "scale": head_dim**-0.5,
        "kv_heads": kv_heads,
        "group": group,
        "head_dim": head_dim,
        "value_dim": head_dim,
        "page_size": 64,
        "tile_rows": tile.rows,
        "tile_heads": power_of_two(group),
        "tile_keys": tile.keys,
    }
    if not has_sinks:
        constants["sinks"] = None
    descriptors = dict.fromkeys(("keys", "values"), f"tensordesc<bf16[{tile.keys},{head_dim}]>")
    return compile_kernel(
        wide_kernel._attend_widely,
        capability,
        TYPES | descriptors,
        constants,
        ("out", "queries", "query_stride"),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
