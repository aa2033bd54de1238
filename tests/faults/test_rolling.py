"""A rolling restart under load; `python -m tests.faults.rolling` also measures its pauses."""

from pathlib import Path

from tests.faults.rolling import roll


async def test_rolling_restart_fails_and_changes_no_answer(
    embedded_model: Path, tmp_path: Path
) -> None:
    restarts = await roll(embedded_model, tmp_path, streams=8, wanted=10, calm=0.5)
    assert len(restarts) == 1 + 8, "each service once, after a time without a restart"
    assert [failure for restart in restarts for failure in restart.failures] == []
    assert {restart.name: restart.changed for restart in restarts if restart.changed} == {}
    assert all(restart.answers for restart in restarts)
