"""The kernels compile for every kind of GPU, on a machine without one."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.unit.engine.triton.gpus import SHARED_MEMORY

ROOT = Path(__file__).parents[4]
LEAST_CAPABILITIES = {
    **dict.fromkeys(("_round_rows", "_round_groups", "_multiply_fp8", "_write_rounded"), 89),
    "_attend_widely": 90,
}
"""Capabilities that have the instructions of a kernel, where not all of them have"""


def launched_kernels() -> Iterator[str]:
    """Yield the names of the kernels that some module of the engine launches."""
    texts = (path.read_text() for path in (ROOT / "services" / "engine").rglob("*.py"))
    trees = [ast.parse(text) for text in texts if "kernel" in text]
    kernels = {
        each.name
        for tree in trees
        for each in tree.body
        if isinstance(each, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(decorator) for decorator in each.decorator_list)
    }
    for node in chain.from_iterable(map(ast.walk, trees)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            name = ast.unparse(node.func.value)
            if name in kernels:
                yield name


@pytest.fixture(scope="module")
def compiled() -> dict[int, set[str]]:
    """Names of the kernels that compile, by compute capability.

    One process compiles for all, because torch takes seconds to import.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    module = "tests.unit.engine.triton.compile_all"
    command = [sys.executable, "-m", module, *map(str, SHARED_MEMORY)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]
    names: dict[int, set[str]] = {capability: set() for capability in SHARED_MEMORY}
    for line in done.stdout.splitlines():
        name, target, *_ = line.split()
        names[int(target.removeprefix("sm_"))].add(name)
    return names


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_every_kernel_fits_the_gpu(capability: int, compiled: dict[int, set[str]]) -> None:
    """A kernel that does not compile, or exceeds the shared memory, ends the engine at start."""
    assert compiled[capability] == {
        name for name in launched_kernels() if LEAST_CAPABILITIES.get(name, 0) <= capability
    }
