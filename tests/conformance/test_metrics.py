"""Tests of the metrics that the services expose."""

import re
from pathlib import Path

import httpx

from tests.stack import Stack

_DOCUMENT = Path(__file__).parents[2] / "docs" / "operations.md"


def test_exposed_metrics_are_the_documented_metrics(stack: Stack) -> None:
    others = [target.split(":") for target in (stack.tokenizer, stack.engine, stack.grammar)]
    urls = [stack.url, *(f"http://{host}:{int(port) + 1000}" for host, port in others)]
    served = {name for url in urls for name in names(httpx.get(f"{url}/metrics", timeout=60).text)}
    assert served == set(re.findall(r"`(tokenwire_\w+)`", _DOCUMENT.read_text()))


def names(exposition: str) -> set[str]:
    """Return the names of Tokenwire's metrics, without the counters' times of creation."""
    found = set(re.findall(r"^# TYPE (tokenwire_\w+)", exposition, re.MULTILINE))
    return {name for name in found if not name.endswith("_created")}
