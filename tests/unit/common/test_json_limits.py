"""Elements of a body are counted before it is decoded."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common import json_limits
from tokenwire.errors import ServiceError


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b'{"prompt":[' + b",".join([b"[1]"] * 70_000) + b"]}", "lists and objects"),
        (b'{"prompt":[' + b",".join([b'""'] * 400_000) + b"]}", "strings"),
        (b'{"prompt":[' + b",".join([b"1"] * 1_100_000) + b"]}", "values"),
        (b"{" + b",".join(b'"f%d":[1,2]' % i for i in range(1_002)) + b"}", "fields"),
    ],
)
def test_body_with_too_many_elements_is_refused(body: bytes, what: str) -> None:
    with pytest.raises(ServiceError, match=f"{what};"):
        json_limits.check_json_limits(body)


def test_brackets_and_quotes_within_strings_are_not_counted() -> None:
    text = '\\"[{,:}]\\' * 200_000
    json_limits.check_json_limits(json.dumps({"prompt": text, "n": [1, 2]}).encode())


_JSON = st.recursive(
    st.none() | st.integers() | st.text('\\",[]{}:a\n', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text('\\",a', max_size=4), inner)
    ),
    max_leaves=20,  # a body of a thousand values has nothing that one of a hundred lacks
)


def _counts(value: object) -> tuple[int, int]:
    """Return the number of strings, and of lists and objects."""
    if isinstance(value, str):
        return 1, 0
    if not isinstance(value, list | dict):
        return 0, 0
    parts = list(value) if isinstance(value, list) else [*value, *value.values()]
    inner = [_counts(part) for part in parts]
    return sum(strings for strings, _ in inner), 1 + sum(containers for _, containers in inner)


@given(st.dictionaries(st.text('\\",[a', max_size=4), _JSON))
def test_counts_equal_those_of_the_decoded_body(body: dict[str, object]) -> None:
    counted: dict[str, int] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_limits, "_require", lambda count, _, what: counted.update({what: count}))
        json_limits.check_json_limits(json.dumps(body).encode())
    assert (counted["strings"], counted["lists and objects"]) == _counts(body)
    assert counted["fields"] == max(0, len(body) - 1)
