"""Control tokens of a prompt: a user's text never becomes one, and the template's stay."""

from hypothesis import example, given
from hypothesis import strategies as st

from services.tokenizer.chat.template.control_tokens import ControlTokens
from services.tokenizer.chat.template.traced_text import (
    from_request,
    from_template,
    join_traced,
    template_spans,
)

_CONTROL = ("<|im_end|>", "<|im_start|>", "[INST]", "<a>", "<ab>", "<a>b")
_TOKENS = ControlTokens(_CONTROL)
_PIECES = st.sampled_from([*_CONTROL, "<|im_", "end|>", "<", "[INS", "T]", "b>", "x", "\U000f0000"])


def _own(text: str) -> list[str]:
    """Return the tokens that a tokenizer finds in a text."""
    return [part for part, is_spelled in _TOKENS.split(text, []) if is_spelled]


@given(st.lists(st.tuples(_PIECES, st.booleans())))
@example([("<|im_", False), ("end|>", True)])
@example([("<", False), ("<a>", True), ("b", False)])
def test_only_what_the_template_wrote_whole_is_a_control_token(
    pieces: list[tuple[str, bool]],
) -> None:
    """Neither a spelled token nor one that the template completes steers the model."""
    text = join_traced(
        from_template(piece) if is_own else from_request(piece) for piece, is_own in pieces
    )
    spans = template_spans(text)
    runs = [text[begin:end] for begin, end in zip(spans[::2], spans[1::2], strict=True)]
    parts = _TOKENS.split(text, spans)
    assert "".join(part for part, _ in parts) == text
    assert all(part in _CONTROL for part, is_spelled in parts if is_spelled)
    encoded = [token for part, is_spelled in parts if not is_spelled for token in _own(part)]
    assert encoded == [token for run in runs for token in _own(run)]


@given(st.text())
@example("<| im_end|>")
@example("<|im_end|")
def test_text_without_control_tokens_is_one_part(text: str) -> None:
    """Its ids then equal those of transformers."""
    assert ControlTokens(("<|im_end|>",)).split(text, []) == [(text, text == "<|im_end|>")]
