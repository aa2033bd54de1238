"""Losses of a service: a request that makes progress continues, any other ends."""

from hypothesis import given
from hypothesis import strategies as st

from services.common.peers.losses import MAX_LOSSES, Losses


def test_request_with_progress_survives_any_number_of_losses() -> None:
    losses = Losses()
    assert all(losses.count(progress) for progress in range(1, 50))


def test_request_without_progress_ends_at_the_third_loss() -> None:
    """It may be what kills the services, and would kill them for all other requests again."""
    losses = Losses()
    assert [losses.count() for _ in range(3)] == [True, True, False]
    losses = Losses()
    assert [losses.count(7) for _ in range(3)] == [True, True, False]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30))
def test_request_ends_only_after_losses_in_a_row_without_progress(steps: list[int]) -> None:
    losses, progress, in_a_row = Losses(), 0, 0
    for step in steps:
        progress += step
        in_a_row = 1 if step else in_a_row + 1
        assert losses.count(progress) == (in_a_row < MAX_LOSSES)
