"""One choice: however the engine cuts its deltas, the client gets the same text, ids and scores."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.tokenizer.choice import Choice, Echo
from services.tokenizer.columns import Columns
from services.tokenizer.detokenizer import Detokenizer, TokenTable, token_table
from services.tokenizer.plan import ChoicePlan
from services.tokenizer.stops import compile_stops
from tests.unit.tokenizer.checkpoints import byte_level
from tokenwire.completion.v1 import completion_pb2
from tokenwire.types.v1 import types_pb2

_TOKENIZER = byte_level()
_EOS = _TOKENIZER.token_to_id("</s>")
_TABLE: TokenTable = token_table(
    _TOKENIZER.get_vocab(),
    {"type": "ByteLevel"},
    _TOKENIZER.get_vocab_size(),
    [_TOKENIZER.token_to_id("<s>"), _EOS],
)
# words, the bytes of 😀, a stray byte, a special token that adds nothing, and the end
_IDS = [
    _TOKENIZER.token_to_id(token)
    for token in ("a", "b", "ab", "def", "Ġa", "Ã©", "ð", "Ł", "ĺ", "Ģ", "Ċ", "<s>", "</s>")
]
_STOPS = st.lists(st.text(alphabet="abdef é😀\n\ufffd", min_size=1, max_size=4), max_size=3)


@dataclass(frozen=True, slots=True)
class _Expected:
    ids: list[int]
    texts: list[str]
    completion_tokens: int
    stop: str | None


def _reference(ids: Sequence[int], plan: ChoicePlan, stops: Sequence[str]) -> _Expected:
    """By decoding and searching everything at once."""
    ended = next((place for place, token in enumerate(ids) if token in plan.enders), len(ids))
    detokenizer = Detokenizer(_TABLE)
    texts = [detokenizer.feed(token) for token in ids[:ended]]
    if rest := detokenizer.flush():
        texts[-1] += rest
    texts += [""] * len(ids[ended : ended + 1])
    tokens = list(ids[: ended + 1])
    whole = "".join(texts)
    for end in range(len("".join(texts[: max(0, plan.min_tokens - 1)])) + 1, len(whole) + 1):
        found = [stop for stop in stops if whole[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            cut = end if plan.include_stop else end - len(stop)
            return _cut(tokens, texts, cut, end, stop)
    return _Expected(tokens, texts, len(tokens), None)


def _cut(tokens: list[int], texts: list[str], cut: int, end: int, stop: str) -> _Expected:
    kept_ids, kept_texts, start, keeps = [], [], 0, True
    for count, (token, text) in enumerate(zip(tokens, texts, strict=True), 1):
        keeps = keeps and (start < cut or (start == cut and not _TABLE.pieces[token]))
        if keeps:
            kept_ids.append(token)
            kept_texts.append(text[: cut - start])
        start += len(text)
        if start >= end:
            return _Expected(kept_ids, kept_texts, count, stop)
    raise AssertionError("the match lies behind the text")


def _plan(
    stops: Sequence[str], *, scored: bool = False, include: bool = False, min_tokens: int = 0
) -> ChoicePlan:
    return ChoicePlan(
        stops=compile_stops(tuple(stops)) if stops else None,
        include_stop=include,
        enders=frozenset({_EOS}),
        min_tokens=min_tokens,
        scored=scored,
        ranked=False,
        suffix="",
    )


def _columns(ids: Sequence[int], position: int, scored: bool) -> types_pb2.TokenColumns:
    """Columns whose logprob tells the position, so that a shifted column shows."""
    columns = types_pb2.TokenColumns(ids=ids)
    if scored:
        columns.top_width = 2
        for place, token in enumerate(ids, position):
            columns.logprobs.append(-float(place))
            columns.ranks.append(place + 1)
            columns.top_ids.extend([token, _IDS[0]])
            columns.top_logprobs.extend([-float(place), -100.0])
    return columns


def _write(choice: Choice) -> Iterator[completion_pb2.CompleteResponse]:
    responses: list[completion_pb2.CompleteResponse] = []

    def add() -> completion_pb2.CompleteResponse:
        responses.append(completion_pb2.CompleteResponse())
        return responses[-1]

    if choice.has_output:
        choice.write(add)
    yield from responses


def _run(
    choice: Choice, ids: Sequence[int], cuts: Sequence[int], scored: bool
) -> list[completion_pb2.CompleteResponse]:
    responses: list[completion_pb2.CompleteResponse] = []
    for begin, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        choice.add(begin, _columns(ids[begin:end], begin, scored))
        responses += _write(choice)
    reason = types_pb2.FINISH_REASON_LENGTH
    choice.end(reason, None)
    return [*responses, *_write(choice)]


@st.composite
def _cases(draw: st.DrawFn) -> tuple[list[int], list[int], list[str], bool, int]:
    ids = draw(st.lists(st.sampled_from(_IDS), min_size=1, max_size=16))
    if _EOS in ids:  # the engine generates nothing after it
        ids = ids[: ids.index(_EOS) + 1]
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    return ids, cuts, draw(_STOPS), draw(st.booleans()), draw(st.integers(0, 6))


_UNFINISHED, _SILENT = (
    next(t for t in _IDS if _TABLE.pieces[t] == b"\xf0"),
    next(t for t in _IDS if not _TABLE.pieces[t]),
)


@given(_cases())
@example(([_UNFINISHED, _IDS[1], _IDS[1]], [], ["\ufffdbb"], False, 0))
@settings(max_examples=500)
def test_text_ids_and_usage_are_those_of_the_whole(
    case: tuple[list[int], list[int], list[str], bool, int],
) -> None:
    """Streamed equals unstreamed; a stop string trims text, ids and usage alike."""
    ids, cuts, stops, include, min_tokens = case
    plan = _plan(stops, include=include, min_tokens=min_tokens)
    expected = _reference(ids, plan, stops)
    responses = _run(Choice(0, plan, Detokenizer(_TABLE), None), ids, cuts, scored=False)
    deltas = [response.delta for response in responses if response.HasField("delta")]
    assert "".join(delta.text for delta in deltas) == "".join(expected.texts)
    assert [token for delta in deltas for token in delta.tokens.ids] == expected.ids
    finished = responses[-1].finished
    assert finished.completion_tokens == expected.completion_tokens
    assert (finished.match.stop_string or None) == expected.stop


@given(_cases())
@example(([_UNFINISHED, _SILENT], [], ["\ufffd"], False, 0))
@example(([_UNFINISHED, _IDS[1], _IDS[1]], [], ["\ufffdbb"], False, 0))
@settings(max_examples=500)
def test_scores_stay_with_their_tokens(
    case: tuple[list[int], list[int], list[str], bool, int],
) -> None:
    """Texts join to the text, offsets point into it, each token keeps its own logprob."""
    ids, cuts, stops, include, min_tokens = case
    plan = _plan(stops, scored=True, include=include, min_tokens=min_tokens)
    expected = _reference(ids, plan, stops)
    responses = _run(Choice(0, plan, Detokenizer(_TABLE), None), ids, cuts, scored=True)
    deltas = [response.delta for response in responses if response.HasField("delta")]
    assert [text for delta in deltas for text in delta.token_texts] == expected.texts
    offset, position = 0, 0
    for delta in deltas:
        assert "".join(delta.token_texts) == delta.text
        assert delta.position == position
        for place, text in enumerate(delta.token_texts):
            assert delta.text_offsets[place] == offset
            assert delta.tokens.logprobs[place] == -position
            assert delta.tokens.top_ids[2 * place] == delta.tokens.ids[place]
            assert delta.top_texts[2 * place] == text
            offset += len(text)
            position += 1


@given(st.lists(st.sampled_from(_IDS[:-1]), max_size=16), _STOPS)
def test_nothing_is_held_without_a_reason(ids: list[int], stops: list[str]) -> None:
    """Text that can't become a stop string is sent with the step that made it certain."""
    plan = _plan(stops)
    choice = Choice(0, plan, Detokenizer(_TABLE), None)
    decoded, sent = "", ""
    detokenizer = Detokenizer(_TABLE)
    proper = {stop[:size] for stop in stops for size in range(1, len(stop))}
    for position, token in enumerate(ids):
        choice.add(position, _columns([token], position, scored=False))
        if choice.outcome is not None:
            return
        decoded += detokenizer.feed(token)
        sent += "".join(response.delta.text for response in _write(choice))
        held = [size for size in range(1, len(decoded) + 1) if decoded[-size:] in proper]
        assert sent == decoded[: len(decoded) - max(held, default=0)]


