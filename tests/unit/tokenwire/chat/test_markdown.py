"""Tests of Markdown that is rendered while it grows."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenwire.cli.chat.markdown_rows import RowRenderer
from tokenwire.cli.chat.markdown_units import MarkdownUnits, Unit

ANSWER = """# Title

Some **bold** text with `code`, and <b>tags</b>.

- one
- two
  - inside
- three

1. first
1. second

   more of it

1. third

```python
def f():
    return 1
```

| a | b |
|---|---|
| 1 | 2 |

> quote
"""
COLUMNS = 40
PIECES = st.sampled_from(
    [*("# ", "\n", "\n\n", "- ", "1. ", "```", "`", "**"), *("|", "|-", "a b", " ", "> ", "[x](y)")]
)


def grown(pieces: list[str]) -> list[Unit]:
    """Return the units of a text that came in pieces."""
    growing, found = MarkdownUnits(), []
    for piece in pieces:
        growing.add(piece)
        final, _ = growing.take()
        found += final
    return found + growing.take_all()


def rows(units: list[Unit]) -> list[str]:
    renderer = RowRenderer()
    return [row for unit in units for row in renderer.unit_rows(unit, COLUMNS)]


@pytest.mark.parametrize("size", [1, 3, 17])
def test_streamed_answer_looks_like_the_whole_one(size: int) -> None:
    pieces = [ANSWER[at : at + size] for at in range(0, len(ANSWER), size)]
    assert rows(grown(pieces)) == rows(grown([ANSWER]))


def test_every_kind_of_block_is_rendered() -> None:
    shown = "\n".join(rows(grown([ANSWER])))
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    for expected in ("Title", "Some bold text with code", "<b>tags</b>", " • one", " 2. second"):
        assert expected in plain
    assert " 3. third" in plain
    assert "  def f():" in plain
    assert "▌ quote" in plain
    assert "**" not in plain


def test_long_code_is_whole_and_in_order() -> None:
    lines = [f"line_{number} = {number}" for number in range(437)]
    pieces = ["```python\n", *(f"{line}\n" for line in lines), "```\n", "after"]
    shown = [row.strip() for row in rows(grown(pieces)) if row]
    assert [re.sub(r"\x1b\[[0-9;]*m", "", row) for row in shown] == [*lines, "after"]


@given(st.lists(PIECES, max_size=30))
def test_any_markup_is_rendered(pieces: list[str]) -> None:
    """A model may write half a table or a list in a heading; the chat must go on."""
    rows(grown(pieces))


@given(st.lists(st.sampled_from("abc"), min_size=1))
def test_no_text_is_lost(letters: list[str]) -> None:
    text = "\n\n".join(letters)
    assert [unit.source for unit in grown([text])] == letters
