"""A short run of the chaos; `make chaos` has the long one."""

from pathlib import Path

from tests.faults.chaos import chaos


async def test_no_answer_is_lost_doubled_or_changed_by_faults(
    embedded_model: Path, tmp_path: Path
) -> None:
    report = await chaos(embedded_model, tmp_path, faults=12, seed=7, streams=10, count=20)
    assert report.differences == []
    assert report.leaks == []
    assert sum(report.faults.values()) == 12
    assert len(report.answers) == 10, "a kind of request never ended"
