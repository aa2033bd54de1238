"""The attention kernels for GPUs that need not be there, compiled as launches would."""

from collections.abc import Iterator
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget

from services.engine.batch.step_batch import SharedPrefixes
from services.engine.kernels import dependent_launch
from services.engine.model.attention import cache_kernel, fp8_pages
from services.engine.model.attention.paged_kernels import (
    PagedRows,
    PagedShape,
    attend_padded,
    attend_pages,
    attend_shared,
)
from services.engine.model.operators import rotated_write
from tests.unit.engine.triton.gpus import (
    DEPENDENT_FROM,
    OF_EACH_MEMORY,
    Compiled,
    compile_kernel,
    inspect,
)

__all__ = ["compile_all"]

FP8_FROM = 89
"""Least compute capability with instructions for FP8"""
SHAPES = {
    # heads, key heads, dimensions of keys and values, soft cap, window, sinks, images that see
    # ahead, ALiBi
    "llama": (32, 8, 128, 128, 0.0, 0, False, False, False),
    "gpt-oss": (64, 8, 64, 64, 0.0, 128, True, False, False),
    "gemma2 and gemma3": (8, 4, 256, 256, 50.0, 4096, False, True, False),
    "gemma4": (16, 2, 512, 512, 0.0, 0, False, True, False),
    "gemma4, one key head": (32, 1, 512, 512, 0.0, 0, False, False, False),
    "bloom": (32, 32, 128, 128, 0.0, 0, False, False, True),
    "deepseek": (16, 16, 192, 128, 0.0, 0, False, False, False),
}
USUAL, WIDEST = "llama", "gemma4"
"""Family of most models, and one whose tiles take the most memory"""
PROMPT, PADDED = (300, "pages"), (64, "padded")
BATCHES = ((1, "pages"), PROMPT, (40, "shared"), PADDED)
"""Rows, and how they are attended. A padded step has the tiles of decodes and those of chunks."""