def test_tokens_sent_again_after_a_resume_count_once() -> None:
    choice = Choice(0, _plan([]), Detokenizer(_TABLE), None)
    choice.add(0, _columns(_IDS[:3], 0, scored=False))
    choice.add(1, _columns(_IDS[1:5], 1, scored=False))
    assert choice.received == _IDS[:5]
    [response] = _write(choice)
    assert response.delta.text == "ababdef a"


def test_a_slow_client_gets_one_delta_for_many_steps() -> None:
    choice = Choice(3, _plan([]), Detokenizer(_TABLE), None)
    for position, token in enumerate(_IDS[:5]):
        choice.add(position, _columns([token], position, scored=False))
    [response] = _write(choice)
    assert response.delta.index == 3
    assert list(response.delta.tokens.ids) == _IDS[:5]
    choice.add(5, _columns([_IDS[0]], 5, scored=False))
    [response] = _write(choice)
    assert response.delta.position == 5


def test_an_echo_comes_first_and_shifts_offsets() -> None:
    """Offsets of generated tokens count from the start of the echoed prompt, in code points."""
    plan = _plan([], scored=True)
    choice = Choice(0, plan, Detokenizer(_TABLE), echo_length=2)
    choice.add(0, _columns([_IDS[3]], 0, scored=True))
    assert not choice.has_output
    choice.put_echo(Echo("é😀", Columns()))
    prompt, generated = _write(choice)
    assert prompt.delta.is_prompt
    assert prompt.delta.text == "é😀"
    assert list(generated.delta.text_offsets) == [2]
    assert not math.isnan(generated.delta.tokens.logprobs[0])


