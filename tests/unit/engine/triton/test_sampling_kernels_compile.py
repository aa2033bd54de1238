"""The sampler's kernels compile for GPUs, on a machine without one."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from services.engine.sampling import draw_kernels, mask_kernel

LOGITS = {"logits": "*fp32", "stride": "i32", "vocabulary": "i32", "groups": "i32"}
WEIGHTS = LOGITS | {"largest": "*fp32", "largest_stride": "i32", "scale": "*fp64", "sums": "*fp64"}
DRAWN = {"noise": "*fp64", "drawn": "*i64"}
COLUMNS = dict.fromkeys(("temperature", "top_p", "min_p", "top_k"), "*fp64")
RESTRICTED = WEIGHTS | DRAWN | COLUMNS | {"found": "*fp32", "ids": "*i64", "is_settled": "*i1"}
RESTRICTED["candidates"] = "i32"
KERNELS = [
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
for capability in (80, 90):
    for kernel, types, constants in KERNELS:
        names = kernel.arg_names
        signature = {name: types.get(name, "constexpr") for name in names}
        source = ASTSource(kernel, signature=signature, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        assert compiled.asm["cubin"]
        assert compiled.metadata.shared < 100_000
        print(kernel.__name__, capability, compiled.metadata.shared)
"""


def test_kernels_compile_for_gpus() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 12
