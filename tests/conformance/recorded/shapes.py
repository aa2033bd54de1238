"""The shape of an answer: what stays of it on any machine and at any time."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import httpx

__all__ = ["Answer", "exact", "shape_of"]

Answer: TypeAlias = dict[str, Any]
"""JSON of an answer: its status, its headers, and its body or its events"""
Json: TypeAlias = Any

_ID = re.compile(
    r"\b(?P<kind>batch|batch_req|call|chatcmpl|cmpl|ctc|ct?call|embd|fc|file|file-batch|item|msg"
    r"|classify|pool|rerank|score|req|resp|rs|toolu|tw)[-_][0-9a-zA-Z]{12,}(?:[-_][0-9a-z]+)*"
)
_UUID = re.compile(r"\b[0-9a-f]{8}(?:-?[0-9a-f]{4}){3}-?[0-9a-f]{12}\b")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d)")
_HEADERS = frozenset(
    {"allow", "cache-control", "content-type", "location", "retry-after", "x-accel-buffering"}
)
"""Headers that are recorded beside all that begin with x-"""
_TIMES = re.compile(r"created|.*_at|.*time.*|.*seconds.*")
_GENERATED = frozenset(
    {"arguments", "content", "delta", "input", "output", "partial_json", "prompt", "reasoning",
     "reasoning_content", "response", "text", "thinking", "token", "tokens", "token_strs",
     "token_texts", "decoded_token", "signature", "kernels", "target"}
)  # fmt: skip
"""Fields whose texts the model makes, the client's prompt, or the machine's own"""
_BY_TOKEN = frozenset({"top_logprobs", "prompt_logprobs"})
"""Fields with objects whose keys are tokens"""
_PLACES = frozenset({"index", "output_index", "content_index", "summary_index"})
"""Numbers that stay"""


def shape_of(response: httpx.Response) -> Answer:
    """Return the shape of an answer.

    Generated texts, numbers, ids and times become the names of their types. The items of a list
    are folded into one of each `type`, as are the events of a stream: how many there are depends
    on the machine's speed. The order of keys and of types stays.
    """
    return _record(response, _shape, fold=True)


def exact(response: httpx.Response) -> Answer:
    """Return the answer with its texts and numbers, without ids and times."""
    return _record(response, _without_ids, fold=False)


def _record(response: httpx.Response, shape: Callable[[Json, str], Json], *, fold: bool) -> Answer:
    headers = {
        name: _text(value) if name != "x-tokens-used" else "number"
        for name, value in sorted(response.headers.items())
        if name in _HEADERS or name.startswith("x-")
    }
    answer: Answer = {"status": response.status_code, "headers": headers}
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        events = [shape(event, "") for event in _events(response.text)]
        return answer | {"events": _folded(events) if fold else events}
    is_stream = response.headers.get("content-type", "").startswith("application/x-ndjson")
    if not is_stream:
        with suppress(json.JSONDecodeError):
            return answer | {"body": shape(json.loads(response.text or "null"), "")}
    try:
        lines = [shape(json.loads(line), "") for line in response.text.splitlines()]
    except json.JSONDecodeError:
        return answer | {"text": _text(response.text)}
    return answer | {"lines": _folded(lines) if fold and is_stream else lines}


def _events(stream: str) -> Iterable[Json]:
    """Yield the events of a stream: their data, with the event's name where it has one."""
    for block in stream.split("\n\n"):
        fields = [line.partition(": ") for line in block.splitlines()]
        name = next((value for key, _, value in fields if key == "event"), None)
        data = "\n".join(value for key, _, value in fields if key == "data")
        if not data:
            continue  # a comment
        value = json.loads(data) if data.startswith("{") else data
        yield value if name is None else {"event": name, "data": value}


def _text(value: str) -> str:
    value = _UUID.sub("uuid", _ID.sub(r"\g<kind>", value))
    return _TIME.sub("time", value)


def _without_ids(value: Json, key: str) -> Json:
    match value:
        case dict():
            return {_text(name): _without_ids(inner, name) for name, inner in value.items()}
        case list():
            return [_without_ids(inner, key) for inner in value]
        case str():
            return _text(value)
        case int() | float() if not isinstance(value, bool) and _TIMES.fullmatch(key):
            return "time"
    return value


def _shape(value: Json, key: str) -> Json:
    match value:
        case dict() if key in _BY_TOKEN and "token" not in value:
            return _folded([{"token": _shape(inner, "")} for inner in value.values()])
        case dict():
            return {name: _shape(inner, name) for name, inner in value.items()}
        case list():
            return _folded([_shape(inner, key) for inner in value])
        case str() if key in _GENERATED:
            return "text"
        case str():
            return _text(value)
        case int() | float() if not isinstance(value, bool) and key not in _PLACES:
            return "number"
    return value


def _folded(items: list[Json]) -> list[Json]:
    """Return one item of each kind, in the order of the first ones."""
    kinds: dict[Json, Json] = {}
    for item in items:
        kind = _kind(item)
        kinds[kind] = _united(kinds[kind], item) if kind in kinds else item
    return list(kinds.values())


def _kind(item: Json) -> Json:
    """Return what items that are folded into one have in common."""
    if not isinstance(item, Mapping):
        return type(item).__name__ if item != "[DONE]" else item
    if isinstance(choices := item.get("choices"), list):  # chunks of one choice
        return ("choices", *(choice.get("index") for choice in choices))
    return tuple(map(item.get, ("event", "type", "index", "id", "done")))


def _merged(one: Iterable[str], other: Iterable[str]) -> list[str]:
    """Return the names of both; one of `other` alone follows the name that is before it there.

    The order is then the same whether a stream sends fields together or one after the other.
    """
    names, place = [*one], 0
    for name in other:
        if name in names:
            place = names.index(name) + 1
        else:
            names.insert(place, name)
            place += 1
    return names


def _united(one: Json, other: Json) -> Json:
    """Return a shape that both values have. An absent value or null is one that may be absent."""
    match one, other:
        case dict(), dict():
            return {name: _united(one.get(name), other.get(name)) for name in _merged(one, other)}
        case list(), list():
            return _folded([*one, *other])
    if one == other or other is None:
        return one
    if one is None:
        return other
    return " | ".join(sorted({*str(one).split(" | "), *str(other).split(" | ")}))
