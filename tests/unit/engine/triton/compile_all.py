"""Compiles every kernel of the engine for GPUs that need not be there.

`python -m tests.unit.engine.triton.compile_all 90 120` prints a line for each kernel: its name, its
shared memory, registers and stack, and what it was compiled for. It exits with 1 at a kernel that a
GPU could not launch.
"""

import sys

from tests.unit.engine.triton import (
    compile_adapters,
    compile_attention,
    compile_experts,
    compile_fp8,
    compile_fused,
    compile_packed,
    compile_prompts,
    compile_sampling,
)

GROUPS = (
    compile_adapters,
    compile_attention,
    compile_experts,
    compile_fp8,
    compile_fused,
    compile_packed,
    compile_prompts,
    compile_sampling,
)


def main() -> None:
    """Compile for the compute capabilities of the command line."""
    for capability in map(int, sys.argv[1:]):
        for group in GROUPS:
            for compiled in group.compile_all(capability):
                print(compiled, flush=True)


if __name__ == "__main__":
    main()
