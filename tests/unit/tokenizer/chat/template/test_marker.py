"""Marks of control tokens: a user's text never becomes one, and other text stays unchanged."""

from hypothesis import example, given
from hypothesis import strategies as st

from services.tokenizer.chat.template.marker import Marker

_CONTROL = ("<|im_end|>", "<|im_start|>", "[INST]", "<a>", "<ab>")
_MARKER = Marker(_CONTROL)
_TEXTS = st.lists(
    st.sampled_from([*_CONTROL, "<|im_", "end|>", "<", "[INS", "T]", "b>", "x", "\U000f0000", ""])
).map("".join)


@given(_TEXTS, _TEXTS, st.sampled_from(["", "|>", "end|>", "T]", "b>", "<", "<|im_"]))
def test_template_can_not_join_a_control_token_from_user_text(
    first: str, second: str, between: str
) -> None:
    """Only the template itself can write a control token."""
    marked, reader = _MARKER.mark([first, {second: second}])
    assert isinstance(marked, list)
    assert isinstance(marked[1], dict)
    [(key, value)] = marked[1].items()
    text = f"{marked[0]}{between}\n{key}\n{value}"
    parts = reader.parts(text)
    assert reader.plain(text) == f"{first}{between}\n{second}\n{second}"
    assert "".join(part for part, _ in parts) == reader.plain(text)
    for part, is_users in parts:
        assert is_users == (part in _CONTROL)
        assert is_users or not any(token in part for token in _CONTROL)


@given(st.text())
@example("<| im_end|>")
@example("<|im_end|")
def test_text_without_control_tokens_is_unchanged(text: str) -> None:
    """Its ids then equal those of transformers. A text may still end with half a token."""
    token = "<|im_end|>"
    marked, reader = Marker((token,)).mark([text])
    begins = any(text.endswith(token[:size]) for size in range(1, len(token)))
    assert (marked == [text]) == (token not in text and not begins)
    if marked == [text]:
        assert reader.parts(text) == [(text, False)]


def test_marks_that_a_template_separates_still_split_the_text() -> None:
    marked, reader = _MARKER.mark("a<ab>b")
    assert isinstance(marked, str)
    head, tail = marked.split("<ab>")
    assert reader.parts(head + "<a" + tail) == [("a", False), ("<a", False), ("b", False)]
    assert reader.plain(head) == "a"
