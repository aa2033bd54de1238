"""Parser of gpt-oss's messages: channels, calls, and no result that depends on the pieces."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.chat.answer.harmony_parser import HarmonyParser
from services.tokenizer.chat.answer.message_parser import SegmentKind

_TOOLS = {"get_weather": {"type": "object"}, "get": {"type": "object"}}
_ANALYSIS = "<|channel|>analysis<|message|>I need it.<|end|>"
_FINAL = "<|channel|>final<|message|>Yes."
_CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"a": "é"}'
_START = "<|start|>assistant"


def _read(
    pieces: Sequence[str],
    within: SegmentKind | None = None,
    *,
    is_cut: bool = False,
    is_forced: bool = False,
) -> tuple[str, str, list[tuple[str, str]]]:
    """Return reasoning, content and calls."""
    parser = HarmonyParser(_TOOLS, within, is_forced=is_forced)
    segments = [part for piece in pieces for part in parser.feed(piece)]
    segments += parser.finish(is_cut=is_cut)
    assert sum(part.source for part in segments) == len("".join(pieces))
    texts = {SegmentKind.REASONING: "", SegmentKind.CONTENT: "", SegmentKind.MARKUP: ""}
    calls: list[tuple[str, str]] = []
    for part in segments:
        if part.kind is SegmentKind.CALL:
            calls.append((part.text, ""))
        elif part.kind is SegmentKind.ARGUMENTS:
            calls[-1] = calls[-1][0], calls[-1][1] + part.text
        else:
            texts[part.kind] += part.text
    assert not texts[SegmentKind.MARKUP]
    return texts[SegmentKind.REASONING], texts[SegmentKind.CONTENT], calls


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (f"{_ANALYSIS}{_START}{_FINAL}", "I need it.", "Yes.", []),
        (_FINAL, "", "Yes.", []),
        (f"{_FINAL}<|return|>", "", "Yes.", []),
        (f"{_ANALYSIS}{_START}{_CALL}", "I need it.", "", [("get_weather", '{"a": "é"}')]),
        (f"{_CALL}<|call|>", "", "", [("get_weather", '{"a": "é"}')]),
        (
            ' to=functions.get<|channel|>commentary json<|message|>{"b": {}}',
            "",
            "",
            [("get", '{"b": {}}')],
        ),
        (
            f"{_ANALYSIS}{_START}<|channel|>commentary<|message|>I look.<|end|>{_START}{_CALL}",
            "I need it.",
            "I look.",
            [("get_weather", '{"a": "é"}')],
        ),
        (
            f"{_ANALYSIS}{_START}<|channel|>analysis<|message|>Really.<|end|>{_START}{_FINAL}",
            "I need it.\nReally.",
            "Yes.",
            [],
        ),
        ("Yes, plainly.", "", "Yes, plainly.", []),
        (
            "<|channel|>analysis to=python code<|message|>print(1)",
            "",
            "<|channel|>analysis to=python code<|message|>print(1)",
            [],
        ),
        ("<|channel|>final", "", "<|channel|>final", []),
        (" to be", "", " to be", []),
    ],
)
def test_parts_go_where_their_headers_say(
    text: str, reasoning: str, content: str, calls: list[tuple[str, str]]
) -> None:
    """The text may arrive at once, by characters, or in two parts."""
    assert _read([text]) == (reasoning, content, calls)
    assert _read(list(text)) == (reasoning, content, calls)
    for cut in range(len(text)):
        assert _read([text[:cut], text[cut:]]) == (reasoning, content, calls)


def test_interrupted_answer_shows_no_markup() -> None:
    """A client that gets half of a header would show it."""
    whole = f"{_ANALYSIS}{_START}<|channel|>commentary<|message|>Hm.<|end|>{_START}{_CALL}"
    for cut in range(len(whole)):
        reasoning, content, calls = _read([whole[:cut]], is_cut=True)
        assert "I need it.".startswith(reasoning.partition("<")[0])
        assert "Hm.".startswith(content.partition("<")[0])
        assert all(name == "get_weather" for name, _ in calls)
        assert "<|channel|>" not in reasoning + content


@pytest.mark.parametrize("within", [SegmentKind.CONTENT, SegmentKind.REASONING])
def test_prompt_may_end_within_a_part(within: SegmentKind) -> None:
    reasoning, content, _ = _read([f" it is.<|end|>{_START}{_FINAL}"], within)
    if within is SegmentKind.REASONING:
        assert (reasoning, content) == (" it is.", "Yes.")
    else:
        assert (reasoning, content) == ("", " it is.\nYes.")


def test_forced_calls_leave_no_content() -> None:
    assert _read([_CALL], is_forced=True) == ("", "", [("get_weather", '{"a": "é"}')])


_SCRAPS = st.sampled_from(
    ["<|start|>", "assistant", "<|channel|>", "analysis", "final", "commentary", "<|constrain|>",
     " to=functions.get", "json", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "{", "}",
     '"a": 1', " ", "\n", "é", "<|", _ANALYSIS, _FINAL, _CALL]
)  # fmt: skip


@given(
    st.lists(_SCRAPS, max_size=10),
    st.booleans(),
    st.sampled_from([None, SegmentKind.CONTENT, SegmentKind.REASONING]),
    st.data(),
)
def test_any_pieces_of_any_text_give_the_same_message(
    scraps: list[str], is_cut: bool, within: SegmentKind | None, data: st.DataObject
) -> None:
    """Arguments are JSON, unless the answer was cut within them."""
    text = "".join(scraps)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = _read([text], within, is_cut=is_cut)
    assert _read(pieces, within, is_cut=is_cut) == whole
    calls = whole[2]
    for place, (name, arguments) in enumerate(calls):
        assert name in _TOOLS
        if not is_cut or place < len(calls) - 1:
            assert isinstance(json.loads(arguments), dict)
