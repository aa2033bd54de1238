"""A short run of requests on an engine with few KV blocks."""

from pathlib import Path

from tests.faults.crowding import crowd


async def test_no_answer_is_changed_by_preemptions(embedded_model: Path, tmp_path: Path) -> None:
    report = await crowd(embedded_model, tmp_path, answers=39, seed=3)
    assert report.differences == []
    assert report.preemptions > 0, "the KV cache had room for all streams"
