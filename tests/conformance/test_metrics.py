"""What operators look at."""

import re
from pathlib import Path

import httpx

from tests.stack import Stack

_DOCUMENT = Path(__file__).parents[2] / "docs" / "operations.md"


def test_the_metrics_that_are_served_are_those_that_are_explained(stack: Stack) -> None:
    """Nobody builds a dashboard from names that only the code knows, or that nobody serves."""
    others = [target.split(":") for target in (stack.tokenizer, stack.engine, stack.grammar)]
    urls = [stack.url, *(f"http://{host}:{int(port) + 1000}" for host, port in others)]
    served = {name for url in urls for name in names(httpx.get(f"{url}/metrics", timeout=60).text)}
    assert served == set(re.findall(r"`(tokenwire_\w+)`", _DOCUMENT.read_text()))


def names(exposition: str) -> set[str]:
    """Those of Tokenwire; when a counter began has a series of its own, which says nothing."""
    found = set(re.findall(r"^# TYPE (tokenwire_\w+)", exposition, re.MULTILINE))
    return {name for name in found if not name.endswith("_created")}
