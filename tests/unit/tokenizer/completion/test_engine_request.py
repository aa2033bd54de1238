"""How often a completion goes on after the engine was lost."""

from services.tokenizer.completion.completion import Losses


def test_completion_that_gets_tokens_survives_any_number_of_losses() -> None:
    losses = Losses()
    assert all(losses.count(brought) for brought in range(1, 50))


def test_completion_that_gets_nothing_ends_at_the_fourth_loss() -> None:
    """It may be what kills the engine, and would kill it for everybody, again and again."""
    losses = Losses()
    assert [losses.count(0) for _ in range(4)] == [True, True, True, False]
    losses = Losses()
    assert [losses.count(7) for _ in range(4)] == [True, True, True, False]
