"""Tests of benchmarks.host_time: steps without a model."""

import pytest

from benchmarks.host_time import SAMPLINGS, describe, measure


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_part_of_a_step_is_timed(sampling: str, overlaps: bool) -> None:
    case = measure(3, sampling, overlaps, steps=4)
    assert case.step_ms > 0
    assert {"plan", "batch", "draws", "tokens", "framing"} <= set(case.parts_ms)
    assert sampling in describe([case])
