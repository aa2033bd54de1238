"""Values of the property tests of requests with any fields, and a neighbour of each request."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, TypeAlias

import httpx
import pytest
from hypothesis import strategies as st

Values: TypeAlias = st.SearchStrategy[Any]

EXAMPLES = 80
HANG_SECONDS = 60
IDS = st.lists(st.integers(0, 2_000), min_size=1, max_size=6)
BOOLEAN = st.booleans()
REGEXES = st.sampled_from(["[a-c]{2,6}", "(yes|no)", ".*", "(a|b)*c", "(", "a{100000}", "\\bx", ""])
GBNF = st.sampled_from(['root ::= "a" root | "b"', "root ::= x", "root ::= (", 'start: "a"'])


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A greedy request with a known answer, which other requests must not change."""

    http: httpx.AsyncClient
    body: dict[str, Any]
    text: str

    async def is_unaffected(self) -> None:
        response = await self.http.post("/v1/completions", json=self.body)
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["text"] == self.text


def assert_enough_answered(answered: Counter[str]) -> None:
    """Assert that enough requests of each kind were answered. About a third is."""
    if not answered:
        pytest.skip("the tests above were not selected")
    assert min(answered.values()) >= EXAMPLES / 20
