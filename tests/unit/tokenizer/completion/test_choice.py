"""One choice: text, ids and scores do not depend on how the engine splits its deltas."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.tokenizer.completion.choice import Choice
from services.tokenizer.completion.columns import Columns, Score
from services.tokenizer.completion.echo import Echo, make_echo
from services.tokenizer.completion.plan import ChoicePlan
from services.tokenizer.completion.prompt_encoding import EncodedPrompt
from services.tokenizer.completion.prompt_processor import write_text
from services.tokenizer.completion.stops import compile_stops
from services.tokenizer.text.detokenizer import Detokenizer, TokenTable, token_table
from tests.unit.tokenizer.checkpoints import byte_level
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

_TOKENIZER = byte_level()
_IDS_OF = _TOKENIZER.get_vocab()
_EOS = _IDS_OF["</s>"]
_FULL_TABLE: TokenTable = token_table(_IDS_OF, {"type": "ByteLevel"}, _TOKENIZER.get_vocab_size())
_TABLE: TokenTable = _FULL_TABLE.without({_IDS_OF["<s>"]: "<s>", _EOS: "</s>"})
# words, the bytes of 😀, a newline, a special token that adds nothing, and the end
_IDS = [
    _IDS_OF[token]
    for token in ("a", "b", "ab", "def", "Ġa", "Ã©", "ð", "Ł", "ĺ", "Ģ", "Ċ", "<s>", "</s>")
]
_STOPS = st.lists(st.text(alphabet="abdef é😀\n\ufffd", min_size=1, max_size=4), max_size=3)


@dataclass(frozen=True, slots=True)
class _Expected:
    ids: list[int]
    texts: list[str]
    """Text that each id adds."""
    completion_tokens: int
    stop: str | None


def _reference(ids: Sequence[int], plan: ChoicePlan, stops: Sequence[str]) -> _Expected:
    """Return the expected output, from decoding and searching the whole at once."""
    ended = next((place for place, token in enumerate(ids) if token in plan.end_ids), len(ids))
    detokenizer = Detokenizer(_TABLE)
    texts = [detokenizer.feed(token) for token in ids[:ended]]
    decoded = len("".join(texts))
    first = len("".join(texts[: max(0, plan.min_tokens - 1)])) + 1
    if rest := detokenizer.flush():
        texts[_began(ids[:ended])] += rest
    texts += [""] * len(ids[ended : ended + 1])
    tokens = list(ids[: ended + 1])
    whole = "".join(texts)
    # the rest belongs to the token that began the character, but comes after the last one
    last = len(whole) if ended >= plan.min_tokens else decoded
    for end in range(first, last + 1):
        found = [stop for stop in stops if whole[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            cut = end if plan.include_stop else end - len(stop)
            if end > decoded:  # the flush completed it, after the last token
                kept = _cut(tokens[:ended], texts[:ended], cut, len(whole) + 1, stop)
                return replace(kept, completion_tokens=ended)
            return _cut(tokens, texts, cut, end, stop)
    return _Expected(tokens, texts, len(tokens), None)


def _began(ids: Sequence[int]) -> int:
    """Return the place of the first id with bytes of the unfinished character at the end."""
    data = b"".join(_TABLE.pieces[token] for token in ids)
    unfinished = next(size for size in (1, 2, 3) if data[-size] >= 0xC0)
    for place in range(len(ids) - 1, -1, -1):
        unfinished -= len(_TABLE.pieces[ids[place]])
        if unfinished <= 0:
            return place
    raise AssertionError("no character is unfinished")


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
    return _Expected(kept_ids, kept_texts, len(tokens), stop)


def _plan(
    stops: Sequence[str], *, scored: bool = False, include: bool = False, min_tokens: int = 0
) -> ChoicePlan:
    return ChoicePlan(
        stops=compile_stops(tuple(stops)) if stops else None,
        include_stop=include,
        end_ids=frozenset({_EOS}),
        min_tokens=min_tokens,
        scored=scored,
        ranked=False,
        suffix="",
    )


def _columns(ids: Sequence[int], position: int, scored: bool) -> types_pb2.TokenColumns:
    """Return columns whose logprobs encode the position, so that a shift is seen."""
    columns = types_pb2.TokenColumns(ids=ids)
    if scored:
        columns.top_width = 2
        for place, token in enumerate(ids, position):
            columns.logprobs.append(-float(place))
            columns.ranks.append(place + 1)
            columns.top_ids.extend([token, _IDS[0]])
            columns.top_logprobs.extend([-float(place), -100.0])
    return columns


def _write(choice: Choice) -> Iterator[completion_pb2.GenerateResponse]:
    responses: list[completion_pb2.GenerateResponse] = []

    def add() -> completion_pb2.GenerateResponse:
        responses.append(completion_pb2.GenerateResponse())
        return responses[-1]

    if choice.has_output:
        write_text(choice.take(), add)
    yield from responses


_Responses = list[completion_pb2.GenerateResponse]


def _run(choice: Choice, ids: Sequence[int], cuts: Sequence[int], scored: bool) -> _Responses:
    return _flat(_writes(choice, ids, cuts, scored))


def _flat(writes: Sequence[_Responses]) -> _Responses:
    return list(chain.from_iterable(writes))


def _writes(
    choice: Choice, ids: Sequence[int], cuts: Sequence[int], scored: bool, position: int = 0
) -> list[_Responses]:
    """Return the responses of each write. A Session sends those of one write together."""
    writes: list[_Responses] = []
    for begin, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        choice.add(position + begin, _columns(ids[begin:end], position + begin, scored))
        writes.append(list(_write(choice)))
    choice.end(types_pb2.FINISH_REASON_LENGTH, None)
    return [*writes, list(_write(choice))]


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
_BEGUN = [_UNFINISHED, next(t for t in _IDS if _TABLE.pieces[t] == b"\x9f")]


@given(_cases())
@example(([_IDS[0]] * 4 + _BEGUN, [], ["\ufffd"], False, 6))
@example(([_UNFINISHED, _IDS[1], _IDS[1]], [], ["\ufffdbb"], False, 0))
@example(([_UNFINISHED, _SILENT], [], ["\ufffd"], True, 0))
@settings(max_examples=500)
def test_streamed_text_ids_and_usage_equal_unstreamed(
    case: tuple[list[int], list[int], list[str], bool, int],
) -> None:
    """A stop string trims text, ids and usage alike."""
    ids, cuts, stops, include, min_tokens = case
    plan = _plan(stops, include=include, min_tokens=min_tokens)
    expected = _reference(ids, plan, stops)
    responses = _run(Choice(0, plan, Detokenizer(_TABLE), None), ids, cuts, scored=False)
    deltas = [response.delta for response in responses if response.HasField("delta")]
    assert "".join(delta.text for delta in deltas) == "".join(expected.texts)
    assert [token for delta in deltas for token in delta.token_ids] == expected.ids
    finished = responses[-1].finished
    assert finished.completion_tokens == expected.completion_tokens
    assert (finished.match.stop_string or None) == expected.stop


@given(_cases())
@example(([_IDS[0]] * 4 + _BEGUN, [], ["\ufffd"], False, 6))
@example(([_UNFINISHED, _SILENT], [], ["\ufffd"], False, 0))
@example(([_UNFINISHED, _IDS[1], _IDS[1]], [], ["\ufffdbb"], False, 0))
@settings(max_examples=500)
def test_scores_and_offsets_stay_with_their_tokens(
    case: tuple[list[int], list[int], list[str], bool, int],
) -> None:
    """Token texts join to the text, except for hidden tokens, and offsets point into it."""
    ids, cuts, stops, include, min_tokens = case
    plan = _plan(stops, scored=True, include=include, min_tokens=min_tokens)
    expected = _reference(ids, plan, stops)
    responses = _run(Choice(0, plan, Detokenizer(_TABLE), None), ids, cuts, scored=True)
    deltas = [response.delta for response in responses if response.HasField("delta")]
    assert [token for delta in deltas for token in delta.token_ids] == expected.ids
    names = [_TABLE.hidden.get(token) for token in expected.ids]
    shown = [
        text if name is None else name for text, name in zip(expected.texts, names, strict=True)
    ]
    assert [text for delta in deltas for text in delta.token_texts] == shown
    offset, position = 0, 0
    for delta in deltas:
        begin = position
        for place, text in enumerate(delta.token_texts):
            assert delta.text_offsets[place] == offset
            assert delta.tokens.logprobs[place] == -position
            assert delta.tokens.top_ids[2 * place] == delta.tokens.ids[place]
            assert delta.top_texts[2 * place] == text
            offset += len(expected.texts[position])
            position += 1
        assert delta.position == begin
        assert "".join(expected.texts[begin:position]) == delta.text


@given(st.lists(st.sampled_from(_IDS[:-1]), max_size=16), _STOPS)
@example([_UNFINISHED, _UNFINISHED], [])
def test_text_of_a_token_is_sent_as_soon_as_no_stop_string_can_contain_it(
    ids: list[int], stops: list[str]
) -> None:
    """A client would see text later than the model generates it."""
    plan = _plan(stops)
    choice = Choice(0, plan, Detokenizer(_TABLE), None)
    decoded, sent, ends, settled = "", "", [0], 0
    detokenizer = Detokenizer(_TABLE)
    proper = {stop[:size] for stop in stops for size in range(1, len(stop))}
    for position, token in enumerate(ids):
        choice.add(position, _columns([token], position, scored=False))
        if choice.outcome is not None:
            return
        text = detokenizer.feed(token)
        if text or not detokenizer.holds_back:  # a character that begins may belong to the token
            settled = len(decoded) if detokenizer.holds_back else len(decoded + text)
        decoded += text
        sent += "".join(response.delta.text for response in _write(choice))
        ends.append(len(decoded))
        if not stops:
            assert sent == decoded
            continue
        held = [size for size in range(1, len(decoded) + 1) if decoded[-size:] in proper]
        limit = min(settled, len(decoded) - max(held, default=0))
        assert sent == decoded[: max(end for end in ends if end <= limit)]


@given(_cases(), st.integers(0, 16), st.booleans(), st.booleans())
@example(([_UNFINISHED, _IDS[1], _IDS[1]], [], ["\ufffdbb"], False, 0), 1, True, False)
@settings(max_examples=500)
def test_resumed_choice_continues_behind_what_was_received(
    case: tuple[list[int], list[int], list[str], bool, int],
    received: int,
    scored: bool,
    again: bool,
) -> None:
    """A client would get text twice, or miss some.

    The engine continues behind the received ids, or generates them `again`.
    """
    ids, _, stops, include, min_tokens = case
    plan = _plan(stops, scored=scored, include=include, min_tokens=min_tokens)
    choice = Choice(0, plan, Detokenizer(_TABLE), None)
    writes = _writes(choice, ids, range(1, len(ids)), scored)
    before, after = _flat(writes[:received]), _flat(writes[received:])
    if any(response.HasField("finished") for response in before):
        return
    known = [token for response in before for token in response.delta.token_ids]
    resumed = Choice(0, plan, Detokenizer(_TABLE), None)
    resumed.skip(known)
    if not again:
        resumed.replay()
    begin = 0 if again else len(known)
    rest = _writes(resumed, ids[begin:], range(1, len(ids) - begin), scored, begin)
    assert _joined(_flat(rest)) == _joined(after)


def _joined(responses: _Responses) -> completion_pb2.ChoiceDelta:
    """Return all deltas as one; repeated fields and texts are joined, the end is in `tokens`."""
    joined = completion_pb2.ChoiceDelta()
    for response in responses:
        delta = response.delta
        joined.text += delta.text
        joined.token_texts.extend(delta.token_texts)
        joined.text_offsets.extend(delta.text_offsets)
        joined.token_ids.extend(delta.token_ids)
        joined.tokens.ids.extend(delta.tokens.ids)
        joined.tokens.logprobs.extend(delta.tokens.logprobs)
        if response.HasField("finished"):
            joined.position = response.finished.completion_tokens
            joined.top_texts.append(response.finished.match.stop_string)
    return joined


def test_tokens_repeated_after_a_resume_count_once() -> None:
    choice = Choice(0, _plan([]), Detokenizer(_TABLE), None)
    choice.add(0, _columns(_IDS[:3], 0, scored=False))
    choice.add(1, _columns(_IDS[1:5], 1, scored=False))
    assert choice.received == _IDS[:5]
    [response] = _write(choice)
    assert response.delta.text == "ababdef a"


def test_slow_client_gets_one_delta_for_many_steps() -> None:
    choice = Choice(3, _plan([]), Detokenizer(_TABLE), None)
    for position, token in enumerate(_IDS[:5]):
        choice.add(position, _columns([token], position, scored=False))
    [response] = _write(choice)
    assert response.delta.index == 3
    assert list(response.delta.token_ids) == _IDS[:5]
    choice.add(5, _columns([_IDS[0]], 5, scored=False))
    [response] = _write(choice)
    assert response.delta.position == 5


def test_echo_comes_first_and_shifts_offsets() -> None:
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


@given(
    st.lists(st.sampled_from(_IDS), min_size=1, max_size=6),
    _cases(),
    st.booleans(),
)
@example([_UNFINISHED], ([_EOS], [], [], False, 0), True)
@example([_UNFINISHED], ([_SILENT, _EOS], [1], ["b"], False, 0), True)
@example([_UNFINISHED], ([_SILENT], [], [], False, 0), False)
@settings(max_examples=500)
def test_echo_and_output_join_to_the_whole(
    prompt: list[int], case: tuple[list[int], list[int], list[str], bool, int], scored: bool
) -> None:
    """The prompt may end inside a character, which the output completes or not.

    No stop string matches here.
    """
    ids, cuts, _, _, _ = case
    texts, ended = (_echoed(prompt, flush=flush) for flush in (False, True))
    echoed = EncodedPrompt(prompt, texts, ended, _FULL_TABLE, is_infill=False)
    for generated in ([], ids):
        scores = [Score.none(2)] * len(prompt) if scored else None
        plan = _plan(["\0"], scored=scored)
        detokenizer = Detokenizer(_TABLE, prompt)
        choice = Choice(0, plan, detokenizer, len("".join(echoed.texts)))
        choice.put_echo(make_echo(echoed, scores))
        responses = _run(choice, generated, cuts if generated else [], scored)
        first, *deltas = [response.delta for response in responses if response.HasField("delta")]
        text = "".join(delta.text for delta in (first, *deltas))
        assert text == _whole_text(prompt, [token for token in generated if token != _EOS])
        assert first.is_prompt
        assert list(first.token_ids) == prompt
        if not scored:
            continue
        assert "".join(first.token_texts) == first.text
        tokens = [token for delta in (first, *deltas) for token in delta.token_ids]
        offsets = [place for delta in (first, *deltas) for place in delta.text_offsets]
        shown = [text for delta in (first, *deltas) for text in delta.token_texts]
        assert tokens == [*prompt, *generated]
        place = 0
        for index, (offset, added) in enumerate(zip(offsets, shown, strict=True)):
            assert offset == place
            hidden = index >= len(prompt) and tokens[index] in _TABLE.hidden
            place += 0 if hidden else len(added)
        assert place == len(text)


def _echoed(ids: Sequence[int], *, flush: bool) -> list[str]:
    detokenizer = Detokenizer(_FULL_TABLE)
    texts = [detokenizer.feed(token) for token in ids]
    if flush and (rest := detokenizer.flush()):
        texts[_began(ids)] += rest
    return texts


def _whole_text(prompt: Sequence[int], generated: Sequence[int]) -> str:
    """Return the text of prompt and output, with the prompt's special tokens."""
    data = [_FULL_TABLE.pieces[token] for token in prompt]
    data += [_TABLE.pieces[token] for token in generated]
    return b"".join(data).decode("utf-8", "replace")


