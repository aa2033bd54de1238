"""Kinds of machine that this one can stand for."""

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
"""Those that work on tiles"""

needs_tiles = pytest.mark.skipif(
    instruction_set() not in TILED,
    reason="this machine works on no tiles, or the kernels were not built",
)


@contextmanager
def limited_to(instructions: InstructionSet) -> Iterator[Native]:
    """The kernels, which use these instructions within; skips the test where they cannot."""
    if native is None:
        pytest.skip("the kernels were not built")
    with limit_instruction_set(instructions):
        if instruction_set() != instructions:
            pytest.skip(f"this machine lacks {instructions.name}")
        yield native
