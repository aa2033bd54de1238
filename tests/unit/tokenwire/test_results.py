"""Results that the client reads from protobuf."""

import math

from hypothesis import given
from hypothesis import strategies as st

from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2
from tokenwire.results import Choice, Delta, FinishReason, Scores

_columns = st.integers(0, 3).flatmap(
    lambda width: st.lists(
        st.tuples(
            st.integers(0, 9),
            st.floats(-50, 0, width=32),
            st.lists(st.integers(0, 9), min_size=width, max_size=width),
        ),
        max_size=8,
    ).map(lambda rows: (width, rows))
)


def _message(width: int, rows: list[tuple[int, float, list[int]]]) -> completion_pb2.ChoiceDelta:
    texts = [f"<{identity}>" for identity, _, _ in rows]
    columns = types_pb2.TokenColumns(
        ids=[identity for identity, _, _ in rows],
        logprobs=[logprob for _, logprob, _ in rows],
        ranks=[1] * len(rows),
        top_width=width,
        top_ids=[top for _, _, tops in rows for top in tops],
        top_logprobs=[-1.0 for _, _, tops in rows for _ in tops],
    )
    return completion_pb2.ChoiceDelta(
        text="".join(texts),
        token_ids=columns.ids,
        tokens=columns,
        token_texts=texts,
        text_offsets=range(0, 3 * len(rows), 3),
        top_texts=[f"<{top}>" for _, _, tops in rows for top in tops],
    )


@given(_columns, st.integers(0, 8))
def test_deltas_join_to_the_same_choice_as_one_delta(
    columns: tuple[int, list[tuple[int, float, list[int]]]], cut: int
) -> None:
    """Streamed and whole answers must agree, scores included."""
    width, rows = columns
    end = Delta(index=0, finish_reason=FinishReason.LENGTH)
    parts = [Delta.read(_message(width, part)) for part in (rows[:cut], rows[cut:])]
    joined = Choice.join([*parts, end])
    assert joined.text == "".join(f"<{identity}>" for identity, _, _ in rows)
    assert joined.token_ids == tuple(identity for identity, _, _ in rows)
    if rows:
        assert joined.scores is not None
        assert joined.scores.top_ids == tuple(tuple(tops) for _, _, tops in rows)
        assert joined.scores.texts == tuple(f"<{identity}>" for identity, _, _ in rows)
        lengths = {len(joined.scores.logprobs), len(joined.scores.ranks), len(rows)}
        assert len(lengths) == 1


def test_token_columns_without_logprobs_have_no_scores() -> None:
    assert Scores.read(types_pb2.TokenColumns(ids=[1, 2])) is None


def test_first_prompt_token_keeps_its_place_without_a_score() -> None:
    """Evaluations slice by position: an unscored token must not shift the others."""
    columns = types_pb2.TokenColumns(ids=[4, 5], logprobs=[math.nan, -1.5], ranks=[0, 2])
    scores = Scores.read(columns)
    assert scores is not None
    assert math.isnan(scores.logprobs[0])
    assert scores.logprobs[1] == -1.5
    assert scores.top_ids == ((), ())