@given(_cases())
def test_best_of_ranks_by_the_tokens_that_are_kept(
    case: tuple[list[int], list[int], list[str], bool, int],
) -> None:
    """The end included, and nothing that a stop string cut, whether or not the client sees any."""
    ids, cuts, stops, include, min_tokens = case
    plan = replace(_plan(stops, include=include, min_tokens=min_tokens), ranked=True)
    choice = Choice(0, plan, Detokenizer(_TABLE), None)
    _run(choice, ids, cuts, scored=True)
    kept = len(_reference(ids, plan, stops).ids)
    assert list(choice.kept_logprobs) == [-float(place) for place in range(kept)]


def test_an_appended_suffix_is_the_last_delta_and_has_no_tokens() -> None:
    plan = ChoicePlan(
        stops=compile_stops(("b",)),
        include_stop=False,
        enders=frozenset(),
        min_tokens=0,
        scored=False,
        ranked=False,
        suffix="ab!",
    )
    choice = Choice(0, plan, Detokenizer(_TABLE), None)
    choice.add(0, _columns([_IDS[0], _IDS[1]], 0, scored=False))
    text, suffix, finished = _write(choice)
    assert text.delta.text == "a"
    assert suffix.delta.text == "ab!"
    assert not suffix.delta.tokens.ids
    assert finished.finished.match.stop_string == "b"
    assert finished.finished.completion_tokens == 2
