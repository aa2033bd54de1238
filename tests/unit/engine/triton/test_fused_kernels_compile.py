"""The fused kernels compile for GPUs, on a machine without one."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from services.engine.model.attention import cache_kernel
from services.engine.model.operators import fused_kernels

SIZES = dict.fromkeys(
    ("row_stride", "out_stride", "columns", "key_columns", "value_columns")
    + ("token_stride", "num_heads", "num_queries", "half"),
    "i32",
)
NUMBERS = dict.fromkeys(("epsilon", "alpha", "limit"), "fp32")
KERNELS = [
    *((fused_kernels._norm, {"adds": adds, "width": 4096}) for adds in (False, True)),
    *(
        (fused_kernels._rotate, {"has_norms": norms, "tile_heads": 4, "width": 64})
        for norms in (False, True)
    ),
    *(
        (fused_kernels._activate, {"kind": kind, "gated": gated, "width": 1024})
        for kind in range(4)
        for gated in (False, True)
    ),
    (cache_kernel._write, {"width": 1024}),
]
for capability in (80, 90):
    for dtype in ("bf16", "fp16", "fp32"):
        floats = {"cosines": "*fp32", "sines": "*fp32", "slots": "*i64", **SIZES, **NUMBERS}
        for kernel, constants in KERNELS:
            types = {
                name: "constexpr" if name in constants else floats.get(name, "*" + dtype)
                for name in kernel.arg_names
            }
            source = ASTSource(kernel, signature=types, constexprs=constants)
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
            assert compiled.asm["cubin"]
            assert compiled.metadata.shared < 100_000
            print(kernel.__name__, capability, dtype)
"""


def test_kernels_compile_for_gpus() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 78