class _Driver:
    """All that Triton asks of a driver until it launches."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch  # type: ignore[no-any-return]

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_all(capability: int) -> Iterator[Compiled]:
    """Yield every attention kernel, and the one that writes to the cache."""
    triton.runtime.driver.set_active(_Driver(capability))
    has_fp8 = capability >= FP8_FROM
    for family, (rows, kind), is_fp8 in _cases(capability):
        shape = SHAPES[family]
        if kind == "shared" and shape[5]:
            continue  # windows share nothing
        for kernel in _launched(
            rows, *shape, kind=kind, is_fp8=is_fp8, is_dependent=capability >= DEPENDENT_FROM
        ):
            cache = ", FP8" if is_fp8 else ""
            compiled = inspect(kernel, capability, f"{family}, {rows} rows, {kind}{cache}")
            compiled.check(pipelined=compiled.kernel != "merge_parts")
            yield compiled
    for dtype in ("bf16", "fp16", "fp32"):
        types = dict.fromkeys(cache_kernel._write.arg_names, "i32") | {"slots": "*i64"}
        types |= dict.fromkeys(("keys", "values", "key_cache", "value_cache"), f"*{dtype}")
        compiled = compile_kernel(cache_kernel._write, capability, types, {"width": 1024})
        compiled.check()
        yield compiled
    for dtype in ("bf16", "fp16") if has_fp8 else ():
        types = {"keys": f"*{dtype}", "values": f"*{dtype}", "slots": "*i64"}
        types |= {"key_pages": "*u8", "value_pages": "*u8"}
        types |= {"key_stride": "i32", "value_stride": "i32"}
        sizes = {"page_size": 64, "kv_heads": 8, "head_dim": 128, "value_dim": 128}
        sizes |= {"padded_heads": 8, "padded_dim": 128}
        compiled = compile_kernel(fp8_pages._write_rounded, capability, types, sizes)
        compiled.check()
        yield compiled
    yield from (
        _rotated_write(capability, is_fp8=False, has_norms=norms) for norms in (True, False)
    )
    if has_fp8:
        yield _rotated_write(capability, is_fp8=True, has_norms=True)


def _rotated_write(capability: int, *, is_fp8: bool, has_norms: bool) -> Compiled:
    """Compile the kernel that rotates and writes, for a layer of Llama's or Qwen3's shape."""
    kernel = rotated_write._write_rotated
    types = dict.fromkeys(("token_stride", "num_queries", "half"), "i32")
    types |= {"slots": "*i64", "cosines": "*fp32", "sines": "*fp32", "epsilon": "fp32"}
    types |= dict.fromkeys(("heads", "values", "query_norm", "key_norm"), "*bf16")
    types |= dict.fromkeys(("key_pages", "value_pages"), "*u8" if is_fp8 else "*bf16")
    sizes = {"is_fp8": is_fp8, "page_size": 64, "kv_heads": 8, "head_dim": 128, "value_dim": 128}
    sizes |= {"has_norms": has_norms, "tile_heads": 4, "width": 64}
    sizes |= {"padded_heads": 8, "padded_value": 128}
    compiled = compile_kernel(kernel, capability, types, sizes)
    compiled.check()
    return compiled


def _cases(capability: int) -> Iterator[tuple[str, tuple[int, str], bool]]:
    """Yield families, rows and kinds of their batches, and whether over pages in FP8.

    A prompt and a padded step have all tiles of a family, and all that distinguishes it. They are
    compiled for a GPU of each kind of memory; prompts over pages in FP8, for the first GPU that has
    these. Other GPUs have the usual family, and the prompt that takes the most memory.
    """
    is_of_each = capability in OF_EACH_MEMORY
    for family, batch in product(SHAPES, BATCHES):
        has_all = batch in (PROMPT, PADDED)
        if family == USUAL:
            is_for_all = has_all or is_of_each
        else:
            is_for_all = family == WIDEST and batch == PROMPT
        if is_for_all or (is_of_each and has_all):
            yield family, batch, False
        is_first = capability == FP8_FROM and batch == PROMPT
        if capability >= FP8_FROM and (is_for_all or is_first):
            yield family, batch, True


def _launched(
    rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    cap: float,
    window: int,
    has_sinks: bool,
    sees_ahead: bool,
    has_slopes: bool,
    *,
    kind: str,
    is_fp8: bool,
    is_dependent: bool,
) -> list[Any]:
    """Return the kernels that attend for some rows over tables for 16,384 tokens.

    kind: "pages" for one sequence's last rows; "shared" for one row of each of `rows` sequences,
    whose contexts begin with the same pages; "padded" for a step of decodes and chunks.
    is_fp8: over pages in FP8. is_dependent: with programmatic dependent launch.
    """
    dtype = torch.bfloat16
    keys = torch.empty(2, 64, kv_heads, head_dim, dtype=dtype)
    values = torch.empty(2, 64, kv_heads, value_dim, dtype=dtype)
    sequences = 1 if kind == "pages" else rows
    scale, is_chunked = head_dim**-0.5, kind == "padded" and window > 0 and not sees_ahead
    shape = PagedShape(heads, kv_heads, head_dim, value_dim, 64, scale, cap, window, is_chunked)
    if is_fp8:
        keys, values = (
            fp8_pages.numbers_of(fp8_pages.make_pages(2, 64, kv_heads, width), 64, kv_heads, width)
            for width in (head_dim, value_dim)
        )
    batch = PagedRows(
        starts=torch.empty(sequences + 1, dtype=torch.int32),
        lengths=torch.empty(sequences, dtype=torch.int32),
        tables=torch.empty(sequences, 256, dtype=torch.int32),
        ends=torch.empty(rows, dtype=torch.int32) if sees_ahead and kind != "padded" else None,
        longest=1 if kind == "shared" else rows,
        counts=torch.empty(2, dtype=torch.int32) if kind == "padded" else None,
    )
    numbers = torch.empty(sequences, dtype=torch.int32)
    prefixes = SharedPrefixes(numbers, numbers, torch.empty(3, dtype=torch.int32))
    operands = (
        torch.empty(rows, heads + 2 * kv_heads, head_dim, dtype=dtype)[:, :heads],
        keys,
        values,
        torch.empty(heads) if has_sinks else None,
        torch.empty(rows, heads * value_dim, dtype=dtype),
        torch.empty(heads) if has_slopes else None,
    )
    compiled: list[Any] = []

    def compile_only(kernel: Any, grid: object) -> Any:
        return lambda *args, **options: compiled.append(
            kernel.run(*args, grid=grid, warmup=True, **options)
        )

    getitem = patch.object(triton.runtime.jit.KernelInterface, "__getitem__", compile_only)
    dependent_launch.use_dependent_launch(True)
    with getitem, patch.object(dependent_launch, "has_dependent_launch", lambda _: is_dependent):
        if kind == "pages":
            attend_pages(shape, batch, *operands)
        elif kind == "shared":
            attend_shared(shape, batch, prefixes, *operands)
        else:
            attend_padded(shape, batch, 8, prefixes, *operands)
    return compiled
