"""Every part of the GPU check, on the CPU in tiny sizes: a mistake must not waste a loan."""

import os
from collections.abc import Mapping

import pytest

from benchmarks.gpu.plan import PARTS, Part
from benchmarks.gpu.report import Outcome, PartResult
from benchmarks.gpu.session import Limits, Session

pytestmark = pytest.mark.skipif(
    "TRITON_INTERPRET" not in os.environ, reason="a GPU runs the kernels compiled"
)
FUNCTIONS: dict[str, Part] = {}
"""The first part of each function"""
for each in PARTS:
    FUNCTIONS.setdefault(each.function, each)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, PartResult]:
    folder = tmp_path_factory.mktemp("check")
    arguments = ["--dry", "--checkpoints", str(folder), "--bundle", str(folder / "none")]
    parts = list(FUNCTIONS.values())
    session = Session(parts, folder, arguments, Limits(1800, least=600), has_estimates=False)
    return {part.name: part for part in session.run().parts}


@pytest.mark.parametrize("name", [part.name for part in FUNCTIONS.values()])
def test_part_runs_with_figures_in_their_bounds(
    name: str, results: Mapping[str, PartResult]
) -> None:
    result = results[name]
    assert result.outcome is Outcome.RAN, result.failure
    assert result.rows
    assert not result.has_bad_row
