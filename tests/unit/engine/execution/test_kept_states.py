"""Kept hidden states: a head reads those of the newest computation of each token."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from services.engine.execution.kept_states import KeptStates
from services.engine.scheduling.sequence import Request, SequenceState, TokenSequence
from services.engine.scheduling.step_plan import Chunk, StepPlan
from services.engine.scheduling.token_ids import Prompt
from tests.unit.engine.tiny import BLOCK, make_request

WIDTH = 2


def running(length: int) -> TokenSequence:
    request = Request(make_request(1, [[1]]))
    sequence = TokenSequence(request, 0, Prompt([1] * length, b"", BLOCK), None, 8)
    sequence.state = SequenceState.RUNNING
    return sequence


@given(
    steps=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 4)), min_size=1, max_size=12),
    most_rows=st.sampled_from([32, 64]),
)
def test_newest_rows_are_kept_through_rejected_drafts(
    steps: list[tuple[int, int]], most_rows: int
) -> None:
    """steps: number of tokens that a step computes, and how many of them are rejected."""
    kept, sequence = KeptStates(most_rows), running(4)
    newest: dict[int, int] = {}
    start = 0
    for version, (count, rejected) in enumerate(steps):
        chunk = Chunk(sequence, start, count)
        rows = torch.tensor([[1000.0 * version + start + i] * WIDTH for i in range(count)])
        firsts = kept.keep(StepPlan([], [chunk], 0, count), [rows, rows])
        newest |= {start + i: version for i in range(count)}
        end = start + max(count - rejected, 1)
        first = max(firsts[sequence], end - 8)
        assert firsts[sequence] <= max(start, end - 32)
        found = kept.rows(sequence, first, end)
        expected = [1000.0 * newest[token] + token for token in range(first, end)]
        assert found.tolist() == [[number] * 2 * WIDTH for number in expected]
        start = end


def test_sequences_that_stop_running_are_dropped() -> None:
    """Else their hidden states would take memory as long as the server runs."""
    kept, first, second = KeptStates(64), running(40), running(40)
    rows = [torch.zeros(64, WIDTH)]
    chunks = [Chunk(first, 0, 32), Chunk(second, 0, 32)]
    assert kept.keep(StepPlan([], chunks, 0, 64), rows) == {first: 0, second: 0}
    first.state = SequenceState.WAITING
    kept.keep(StepPlan([], [Chunk(second, 32, 8)], 0, 8), rows)
    first.state = SequenceState.RUNNING
    again = kept.keep(StepPlan([], [Chunk(first, 32, 8)], 0, 8), rows)
    assert again == {first: 32}
