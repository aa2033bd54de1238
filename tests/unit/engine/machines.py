"""Instruction sets that tests restrict the kernels to."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from services.engine.kernels.library import (
    InstructionSet,
    Native,
    instruction_set,
    limit_instruction_set,
    native,
)

__all__ = ["TILED", "needs_tiles", "restrict_kernels"]

TILED = (InstructionSet.AVX512_BF16, InstructionSet.AMX)
"""Instruction sets with tiled kernels"""

needs_tiles = pytest.mark.skipif(
    instruction_set() not in TILED,
    reason="this machine has no tiled kernels, or they were not built",
)


@contextmanager
def restrict_kernels(instructions: InstructionSet) -> Iterator[Native]:
    """Yield the kernels restricted to this instruction set; skip the test if they lack it."""
    if native is None:
        pytest.skip("the kernels were not built")
    with limit_instruction_set(instructions):
        if instruction_set() != instructions:
            pytest.skip(f"this machine lacks {instructions.name}")
        yield native
