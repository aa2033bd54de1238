"""Every part of the GPU check, on the CPU in tiny sizes: a mistake must not waste a loan."""

import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.context import Context
from benchmarks.gpu.plan import PARTS, Part
from tests.unit.engine.interpreter import quick_kernels

pytestmark = pytest.mark.skipif(
    "TRITON_INTERPRET" not in os.environ, reason="a GPU runs the kernels compiled"
)
ON_A_CARD = {"nano-vllm"}
"""Parts that the CPU does not run"""
FUNCTIONS: dict[str, Part] = {}
"""The first part of each function"""
for each in PARTS:
    if each.name not in ON_A_CARD:
        FUNCTIONS.setdefault(each.function, each)


@pytest.fixture(scope="module", autouse=True)
def quick_interpreter() -> Iterator[None]:
    with quick_kernels():
        yield


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.mark.parametrize("part", FUNCTIONS.values(), ids=lambda part: part.name)
@torch.no_grad()
def test_part_runs_with_figures_in_their_bounds(part: Part, checkpoints: Path) -> None:
    context = Context(torch.device("cpu"), is_dry=True, checkpoints=checkpoints)
    module, _, function = part.function.partition(":")
    rows = list(getattr(import_module(module), function)(context, **part.options))
    assert rows
    assert not [row for row in rows if row.get("ok") is False]


def test_functions_of_parts_that_need_a_card_exist() -> None:
    for part in PARTS:
        module, _, function = part.function.partition(":")
        assert callable(getattr(import_module(module), function))
