"""Waits of Triton kernels with programmatic dependent launch: see `dependent_launch`."""

import triton
import triton.language as tl

__all__ = ["prefetch", "wait_for_writes"]


@triton.jit  # type: ignore[untyped-decorator]
def wait_for_writes(is_dependent: tl.constexpr) -> None:
    """Wait until all kernels before have ended, and let the next one start."""
    if is_dependent:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator]
def prefetch(addresses: tl.tensor) -> None:
    """Load the cache lines of these addresses into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [addresses.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