def test_echo_waits_for_the_token_that_completes_its_last_character() -> None:
    """An echo that was streamed can't be changed."""
    prompt = EncodedPrompt([_UNFINISHED], [""], ["\ufffd"], _FULL_TABLE, is_infill=False)
    choice = Choice(0, _plan([]), Detokenizer(_TABLE, [_UNFINISHED]), 0)
    choice.put_echo(make_echo(prompt, None))
    choice.add(0, _columns([_SILENT], 0, scored=False))
    assert not choice.has_output
    choice.add(1, _columns([_IDS[0]], 1, scored=False))
    echo, generated = _write(choice)
    assert (echo.delta.text, generated.delta.text) == ("", "\ufffda")


@pytest.mark.parametrize("end_id", [_EOS, _IDS[3]])
def test_hidden_tokens_are_shown_by_their_own_text(end_id: int) -> None:
    """Clients can tell an EOS, another special token and a stop id apart."""
    plan = replace(_plan(["\0"], scored=True), end_ids=frozenset({end_id}))
    choice = Choice(0, plan, Detokenizer(_TABLE), None)
    ids = [_IDS[0], _SILENT, _IDS[1], end_id]
    columns = types_pb2.TokenColumns(
        ids=ids, logprobs=[-1] * 4, ranks=[1] * 4, top_width=2, top_ids=[_SILENT, _EOS] * 4,
        top_logprobs=[-1] * 8,
    )  # fmt: skip
    choice.add(0, columns)
    choice.end(types_pb2.FINISH_REASON_STOP, None)
    [response, _] = _write(choice)
    assert response.delta.text == "ab"
    assert list(response.delta.token_texts) == [
        "a",
        "<s>",
        "b",
        "</s>" if end_id == _EOS else "def",
    ]
    assert list(response.delta.text_offsets) == [0, 1, 1, 2]
    assert list(response.delta.top_texts) == ["<s>", "</s>"] * 4


@given(_cases())
def test_best_of_ranks_by_the_kept_tokens(
    case: tuple[list[int], list[int], list[str], bool, int],
) -> None:
    """The kept tokens include the end id, and no token that a stop string cut."""
    ids, cuts, stops, include, min_tokens = case
    plan = replace(_plan(stops, include=include, min_tokens=min_tokens), ranked=True)
    choice = Choice(0, plan, Detokenizer(_TABLE), None)
    _run(choice, ids, cuts, scored=True)
    kept = len(_reference(ids, plan, stops).ids)
    assert list(choice.kept_logprobs) == [-float(place) for place in range(kept)]


def test_appended_suffix_is_the_last_delta_and_has_no_tokens() -> None:
    plan = ChoicePlan(
        stops=compile_stops(("b",)),
        include_stop=False,
        end_ids=frozenset(),
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
    assert not suffix.delta.token_ids
    assert finished.finished.match.stop_string == "b"
    assert finished.finished.completion_tokens == 2
