"""All that the OpenAPI document allows, and much that it does not, is answered or refused."""

import json
from collections.abc import Iterator
from typing import Any, TypeAlias

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.http_shim.openapi import document
from tests.stack import Stack

DOCUMENT = document()
SCHEMAS = DOCUMENT["components"]["schemas"]
JUNK = st.sampled_from(
    [None, True, -1, 0, 0.5, 3, 101, 1e-300, 1e300, 2**32, 2**63, 2**70, "", "x", [], [None], {},
     {"a": [1]}]
)  # fmt: skip
PROMPTS = st.sampled_from(["x = ", [[1, 2], [3]], ["a", "b"], [5, 6, 7], [], ""])
MODELS = st.sampled_from(["default", ["default"], ["default", "default"], ["default", "other"]])
FEW = st.sampled_from([None, 1, 3, 8])  # tokens; what asks for more takes its time
Bodies: TypeAlias = st.SearchStrategy[dict[str, Any]]
REFUSALS = {400, 404, 501}


def values(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """What a schema allows."""
    if "$ref" in schema:
        return values(SCHEMAS[schema["$ref"].rpartition("/")[2]])
    if alternatives := schema.get("anyOf") or schema.get("oneOf"):
        return st.one_of([values(each) for each in alternatives])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "const" in schema:
        return st.just(schema["const"])
    match schema.get("type"):
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer" | "number":
            return numbers(schema)
        case "string":
            return st.text(st.characters(codec="utf-8"), max_size=6)
        case "array":
            return st.lists(values(schema["items"]), max_size=3)
        case "object" if "properties" in schema:
            return objects(schema, {})
        case "object":
            inner = schema.get("additionalProperties")
            value = values(inner) if isinstance(inner, dict) else JUNK
            return st.dictionaries(st.integers(0, 9999).map(str), value, max_size=2)
        case _:
            return JUNK


def numbers(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    low = max(schema.get("minimum", schema.get("exclusiveMinimum", 0)), -9)
    high = min(schema.get("maximum", 9), 9)
    if schema["type"] == "integer":
        return st.integers(low, high)
    return st.floats(low, high, exclude_min="exclusiveMinimum" in schema)


def objects(schema: dict[str, Any], known: dict[str, st.SearchStrategy[Any]]) -> Bodies:
    """A few of the fields."""
    fields = {name: known.get(name, values(field)) for name, field in schema["properties"].items()}
    names = st.lists(st.sampled_from(sorted(fields)), max_size=5, unique=True)
    return names.flatmap(lambda some: st.fixed_dictionaries({name: fields[name] for name in some}))


def bodies(name: str, **known: st.SearchStrategy[Any]) -> Bodies:
    """Known fields, a few others, and half the time one with junk."""
    schema = SCHEMAS[name]
    always = {"max_tokens": FEW, **known}
    no_limits = sorted(schema["properties"].keys() - {"max_tokens", "max_completion_tokens"})
    junk = st.dictionaries(st.sampled_from(no_limits), JUNK, max_size=1)
    some = objects(schema, always | {"max_completion_tokens": FEW})
    parts = (some, st.fixed_dictionaries(always), junk)
    return st.tuples(*parts).map(lambda each: each[0] | each[1] | each[2])


@pytest.fixture(scope="module")
def http(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=60) as client:
        yield client


def assert_answered_or_refused(response: httpx.Response) -> None:
    if response.status_code != 200:
        assert response.status_code in REFUSALS, response.text
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    elif response.headers["content-type"].startswith("text/event-stream"):
        events = [line for line in response.text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "data: [DONE]"
        assert all("error" not in json.loads(event[6:]) for event in events[:-1])
    else:
        assert response.json()["choices"]


thorough = settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@thorough
@given(body=bodies("CompletionBody", prompt=PROMPTS, stream=st.booleans()))
def test_any_completion(http: httpx.Client, body: dict[str, Any]) -> None:
    assert_answered_or_refused(http.post("/v1/completions", json=body))


CONVERSATIONS = st.one_of(
    st.sampled_from([[{"role": "user", "content": "Hello"}], []]),
    st.lists(values(SCHEMAS["Message"]), max_size=3),
)
FEW_ONLY = FEW.filter(lambda tokens: tokens is not None)


@thorough
@given(body=bodies("ChatBody", messages=CONVERSATIONS, max_tokens=FEW_ONLY, stream=st.booleans()))
def test_any_chat(http: httpx.Client, body: dict[str, Any]) -> None:
    assert_answered_or_refused(http.post("/v1/chat/completions", json=body))


@thorough
@given(body=bodies("MultiCompletionBody", model=MODELS, prompt=st.just("x = ")))
def test_any_completion_of_many_models(http: httpx.Client, body: dict[str, Any]) -> None:
    assert_answered_or_refused(http.post("/v1/completion", json=body))


@thorough
@given(
    body=bodies("TokenizeBody", prompt=st.text(st.characters(codec="utf-8")))
    | bodies("TokenizeBody", messages=CONVERSATIONS, prompt=st.none())
)
def test_anything_tokenized(http: httpx.Client, body: dict[str, Any]) -> None:
    response = http.post("/tokenize", json=body)
    assert response.status_code in {200} | REFUSALS, response.text
