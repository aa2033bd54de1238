"""The sampler's kernels for GPUs that need not be there."""

from collections.abc import Iterator
from typing import Any

from services.engine.sampling import draw_kernels, mask_kernel
from tests.unit.engine.triton.gpus import Compiled, compile_kernel

__all__ = ["compile_all"]

LOGITS = {"logits": "*fp32", "stride": "i32", "vocabulary": "i32", "groups": "i32"}
WEIGHTS = LOGITS | {"largest": "*fp32", "largest_stride": "i32", "scale": "*fp64", "sums": "*fp64"}
DRAWN = {"noise": "*fp64", "drawn": "*i64"}
COLUMNS = dict.fromkeys(("temperature", "top_p", "min_p", "top_k"), "*fp64")
RESTRICTED = WEIGHTS | DRAWN | COLUMNS | {"found": "*fp32", "ids": "*i64", "is_settled": "*i1"}
RESTRICTED["candidates"] = "i32"
KERNELS: list[tuple[Any, dict[str, str], dict[str, Any]]] = [
    (mask_kernel._exclude, LOGITS | {"packed": "*i32"}, {"width": 1024}),
    (draw_kernels._sum_weights, WEIGHTS, {"width": 256, "count": 8}),
    (draw_kernels._pick, WEIGHTS | DRAWN, {"width": 256, "count": 1024}),
    *(
        (
            draw_kernels._pick_restricted,
            RESTRICTED,
            {"no_limit": 2**31, "more": more, "width": 256, "count": 1024},
        )
        for more in (False, True)
    ),
    (draw_kernels._mark_nan, LOGITS | {"ids": "*i64", "marked": "*i64"}, {}),
]


def compile_all(capability: int) -> Iterator[Compiled]:
    """Yield every kernel of masks and draws."""
    for kernel, types, constants in KERNELS:
        compiled = compile_kernel(kernel, capability, types, constants)
        compiled.check()
        yield compiled
