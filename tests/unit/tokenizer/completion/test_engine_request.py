"""Losses of the engine: a request that makes progress continues, any other ends."""

from services.tokenizer.completion.engine_request import EngineLosses


def test_request_with_progress_survives_any_number_of_losses() -> None:
    losses = EngineLosses()
    assert all(losses.count(progress) for progress in range(1, 50))


def test_request_without_progress_ends_at_the_third_loss() -> None:
    """It may be what kills the engines, and would kill them for all other requests again."""
    losses = EngineLosses()
    assert [losses.count(0) for _ in range(3)] == [True, True, False]
    losses = EngineLosses()
    assert [losses.count(7) for _ in range(3)] == [True, True, False]
