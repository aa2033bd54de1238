"""A value of JSON ends at its last byte, wherever tokens divide it."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.grammar.matching.json_extent import JsonExtent

_VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(alphabet='a"\\\\[]{},: ', max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)  # fmt: skip


@given(_VALUES, st.sampled_from(["}", "</tool_call>", ", {}", "\n```"]), st.data())
def test_extent_ends_behind_the_value(value: Any, behind: str, data: st.DataObject) -> None:
    text = json.dumps(value).encode()
    cut = data.draw(st.integers(1, len(text)))
    state, taken = JsonExtent().after(text[:cut])
    assert taken == cut
    if state is not None:
        state, rest = state.after(text[cut:] + behind.encode())
        taken += rest
    assert state is None
    assert taken == len(text)
