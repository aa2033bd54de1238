"""Names of Tokenwire's metrics, as docs/watching.md and a service state them."""

import re
from pathlib import Path

import httpx

__all__ = ["documented_metrics", "exposed_metrics"]

_DOCUMENT = Path(__file__).parents[1] / "docs" / "watching.md"


def documented_metrics() -> set[str]:
    return set(re.findall(r"`(tokenwire_\w+)`", _DOCUMENT.read_text()))


def exposed_metrics(url: str) -> set[str]:
    """Return the names that a service exposes, without the counters' times of creation."""
    exposition = httpx.get(f"{url}/metrics", timeout=60).text
    found = re.findall(r"^# TYPE (tokenwire_\w+)", exposition, re.MULTILINE)
    return {name for name in found if not name.endswith("_created")}
