"""Traced strings: their operations give what `str` gives, and no text of the request as trusted."""

from collections.abc import Callable
from operator import mod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markupsafe import Markup

from services.tokenizer.chat.template.traced_text import (
    TracedMarkup,
    from_request,
    from_template,
    join_traced,
    template_spans,
)

_OWN, _ASKED = "AB \n", "ab\t\r"  # letters that only the template writes, or only the request
_PIECES = st.lists(
    st.text(_OWN, max_size=4).map(from_template) | st.text(_ASKED, max_size=4).map(from_request),
    max_size=4,
)
_OPERATIONS: dict[str, Callable[[str, str], object]] = {
    "add": lambda a, b: a + b,
    "add plain": lambda a, b: ("a" + a, a + "b"),
    "repeat": lambda a, b: (a * 2, 3 * b),
    "format": lambda a, b: (mod(a + "%s%s", (a, b)), mod(b + "%s", a), mod(b + "%%", ())),
    "index": lambda a, b: (a[0], a[-1]) if a else "",
    "slice": lambda a, b: (a[1:], a[:-1], a[::-1], a[1:5:2]),
    "characters": lambda a, b: list(a),
    "strip": lambda a, b: (a.strip(), a.lstrip(), a.rstrip(), a.strip("a"), a.rstrip("A\n")),
    "remove": lambda a, b: ((b + a).removeprefix(b), (a + b).removesuffix(b), a.removeprefix(b)),
    "split": lambda a, b: (a.split(), a.split(None, 1), a.rsplit(None, 1), a.splitlines()),
    "lines": lambda a, b: a.splitlines(keepends=True),
    "split at": lambda a, b: (a.split(b), a.split(b, 1), a.rsplit(b, 1)) if b else "",
    "part": lambda a, b: (a.partition(b), a.rpartition(b)) if b else "",
    "replace": lambda a, b: (a.replace("a", b), a.replace("A", b, 1), a.replace("", "a")),
    "join": lambda a, b: (a.join([b, "a", b]), b.join([])),
    "compare": lambda a, b: (a == b, a in b, a.startswith(b), len(a), a < b, hash(a)),
    "find": lambda a, b: (a.find(b), a.rfind(b), a.count(b), a.isspace()),
    "other": lambda a, b: (a.center(9), a.zfill(3), a.expandtabs(), str(a), f"{a}{b}"),
}


def _texts(value: object) -> list[str]:
    if isinstance(value, list | tuple):
        return [text for part in value for text in _texts(part)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("name", _OPERATIONS)
@settings(max_examples=30)
@given(_PIECES, _PIECES)
def test_operation_gives_what_it_gives_on_plain_text(
    name: str, first: list[str], second: list[str]
) -> None:
    """A template's string logic must see the text, and may not launder a user's letters."""
    operation = _OPERATIONS[name]
    a, b = join_traced(first), join_traced(second)
    result = operation(a, b)
    assert result == operation(str.__str__(a), str.__str__(b))
    for text in _texts(result):
        spans = template_spans(join_traced([text]))
        for begin, end in zip(spans[::2], spans[1::2], strict=True):
            assert not set(text[begin:end]) & set(_ASKED)


@pytest.mark.parametrize("name", [name for name in _OPERATIONS if name not in ("format", "other")])
def test_operation_keeps_what_the_template_wrote(name: str) -> None:
    """Control tokens of a template that composes them must reach the model as such."""
    results = _OPERATIONS[name](from_template("AB A B"), from_template("A"))
    for text in _texts(results):
        spans = template_spans(join_traced([text]))
        own = sum(end - begin for begin, end in zip(spans[::2], spans[1::2], strict=True))
        assert own >= len(text) - text.count("a") - text.count("b") or "replace" in name


def test_fields_of_a_format_keep_origins() -> None:
    text = from_template("<%s> %s") % (from_request("a"), from_template("B"))
    assert (text, template_spans(text)) == ("<a> B", [0, 1, 2, 5])
    assert template_spans(from_template("<%5s>") % "a") == []


def test_letter_case_keeps_origins() -> None:
    for text in (from_template("Ab").lower(), from_template("Ab").upper()):
        assert template_spans(text) == [0, 2]
    assert template_spans(from_template("ß").upper()) == []


def test_markup_escapes_as_without_tracing() -> None:
    """Templates with `tojson | safe` get the text that transformers renders."""
    own, asked = from_template("<A>"), from_request("<a>")
    result = own + TracedMarkup(asked) + own
    assert str(result) == str("<A>" + Markup("<a>") + "<A>")
    assert template_spans(join_traced([str(result)])) == [0, 9, 12, 21]
