"""Structured output over the whole stack, alone and with other options."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import jsonschema
import pytest

from tests.services.schemas import SUPPORTED, UNSUPPORTED, Sample
from tests.stack import Stack
from tokenwire.channel import connect
from tokenwire.client import Client, GrammarSpec
from tokenwire.errors import ServiceError
from tokenwire.pb.engine.v1.engine_pb2 import GenerateRequest, ResumedSequence
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineServiceStub
from tokenwire.pb.types.v1.types_pb2 import TokenIds

# a leap second is a time to the grammar, but not to Python: times are left out
FORMATS = jsonschema.FormatChecker(formats=("date", "email", "ipv4", "ipv6", "uuid"))
REGEX = "[a-f]{3,8}(-[0-9]{2}){1,3}"
ONE_OR_TWO = {"enum": [1, 2]}
PAIR = {
    "type": "object",
    "properties": {
        "a": ONE_OR_TWO,
        "b": {"type": "array", "items": ONE_OR_TWO, "minItems": 2, "maxItems": 2},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    async with Client(stack.tokenizer) as client:
        yield client


@pytest.fixture
async def http(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stack.url, timeout=120) as client:
        yield client


async def test_stopped_output_satisfies_its_schema(client: Client) -> None:
    at_once = asyncio.Semaphore(64)

    async def generate(seed: int, sample: Sample) -> str:
        async with at_once:
            completion = await client.generate(
                "# The response, as JSON:\n",
                grammar=GrammarSpec(json_schema=json.dumps(sample.schema)),
                max_tokens=1500 if sample.is_bounded else 200,
                temperature=1,
                seed=seed,
            )
        [choice] = completion.choices
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.text), sample.schema, format_checker=FORMATS)
        else:
            assert not sample.is_bounded, (sample.schema, choice.text)
        return choice.finish_reason

    reasons = await asyncio.gather(
        *(generate(seed, sample) for seed, sample in enumerate(SUPPORTED))
    )
    assert Counter(reasons)["stop"] >= 300


async def test_unsupported_keyword_is_refused_with_its_path(client: Client) -> None:
    for sample in UNSUPPORTED:
        grammar = GrammarSpec(json_schema=json.dumps(sample.schema))
        with pytest.raises(ServiceError) as caught:
            await client.generate("x", grammar=grammar, max_tokens=4)
        assert caught.value.field == "grammar.json_schema"
        assert sample.keyword in caught.value.message
        assert sample.path in caught.value.message


async def test_resumed_tokens_must_satisfy_the_grammar(stack: Stack) -> None:
    """The error names the field that the client sent, not a field of the grammar service."""
    async with Client(stack.tokenizer) as client, connect(stack.engine) as channel:
        fits, misfit = [(await client.encode(text)).ids for text in ("12", "1x")]
        request = GenerateRequest(
            prompts=[TokenIds(ids=[40])],
            n=3,
            grammar=GrammarSpec(regex="[0-9]{4}"),
            resume=[
                ResumedSequence(sequence=0, generated=TokenIds(ids=fits)),
                ResumedSequence(sequence=2, generated=TokenIds(ids=misfit)),
            ],
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in EngineServiceStub(channel).Generate(request):
                pass
    error = ServiceError.from_rpc_error(caught.value)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "TOKEN_REFUSED")
    assert error.field == "resume[1].generated.ids"


async def complete(http: httpx.AsyncClient, **fields: object) -> list[Any]:
    body = {
        "prompt": ["tag = ", "value: "],
        "grammar": {"type": "regex", "value": REGEX},
        "max_tokens": 60,
        "temperature": 1,
        "seed": 7,
    }
    response = await http.post("/v1/completions", json=body | fields)
    assert response.status_code == 200, response.text
    choices: list[Any] = response.json()["choices"]
    return choices


async def streamed(http: httpx.AsyncClient, **fields: object) -> dict[int, str]:
    body = {
        "prompt": ["tag = ", "value: "],
        "grammar": {"type": "regex", "value": REGEX},
        "max_tokens": 60,
        "temperature": 1,
        "seed": 7,
        "stream": True,
    }
    texts: dict[int, str] = {}
    async with http.stream("POST", "/v1/completions", json=body | fields) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


def text_of(tokens: list[str]) -> str:
    """Return the text of the tokens without the EOS token, which has its own entry."""
    return "".join(tokens).removesuffix("<|endoftext|>")


async def test_grammar_combines_with_n_logprobs_echo_and_stop(http: httpx.AsyncClient) -> None:
    fields: dict[str, Any] = {"n": 3, "logprobs": 2, "echo": True, "stop": ["-7"]}
    choices = await complete(http, **fields)
    assert len({choice["text"] for choice in choices}) > 1
    for choice in choices:
        prompt = ["tag = ", "value: "][choice["index"] // 3]
        assert choice["text"].startswith(prompt)
        body = choice["text"].removeprefix(prompt)
        assert choice["finish_reason"] == "stop"
        if choice["stop_reason"] == "-7":
            assert re.fullmatch(REGEX, body + "-70")
        else:
            assert re.fullmatch(REGEX, body)
        logprobs = choice["logprobs"]
        assert text_of(logprobs["tokens"]) == choice["text"]
        assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"])
    assert await streamed(http, **fields) == {c["index"]: c["text"] for c in choices}


async def test_best_of_with_a_grammar_returns_the_best_choices(http: httpx.AsyncClient) -> None:
    every = await complete(http, n=4, logprobs=0)
    best = await complete(http, n=2, best_of=4, logprobs=0)
    for prompt in range(2):
        drawn = [choice["text"] for choice in every if choice["index"] // 4 == prompt]
        kept = [choice["text"] for choice in best if choice["index"] // 2 == prompt]
        means = {
            choice["text"]: sum(values) / len(values)
            for choice in every
            if choice["index"] // 4 == prompt and (values := choice["logprobs"]["token_logprobs"])
        }
        assert kept == sorted(drawn, key=lambda text: -means[text])[:2]


async def test_infill_satisfies_its_grammar(http: httpx.AsyncClient) -> None:
    fields: dict[str, Any] = {"suffix": "\nprint(tag)\n", "n": 2, "logprobs": 1}
    choices = await complete(http, **fields)
    for choice in choices:
        assert re.fullmatch(REGEX, choice["text"])
        assert text_of(choice["logprobs"]["tokens"]) == choice["text"]
    assert await streamed(http, **fields) == {c["index"]: c["text"] for c in choices}


async def test_logprobs_do_not_change_the_tokens_under_a_grammar(http: httpx.AsyncClient) -> None:
    schema = {
        "type": "object",
        "properties": {"identifier": {"enum": ["first", "second"]}, "enabled": {"type": "boolean"}},
        "required": ["identifier", "enabled"],
        "additionalProperties": False,
    }
    grammar = {"type": "json_schema", "value": json.dumps(schema)}
    fields = {"grammar": grammar, "return_token_ids": True}
    plain = await complete(http, **fields)
    scored = await complete(http, **fields, logprobs=0)
    assert [choice["token_ids"] for choice in plain] == [choice["token_ids"] for choice in scored]
    assert all(len(c["logprobs"]["tokens"]) == len(c["token_ids"]) for c in scored)


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_json": {"type": "integer", "minimum": 1, "maximum": 9}}, "[1-9]"),
        (
            {"structured_outputs": {"json": PAIR, "disable_any_whitespace": True}},
            r'\{"a":[12],"b":\[[12],[12]\]\}',
        ),
        (
            {"guided_json": PAIR, "guided_whitespace_pattern": "  "},
            r'\{( {2})?"a"( {2})?:( {2})?[12]( {2})?,( {2})?"b".*\}',
        ),
        ({"ebnf": 'root ::= "(" root ")" | "x"'}, r"\(*x\)*"),
        ({"grammar": 'root ::= "z"+ "y"'}, "z+y"),
        (
            {
                "structural_tag": {
                    "type": "structural_tag",
                    "structures": [{"begin": "<n>", "schema": {"type": "boolean"}, "end": ";"}],
                    "triggers": ["<n"],
                },
                "stop": [";"],
                "include_stop_str_in_output": True,
            },
            "(?s:.*)",
        ),
    ],
)
async def test_constraint_fields_of_other_servers_are_enforced(
    http: httpx.AsyncClient, constraint: dict[str, object], pattern: str
) -> None:
    asked = {"max_tokens": 60, "temperature": 1, "seed": 7} | constraint
    message = {"role": "user", "content": "Answer."}
    completion = await http.post("/v1/completions", json={"prompt": "x = "} | asked)
    chat = await http.post("/v1/chat/completions", json={"messages": [message]} | asked)
    for response in (completion, chat):
        assert response.status_code == 200, response.text
        assert "x-tokenwire-ignored" not in response.headers
    text = completion.json()["choices"][0]["text"]
    content = chat.json()["choices"][0]["message"]["content"]
    assert re.fullmatch(pattern, text)
    assert re.fullmatch(pattern, content)


async def test_structural_tag_trigger_enforces_its_schema(http: httpx.AsyncClient) -> None:
    """The triggers are characters that the model generates often."""
    structures = [{"begin": each, "schema": {"enum": [1, 2]}, "end": "!"} for each in "=(:"]
    tag = {"type": "structural_tag", "structures": structures, "triggers": ["=", "(", ":"]}
    asked = {"prompt": "def f", "max_tokens": 60, "response_format": tag, "seed": 3, "n": 8}
    response = await http.post("/v1/completions", json=asked)
    texts = [choice["text"] for choice in response.json()["choices"]]
    parts = [part for text in texts for part in re.findall("[=(:](.{0,2})", text, re.DOTALL)]
    assert len(parts) >= 8
    whole = [part for part in parts if len(part) == 2]
    assert set(whole) <= {"1!", "2!"}


@pytest.mark.parametrize(
    ("constraint", "param", "place"),
    [
        ({"ebnf": "root ::=\n x"}, "ebnf", "line 2, column 2"),
        ({"guided_json": {"properties": {"a": {"extends": 1}}}}, "guided_json", "$.properties.a"),
        (
            {"structured_outputs": {"grammar": "root ::= x"}},
            "structured_outputs.grammar",
            "line 1, column 10",
        ),
        ({"guided_choice": ["a", ""]}, "guided_choice", ""),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": "[ x]"}},
            "structured_outputs.whitespace_pattern",
            "more than white space",
        ),
        ({"regex": "(a"}, "regex", "unclosed group"),
    ],
)
async def test_invalid_grammar_is_refused_with_the_field_to_blame(
    http: httpx.AsyncClient, constraint: dict[str, object], param: str, place: str
) -> None:
    message = {"role": "user", "content": "Answer."}
    for path, prompt in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [message]}),
    ):
        response = await http.post(path, json=prompt | constraint)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert place in error["message"]
