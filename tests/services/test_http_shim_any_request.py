"""Generated requests against the OpenAPI document: answers, refusals and limits."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeAlias

import httpx
import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.http_shim.documentation.openapi import document
from tests.stack import Stack

DOCUMENT = document()
SCHEMAS = DOCUMENT["components"]["schemas"]
JUNK = st.sampled_from(
    [None, True, -1, 0, 0.5, 3, 101, 1e-300, 1e300, 2**32, 2**63, 2**70, "", "x", [], [None], {},
     {"a": [1]}]
)  # fmt: skip
PROMPTS = st.sampled_from(["x = ", [[1, 2], [3]], ["a", "b"], [5, 6, 7], [], ""])
MODELS = st.sampled_from(["default", ["default"], ["default", "default"], ["default", "other"]])
FEW = st.sampled_from([None, 1, 3, 8])  # small max_tokens keep the tests fast
LONG = st.sampled_from([None, 60, 600.5])  # as timeout: seconds that no such request takes
Fields: TypeAlias = dict[str, Any]
Limits: TypeAlias = list[tuple[Fields, Fields]]
Bodies: TypeAlias = st.SearchStrategy[Fields]
REFUSALS = {400, 404, 501}


def values(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Return a strategy for the values that a schema allows."""
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
            return strings(schema)
        case "array":
            least, most = schema.get("minItems", 0), min(schema.get("maxItems", 3), 3)
            return st.lists(values(schema["items"]), min_size=least, max_size=most)
        case "object" if "properties" in schema:
            needed = {name: values(schema["properties"][name]) for name in schema["required"]}
            parts = (objects(schema, {}), st.fixed_dictionaries(needed))
            return st.tuples(*parts).map(lambda each: each[0] | each[1])
        case "object":
            inner = schema.get("additionalProperties")
            value = values(inner) if isinstance(inner, dict) else JUNK
            return st.dictionaries(st.integers(0, 9999).map(str), value, max_size=2)
        case _:
            return JUNK


def strings(schema: dict[str, Any]) -> st.SearchStrategy[str]:
    if "pattern" in schema:
        return st.from_regex(
            schema["pattern"], fullmatch=True, alphabet=st.characters(codec="ascii")
        )
    least = schema.get("minLength", 0)
    return st.text(st.characters(codec="utf-8"), min_size=least, max_size=6)


