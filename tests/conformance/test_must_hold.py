"""Invariants of the whole stack for every kind of request: the embedded model, in float32."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import jsonschema
import pytest

from tests.stack import Stack
from tokenwire.channel import connect
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.completion.v1.completion_pb2 import GenerateRequest as TextRequest
from tokenwire.pb.completion.v1.completion_pb2 import Prompt, Prompts
from tokenwire.pb.completion.v1.completion_pb2_grpc import CompletionServiceStub
from tokenwire.pb.engine.v1.engine_pb2 import GenerateRequest
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineServiceStub
from tokenwire.pb.tokenizer.v1.tokenizer_pb2 import DecodeRequest, RenderInfillRequest
from tokenwire.pb.tokenizer.v1.tokenizer_pb2_grpc import TokenizerServiceStub
from tokenwire.pb.types.v1.types_pb2 import SamplingParams, StoppingParams, TokenIds

PROMPTS = [
    "import os\nimport sys\n\n",
    "class Stack:\n    def __init__(self):\n",
    "def read_file(path):\n    with open(path) as f:\n",
    "# Return the sum of a list of numbers.\ndef ",
    "héllo wörld = '日本語 ✓'\n",
    "for i in range(10):\n    print(",
]


@pytest.fixture
async def http(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stack.url, timeout=120) as client:
        yield client


async def complete(http: httpx.AsyncClient, prompt: object, **fields: object) -> Any:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 32} | fields
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def stream_text(http: httpx.AsyncClient, prompt: object, **fields: object) -> str:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 32, "stream": True} | fields
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        lines = [line async for line in response.aiter_lines() if line.startswith("data: {")]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


async def encode(http: httpx.AsyncClient, text: str) -> list[int]:
    response = await http.post("/tokenize", json={"prompt": text})
    tokens: list[int] = response.json()["tokens"]
    return tokens


def assert_equal_up_to_ties(got: Any, expected: Any) -> None:
    """Assert that tokens are equal up to the first place where the two best scores are tied."""
    assert len(got["tokens"]) == len(expected["tokens"])
    for i, (mine, theirs) in enumerate(zip(got["tokens"], expected["tokens"], strict=True)):
        if mine != theirs:
            best = sorted(expected["top_logprobs"][i].values(), reverse=True)
            assert best[0] - best[1] < 1e-4, (i, mine, theirs)
            return


@pytest.mark.parametrize("prompt", PROMPTS)
async def test_greedy_output_is_equal_over_http_and_grpc_whole_and_streamed(
    http: httpx.AsyncClient, stack: Stack, prompt: str
) -> None:
    ids = await encode(http, prompt)
    expected = (await complete(http, prompt))["choices"][0]["text"]
    assert (await complete(http, ids))["choices"][0]["text"] == expected
    assert await stream_text(http, prompt) == expected
    assert await stream_text(http, ids) == expected
    sampling, stopping = SamplingParams(temperature=0), StoppingParams(max_tokens=32)
    async with connect(stack.tokenizer) as channel:
        request = TextRequest(
            prompts=Prompts(items=[Prompt(text=prompt)]), sampling=sampling, stopping=stopping
        )
        events = [event async for event in CompletionServiceStub(channel).Generate(request)]
        assert "".join(event.delta.text for event in events) == expected
    async with connect(stack.engine) as channel:
        tokens = GenerateRequest(prompts=[TokenIds(ids=ids)], sampling=sampling, stopping=stopping)
        call = EngineServiceStub(channel).Generate(tokens)
        generated = [token async for event in call for token in event.delta.tokens.ids]
    async with connect(stack.tokenizer) as channel:
        decode = DecodeRequest(sequences=[TokenIds(ids=generated)])
        answer = await TokenizerServiceStub(channel).Decode(decode)
    assert answer.decodings[0].text == expected


async def test_greedy_output_is_equal_in_a_batch_of_sixteen_and_alone(
    http: httpx.AsyncClient,
) -> None:
    prompts = [f"{prompt}# {i}\n" for i in range(3) for prompt in PROMPTS][:16]
    alone = [await complete(http, prompt, logprobs=2) for prompt in prompts]
    together = await asyncio.gather(*(complete(http, p, logprobs=2) for p in prompts))
    for got, expected in zip(together, alone, strict=True):
        assert_equal_up_to_ties(got["choices"][0]["logprobs"], expected["choices"][0]["logprobs"])


@pytest.mark.parametrize("length", [1, 2, 31, 33, 700])
async def test_echoed_logprobs_have_one_entry_per_prompt_and_output_token(
    http: httpx.AsyncClient, length: int
) -> None:
    ids = (await encode(http, "".join(PROMPTS) * 12))[:length]
    answer = await complete(http, [ids], max_tokens=1, echo=True, logprobs=1)
    logprobs = answer["choices"][0]["logprobs"]
    for column in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert len(logprobs[column]) == length + 1
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(isinstance(value, float) for value in logprobs["token_logprobs"][1:])


@pytest.mark.parametrize("prompt", PROMPTS)
async def test_prompt_logprobs_equal_the_logprobs_of_generation(
    http: httpx.AsyncClient, prompt: str
) -> None:
    ids = await encode(http, prompt)
    generated = await complete(
        http, ids, logprobs=0, return_token_ids=True, ignore_eos=True, seed=3, temperature=1
    )
    choice = generated["choices"][0]
    scored = await complete(http, [*ids, *choice["token_ids"]], max_tokens=0, echo=True, logprobs=0)
    expected = scored["choices"][0]["logprobs"]["token_logprobs"][len(ids) :]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-3)


async def test_equal_seeds_repeat_the_choices_and_choices_differ(http: httpx.AsyncClient) -> None:
    fields = {"temperature": 1.0, "n": 4, "seed": 11, "max_tokens": 24}
    first, second = [
        [choice["text"] for choice in (await complete(http, PROMPTS[0], **fields))["choices"]]
        for _ in range(2)
    ]
    assert first == second
    assert len(set(first)) == 4


async def test_repeated_prompt_is_a_prefix_hit(http: httpx.AsyncClient) -> None:
    ids = (await encode(http, "# a prompt of its own\n" + "".join(PROMPTS) * 6))[:300]
    first = await complete(http, ids, max_tokens=4)
    second = await complete(http, ids, max_tokens=4)
    assert first["usage"]["cached_input_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 256
    assert second["choices"][0]["text"] == first["choices"][0]["text"]


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}


async def test_constrained_and_free_requests_share_a_batch(
    http: httpx.AsyncClient,
) -> None:
    constrained = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        "temperature": 1.0,
        "max_tokens": 120,
    }
    free = await complete(http, PROMPTS[1])
    answers = await asyncio.gather(
        *(complete(http, "JSON: ", seed=i, **constrained) for i in range(8)),
        complete(http, PROMPTS[1]),
    )
    for answer in answers[:8]:
        [choice] = answer["choices"]
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["text"]), SCHEMA)
    assert answers[8]["choices"][0]["text"] == free["choices"][0]["text"]


@pytest.mark.parametrize(
    ("grammar", "accepted"),
    [
        ({"type": "regex", "value": "[0-9]{3}-[0-9]{4}"}, lambda text: len(text) == 8),
        ({"type": "lark", "value": 'start: "yes" | "no"'}, lambda text: text in ("yes", "no")),
        ({"type": "json_schema", "value": SCHEMA}, lambda text: "kind" in json.loads(text)),
    ],
    ids=["regex", "lark", "json_schema"],
)
async def test_output_follows_a_grammar_with_choices_logprobs_and_streaming(
    http: httpx.AsyncClient, grammar: dict[str, object], accepted: Any
) -> None:
    fields: dict[str, object] = {"grammar": grammar, "temperature": 1.0, "max_tokens": 120}
    answer = await complete(http, "value = ", n=3, logprobs=1, seed=5, **fields)
    for choice in answer["choices"]:
        assert accepted(choice["text"])
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert accepted(await stream_text(http, "value = ", seed=5, **fields))


async def test_invalid_grammar_is_400_and_names_the_field(http: httpx.AsyncClient) -> None:
    for grammar, param in (
        ({"type": "regex", "value": "("}, "grammar"),
        ({"type": "lark", "value": "start: undefined_rule"}, "grammar"),
        ({"type": "json_schema", "value": {"type": "nonsense"}}, "grammar"),
    ):
        response = await http.post("/v1/completions", json={"prompt": "x", "grammar": grammar})
        error = response.json()["error"]
        assert response.status_code == 400
        assert error["param"].startswith(param)
        assert error["message"]
    assert (await complete(http, "x = "))["choices"][0]["text"]


GAPS = [
    ("def mean(values):\n    total = ", "sum(values)", "\n    return total / len(values)\n"),
    (
        "class Point:\n    def __init__(self, x, y):\n",
        "        self.x = x",
        "\n        self.y = y\n",
    ),
    ("def read(path):\n    with open(path) as ", "f", ":\n        return f.read()\n"),
    ("import ", "os", "\n\ndef exists(path):\n    return os.path.exists(path)\n"),
    ("for ", "name", " in names:\n    print(name)\n"),
    ("def add(a, b):\n    ", "total = a + b", "\n    return total\n"),
]


async def test_suffix_makes_the_right_middle_likelier_and_the_model_ends_it(
    http: httpx.AsyncClient, stack: Stack
) -> None:
    gains, ended = [], 0
    async with connect(stack.tokenizer) as channel:
        tokenizer = TokenizerServiceStub(channel)
        for prefix, middle, suffix in GAPS:
            request = RenderInfillRequest(prefix=prefix, suffix=suffix)
            infill = list((await tokenizer.RenderInfill(request)).ids)
            ids = await encode(http, middle)
            with_suffix = await score(http, infill, ids)
            gains.append(with_suffix - await score(http, await encode(http, prefix), ids))
            answer = await complete(http, prefix, suffix=suffix, max_tokens=64)
            [choice] = answer["choices"]
            assert "<|" not in choice["text"]
            ended += choice["finish_reason"] == "stop"
    assert sum(gain > 0 for gain in gains) > len(GAPS) / 2
    assert sum(gains) > 0
    assert ended > len(GAPS) / 2


async def score(http: httpx.AsyncClient, context: list[int], ids: list[int]) -> float:
    """Return the log-likelihood of `ids` after `context`, in nats."""
    answer = await complete(http, [context + ids], max_tokens=0, echo=True, logprobs=0)
    logprobs: list[float] = answer["choices"][0]["logprobs"]["token_logprobs"]
    return sum(logprobs[len(context) :])


async def test_concurrent_requests_of_a_session_give_the_texts_of_http(
    http: httpx.AsyncClient, stack: Stack
) -> None:
    expected = [(await complete(http, prompt))["choices"][0]["text"] for prompt in PROMPTS]
    texts = ["" for _ in PROMPTS]
    async with connect(stack.tokenizer) as channel:
        call = CompletionServiceStub(channel).Session()
        await call.write(completion_pb2.SessionRequest(commands=_starts(PROMPTS)))
        await call.done_writing()
        async for message in call:
            for event in message.events:
                assert not event.HasField("error"), event
                if event.response.HasField("delta"):
                    texts[event.handle - 1] += event.response.delta.text
    assert texts == expected


def _starts(prompts: Sequence[str]) -> list[completion_pb2.SessionCommand]:
    return [
        completion_pb2.SessionCommand(
            handle=i + 1,
            start=completion_pb2.SessionStart(
                request=TextRequest(
                    prompts=Prompts(items=[Prompt(text=prompt)]),
                    sampling=SamplingParams(temperature=0),
                    stopping=StoppingParams(max_tokens=32),
                )
            ),
        )
        for i, prompt in enumerate(prompts)
    ]
