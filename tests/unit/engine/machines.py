"""Instruction sets that tests can limit the kernels to."""

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

__all__ = ["TILED", "limited_to", "needs_tiles"]

TILED = (InstructionSet.AVX512_BF16, InstructionSet.AMX)
"""Instruction sets whose kernels work on tiles"""

needs_tiles = pytest.mark.skipif(
    instruction_set() not in TILED,
    reason="this machine has no tile instructions, or the kernels were not built",
)


@contextmanager
def limited_to(instructions: InstructionSet) -> Iterator[Native]:
    """Limit the kernels to an instruction set; skip the test where the machine lacks it."""
    if native is None:
        pytest.skip("the kernels were not built")
    with limit_instruction_set(instructions):
        if instruction_set() != instructions:
            pytest.skip(f"this machine lacks {instructions.name}")
        yield native