def numbers(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    low = max(schema.get("minimum", schema.get("exclusiveMinimum", 0)), -9)
    high = min(schema.get("maximum", 9), 9)
    if schema["type"] == "integer":
        return st.integers(low, high)
    return st.floats(low, high, exclude_min="exclusiveMinimum" in schema)


def objects(schema: dict[str, Any], known: dict[str, st.SearchStrategy[Any]]) -> Bodies:
    """Return a strategy for objects with up to five of the schema's fields."""
    fields = {name: known.get(name, values(field)) for name, field in schema["properties"].items()}
    names = st.lists(st.sampled_from(sorted(fields)), max_size=5, unique=True)
    return names.flatmap(lambda some: st.fixed_dictionaries({name: fields[name] for name in some}))


def bodies(name: str, **known: st.SearchStrategy[Any]) -> Bodies:
    """Return a strategy for bodies: the known fields, some others, and at most one junk value."""
    schema = SCHEMAS[name]
    always = {"max_tokens": FEW, **known}
    limits = {"max_completion_tokens": FEW, "timeout": LONG}
    no_limits = sorted(schema["properties"].keys() - {"max_tokens", *limits})
    junk = st.dictionaries(st.sampled_from(no_limits), JUNK, max_size=1)
    some = objects(schema, always | limits)
    parts = (some, st.fixed_dictionaries(always), junk)
    return st.tuples(*parts).map(lambda each: each[0] | each[1] | each[2])


@pytest.fixture(scope="module")
def http(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=60) as client:
        yield client


def is_answered(response: httpx.Response) -> bool:
    """Return True if the request was answered; assert that it was refused otherwise."""
    if response.status_code != 200:
        assert response.status_code in REFUSALS, response.text
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    elif response.headers["content-type"].startswith("text/event-stream"):
        # not splitlines(): a text may contain U+0085 or U+2028
        events = [line[6:] for line in response.text.split("\n") if line.startswith("data: ")]
        last = events.pop()
        if last != "[DONE]":  # A grammar and bad words may leave no token only after some tokens.
            assert json.loads(last)["error"]["code"] == "nothing_allowed"
        assert all("error" not in json.loads(event) for event in events)
    else:
        assert response.json()["choices"]
    return response.status_code == 200


@pytest.fixture(scope="module")
def answered() -> Counter[str]:
    """Return the number of answered requests by kind."""
    return Counter()


thorough = settings(
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@thorough
@given(body=bodies("CompletionBody", prompt=PROMPTS, stream=st.booleans()))
def test_any_completion_body_is_answered_or_refused(
    http: httpx.Client, answered: Counter[str], body: dict[str, Any]
) -> None:
    answered["completion"] += is_answered(http.post("/v1/completions", json=body))


CONVERSATIONS = st.one_of(
    st.just([{"role": "user", "content": "Hello"}]),
    values(SCHEMAS["ChatBody"]["properties"]["messages"]),
)
FEW_ONLY = FEW.filter(lambda tokens: tokens is not None)


@thorough
@given(body=bodies("ChatBody", messages=CONVERSATIONS, max_tokens=FEW_ONLY, stream=st.booleans()))
def test_any_chat_body_is_answered_or_refused(
    http: httpx.Client, answered: Counter[str], body: dict[str, Any]
) -> None:
    answered["chat"] += is_answered(http.post("/v1/chat/completions", json=body))


@thorough
@given(body=bodies("MultiCompletionBody", model=MODELS, prompt=st.just("x = ")))
def test_any_multi_model_body_is_answered_or_refused(
    http: httpx.Client, answered: Counter[str], body: dict[str, Any]
) -> None:
    answered["many models"] += is_answered(http.post("/v1/completion", json=body))


@thorough
@given(
    body=bodies("TokenizeBody", prompt=st.text(st.characters(codec="utf-8")))
    | bodies("TokenizeBody", messages=CONVERSATIONS, prompt=st.none())
)
def test_any_tokenize_body_is_answered_or_refused(http: httpx.Client, body: dict[str, Any]) -> None:
    response = http.post("/tokenize", json=body)
    assert response.status_code in {200} | REFUSALS, response.text


def test_generated_requests_include_enough_answered_ones(answered: Counter[str]) -> None:
    """The tests above prove little if all requests are refused; usually 1/4 to 1/2 are answered."""
    if not answered:
        pytest.skip("no requests were sent: the tests above did not run")
    assert min(answered.values()) >= 10


HELLO = {"role": "user", "content": "Hello"}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def custom(name: str, *, definition: object = None) -> dict[str, Any]:
    """Return a custom tool; definition: a regular expression for its input."""
    form = {"type": "grammar", "grammar": {"syntax": "regex", "definition": definition}}
    fields = {} if definition is None else {"format": form}
    return {"type": "custom", "custom": {"name": name} | fields}


def allowed(*tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [*tools]}}


def tools(count: int) -> list[dict[str, Any]]:
    return [tool(f"f{i}") for i in range(count)]


def calls(count: int = 1, **fields: Any) -> list[dict[str, Any]]:
    """Return a conversation with `count` identical tool calls."""
    called = {"name": fields.get("name", "f"), "arguments": fields.get("arguments", "{}")}
    call = {"type": "function", "id": fields.get("id", "c"), "function": called}
    return [{"role": "assistant", "tool_calls": [call] * count}, HELLO]


def custom_call(text: str) -> list[dict[str, Any]]:
    call = {"type": "custom", "id": "c", "custom": {"name": "f", "input": text}}
    return [{"role": "assistant", "tool_calls": [call]}, HELLO]


def said(parts: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": ""}] * parts}]


TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<a", "schema": {}, "end": ""}],
    "triggers": ["<"],
}
GENERATION: Limits = [  # (accepted fields, refused fields)
    ({"stop": ["a" * 1_000]}, {"stop": ["a" * 1_001]}),
    ({"stop": "a"}, {"stop": ""}),
    ({"stop_token_ids": [7] * 128}, {"stop_token_ids": [7] * 129}),
    ({"top_k": 128}, {"top_k": 129}),
    ({"logit_bias": {"7": 100}}, {"logit_bias": {"7": 100.5}}),
    ({"logit_bias": {"7": -100}}, {"logit_bias": {"7": -100.5}}),
    ({"logit_bias": {"70": 1}}, {"logit_bias": {"07": 1}}),
    ({"dry_base": 1}, {"dry_base": 0.5}),
    ({"dry_sequence_breakers": ["a" * 64]}, {"dry_sequence_breakers": ["a" * 65]}),
    ({"dry_sequence_breakers": ["a"] * 32}, {"dry_sequence_breakers": ["a"] * 33}),
    ({"dry_sequence_breakers": ["a"]}, {"dry_sequence_breakers": [""]}),
    ({"dry_sequence_breakers": []}, {"dry_sequence_breakers": ["a", ""]}),
    ({"mirostat_target": 0.5}, {"mirostat_target": 0}),
    ({"mirostat_lr": 0.5}, {"mirostat_lr": 0}),
    ({"n": 128}, {"n": 129}),
    ({"tools": tools(128), "tool_choice": "none"}, {"tools": tools(129), "tool_choice": "none"}),
    ({"tools": [tool("f" * 128)]}, {"tools": [tool("f" * 129)]}),
    ({"tools": [tool("f-1")]}, {"tools": [tool("f 1")]}),
    ({"tools": [tool("f")], "tool_choice": tool("f")},
     {"tools": [tool("f")], "tool_choice": tool("")}),
    ({"tools": [custom("f-1")]}, {"tools": [custom("f 1")]}),
    ({"tools": [custom("f", definition="a")]}, {"tools": [custom("f", definition=1)]}),
    ({"tools": [custom("f"), tool("g")], "tool_choice": allowed(custom("f"))},
     {"tools": [custom("f"), tool("g")], "tool_choice": allowed()}),
    ({"grammar": {"type": "regex", "value": "a"}}, {"grammar": {"type": "regex", "value": ""}}),
    ({"grammar": {"type": "json_schema", "value": "{}"}},
     {"grammar": {"type": "json_schema", "value": ""}}),
    ({"grammar": {"type": "lark", "value": 'start: "a"'}},
     {"grammar": {"type": "lark", "value": ""}}),
    ({}, {"grammar": {"type": "llguidance", "value": ""}}),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
     {"response_format": {"type": "json_schema", "json_schema": {}}}),
    ({"response_format": {"type": "text"}}, {"response_format": {"type": "json_schema"}}),
    ({"response_format": TAG}, {"response_format": TAG | {"triggers": []}}),
    ({"structural_tag": TAG}, {"structural_tag": TAG | {"structures": []}}),
    ({"structured_outputs": {"regex": "a"}}, {"structured_outputs": {"regex": ""}}),
    ({"structured_outputs": {"disable_additional_properties": False}},
     {"structured_outputs": {"disable_additional_properties": True}}),
    ({"guided_choice": ["a"]}, {"guided_choice": []}),
    ({"choice": ["a"]}, {"choice": [""]}),
    ({"ebnf": 'root ::= "a"'}, {"ebnf": ""}),
    ({"guided_json": {}}, {"guided_json": ""}),
    ({"typical_p": 1}, {"typical_p": 0.9}),
]  # fmt: skip
COMPLETION: Limits = [
    ({"prompt": ["a"] * 128}, {"prompt": ["a"] * 129}),
    ({"prompt": [[7]] * 128}, {"prompt": [[7]] * 129}),
    ({"prompt": [7] * 200}, {"prompt": []}),
    ({"prompt": [[7]]}, {"prompt": [[7], []]}),
    ({"prompt": ["a", "b"]}, {"prompt": ["a", 7]}),
    ({"prompt": [7, 8]}, {"prompt": [7, 2**32]}),
    ({"max_tokens": 0, "echo": True}, {"max_tokens": -1, "echo": True}),
    ({"images": []}, {"images": ["data:image/png;base64,AAEC"] * 17}),
    ({"dry_multiplier": 0, "use_beam_search": True, "length_penalty": -10},
     {"dry_multiplier": 0, "use_beam_search": True, "length_penalty": -10.5}),
    ({"early_stopping": False}, {"early_stopping": "always"}),
]  # fmt: skip
CHAT: Limits = [
    ({"use_beam_search": False}, {"use_beam_search": True}),
    ({"max_tokens": 1}, {"max_tokens": 0}),
    ({"max_tokens": None, "max_completion_tokens": 1},
     {"max_tokens": None, "max_completion_tokens": 0}),
    ({"messages": [HELLO]}, {"messages": []}),
    ({"messages": [HELLO]}, {"messages": [HELLO] * 4_097}),
    ({"messages": said(1_024)}, {"messages": said(1_025)}),
    ({"messages": calls(8)}, {"messages": calls(129)}),
    ({"messages": calls(id="c")}, {"messages": calls(id="")}),
    ({"messages": calls(name="f")}, {"messages": calls(name="")}),
    ({"messages": calls(arguments="")}, {"messages": calls(arguments="{}" + " " * 1024 * 1024)}),
    ({"messages": custom_call("ls")}, {"messages": custom_call("a" * (1024 * 1024 - 11))}),
    ({"messages": [HELLO | {"function_call": None}]}, {"messages": [HELLO | {"function_call": 1}]}),
    ({"functions": None}, {"functions": []}),
    ({"function_call": None}, {"function_call": "auto"}),
]  # fmt: skip
MANY_MODELS: Limits = [
    ({"model": ["default"] * 128}, {"model": ["default"] * 129}),
    ({"model": ["default"]}, {"model": []}),
    ({"stop": ["a"]}, {"stop": [""]}),
    ({"stream": False}, {"stream": True}),
]
TOKENIZE: Limits = [
    ({"prompt": "a" * 1000}, {"prompt": "a" * (1024 * 1024 + 1)}),
    ({"messages": [HELLO]}, {"messages": []}),
    ({"messages": [HELLO], "tools": tools(128)}, {"messages": [HELLO], "tools": tools(129)}),
]
DETOKENIZE: Limits = [({"tokens": [7] * 262_144}, {"tokens": [7] * 262_145})]
SHORT = {"max_tokens": 1, "dry_multiplier": 1}
ROUTES: list[tuple[str, str, Fields, Limits]] = [
    ("/v1/completions", "CompletionBody", SHORT | {"prompt": "x"}, GENERATION + COMPLETION),
    ("/v1/chat/completions", "ChatBody", SHORT | {"messages": [HELLO]}, GENERATION + CHAT),
    ("/v1/completion", "MultiCompletionBody",
     {"model": "default", "prompt": "x", "max_tokens": 1}, MANY_MODELS),
    ("/tokenize", "TokenizeBody", {}, TOKENIZE),
    ("/detokenize", "DetokenizeBody", {}, DETOKENIZE),
]  # fmt: skip


def _distinct_items(
    validator: jsonschema.Draft202012Validator, items: Fields, instance: object, schema: Fields
) -> Iterator[jsonschema.ValidationError]:
    """Validate each object of an array once: the arrays at a limit repeat a single one."""
    if isinstance(instance, list):
        for item in {id(each): each for each in instance}.values():
            yield from validator.descend(item, items)


VALIDATOR = jsonschema.validators.extend(  # type: ignore[no-untyped-call]
    jsonschema.Draft202012Validator, {"items": _distinct_items}
)


@pytest.mark.parametrize(
    ("path", "name", "taken", "refused"),
    [
        (path, name, base | taken, base | refused)
        for path, name, base, limits in ROUTES
        for taken, refused in limits
    ],
)
def test_openapi_document_states_the_enforced_limits(
    http: httpx.Client, path: str, name: str, taken: dict[str, Any], refused: dict[str, Any]
) -> None:
    """Clients may validate a body against the document before they send it."""
    validator = VALIDATOR(DOCUMENT | {"$ref": f"#/components/schemas/{name}"})
    assert validator.is_valid(taken)
    assert not validator.is_valid(refused)
    assert http.post(path, json=taken).status_code == 200
    assert http.post(path, json=refused).status_code == 400
