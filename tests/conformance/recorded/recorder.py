"""Sends the calls and keeps their answers."""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpx

from tests.conformance.recorded.call import Call

__all__ = ["answers"]

_PATIENCE_SECONDS = 120


def answers(
    url: str, calls: Iterable[Call], form: Callable[[httpx.Response], Any]
) -> Iterator[tuple[str, Any]]:
    """Send the calls one after another to the server at `url`. Yield their names and answers."""
    kept: dict[str, str] = {}
    with httpx.Client(base_url=url, timeout=_PATIENCE_SECONDS) as client:
        for call in calls:
            response = _sent(client, call, kept)
            if call.keep:
                fields = _fields(response)
                kept |= {name: _field(fields, path) for name, path in call.keep.items()}
            yield call.name, form(response)


def _sent(client: httpx.Client, call: Call, kept: dict[str, str]) -> httpx.Response:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        response = client.request(
            call.method,
            _filled(call.path, kept),
            content=call.raw,
            headers={"content-type": "application/json", **call.headers} if call.raw is not None
            else dict(call.headers),
            **_body(call, kept),
        )  # fmt: skip
        if not call.until or response.json().get("status") in call.until:
            return response
        if time.monotonic() > deadline:
            raise TimeoutError(f"{call.name}: {response.text}")
        time.sleep(0.05)  # batches and background responses tell their end to those who ask


def _fields(response: httpx.Response) -> dict[str, Any]:
    """Return the JSON of an answer, or of a stream's first event."""
    lines = response.text.splitlines()
    first = next((line for line in lines if line.startswith("data: ")), "data: " + response.text)
    fields: dict[str, Any] = json.loads(first.removeprefix("data: "))
    return fields


def _field(fields: dict[str, Any], path: str) -> str:
    value: Any = fields
    for name in path.split("."):
        value = value[name]
    return str(value)


def _body(call: Call, kept: dict[str, str]) -> dict[str, Any]:
    if call.form is not None:
        files = {name: value for name, value in call.form.items() if isinstance(value, tuple)}
        texts = {name: value for name, value in call.form.items() if isinstance(value, str)}
        # A text as a file without a name: httpx makes a multipart form in any case.
        parts = {name: (None, text) for name, text in texts.items()}
        return {"files": {**parts, **files}}
    return {} if call.body is None else {"json": _filled(call.body, kept)}


def _filled(value: Any, kept: dict[str, str]) -> Any:
    match value:
        case str():
            for name, text in kept.items():
                value = value.replace(f"{{{name}}}", text)
            return value
        case dict():
            return {key: _filled(inner, kept) for key, inner in value.items()}
        case list():
            return [_filled(inner, kept) for inner in value]
    return value
