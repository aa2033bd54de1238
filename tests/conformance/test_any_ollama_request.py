"""Property tests of Ollama's routes: any fields are answered or refused, and harm no other."""

import asyncio
import json
from collections import Counter
from typing import Any

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from services.http_shim.dialects.ollama.types import (
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaOptions,
)
from services.http_shim.ollama.embeddings import OllamaEmbedBody, OllamaEmbeddingBody
from services.http_shim.ollama.models import ShowBody
from tests.conformance.any_request import (
    BOOLEAN,
    EXAMPLES,
    HANG_SECONDS,
    IDS,
    Neighbour,
    Values,
    assert_enough_answered,
)
from tests.conformance.test_any_request import CALLS, JSON, JUNK, SCHEMAS, STRINGS, TEXT, rarely

NAMES = st.sampled_from(
    ["tokenwire-code-6m", "tokenwire-code-6m:latest", "default"] * 3 + ["", "x"]
)
DURATIONS = st.sampled_from([-1, 0, 300, 1e300, "5m", "1h30m", "-1s", "0", "", "soon", "9" * 999])
IMAGES = st.lists(st.sampled_from(["", "AA==", "?", "data:image/png;base64,AA=="]), max_size=1)
COUNTS = st.sampled_from([-2, -1, 0, 1, 5, 40])
OPTIONS: dict[str, Values] = {
    **{name: rarely(JUNK) for name in OllamaOptions.__struct_fields__},
    "num_predict": COUNTS,
    "temperature": st.floats(0, 2),
    "top_k": COUNTS,
    "top_p": st.floats(0, 1),
    "min_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": STRINGS | st.lists(STRINGS, max_size=3),
    "repeat_penalty": st.floats(0, 2),
    "repeat_last_n": COUNTS,
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "num_ctx": st.sampled_from([0, 1, 20, 2_048, 10**6]),
    "mirostat": rarely(st.sampled_from([0, 1, 2, 3])),
    "mirostat_tau": st.floats(-1, 70),
    "mirostat_eta": st.floats(0, 10),
}
SHARED: dict[str, Values] = {
    "model": NAMES,
    "options": st.lists(st.sampled_from(sorted(OPTIONS)), max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: OPTIONS[name] for name in names})
    )
    | rarely(JUNK),
    "keep_alive": DURATIONS,
    "user": TEXT,
    "priority": st.integers(-1, 1),
    "timeout": st.sampled_from([-1, 3_600]),
}
GENERATION: dict[str, Values] = SHARED | {
    "stream": BOOLEAN,
    "format": rarely(st.one_of(st.just("json"), SCHEMAS, TEXT)),
    "think": rarely(st.sampled_from([False, True, "low", "max", "much"])),
    "truncate": BOOLEAN,
    "shift": BOOLEAN,
    "logprobs": BOOLEAN,
    "top_logprobs": st.integers(0, 21),
}
FUNCTIONS = st.lists(
    st.builds(
        lambda name, schema: {"type": "function", "function": {"name": name, "parameters": schema}},
        st.sampled_from(["f", "g", "a b"]),
        SCHEMAS,
    ),
    max_size=2,
)
OBJECT_CALLS = st.lists(
    st.sampled_from(
        [
            {"function": {"name": "f", "arguments": {"a": "x"}}},
            {"id": "c", "function": {"index": 0, "name": "g", "arguments": {}}},
            {"function": {"name": "f", "arguments": "["}},
        ]
    ),
    min_size=1,
    max_size=2,
)
MESSAGE: Values = st.one_of(
    st.builds(lambda text: {"role": "system", "content": text}, TEXT),
    st.builds(lambda text: {"role": "USER", "content": text}, TEXT),
    st.builds(
        lambda text, images: {"role": "user", "content": text, "images": images}, TEXT, IMAGES
    ),
    st.builds(lambda a, b: {"role": "assistant", "content": a, "thinking": b}, TEXT, TEXT),
    st.builds(lambda calls: {"role": "assistant", "tool_calls": calls}, CALLS | OBJECT_CALLS),
    st.builds(lambda text: {"role": "tool", "content": text, "tool_name": "f"}, TEXT),
    st.builds(lambda text: {"role": "tool", "content": text}, TEXT),
    st.sampled_from([{"role": "robot", "content": "x"}, {"content": "x"}, None]),
)
CHAT: dict[str, Values] = GENERATION | {
    "messages": st.lists(MESSAGE, max_size=4),
    "tools": FUNCTIONS,
}
GENERATE: dict[str, Values] = GENERATION | {
    "prompt": TEXT,
    "suffix": rarely(TEXT),
    "system": TEXT,
    "template": rarely(TEXT),
    "context": rarely(IDS),
    "raw": BOOLEAN,
    "images": rarely(IMAGES),
}
EMBED: dict[str, Values] = SHARED | {
    "input": TEXT | st.lists(TEXT, max_size=3),
    "prompt": TEXT,
    "truncate": BOOLEAN,
    "dimensions": st.sampled_from([0, 1, 10**6]),
    "truncate_prompt_tokens": st.sampled_from([-1, 0, 1]),
}
SHOW: dict[str, Values] = {"model": NAMES, "name": NAMES, "verbose": BOOLEAN} | dict.fromkeys(
    ("system", "template", "options"), JUNK
)
PATHS = {
    "/api/embed": EMBED,
    "/api/embeddings": EMBED,
    "/api/show": SHOW,
    "/api/create": SHOW,
    "/api/copy": SHOW,
}


@st.composite
def bodies(draw: st.DrawFn, fields: dict[str, Values], base: dict[str, Any]) -> dict[str, Any]:
    """Draw the required and up to six further fields, one of which may be junk."""
    names = draw(st.lists(st.sampled_from(sorted(fields)), max_size=6, unique=True))
    body = base | {"model": "default"} | {name: draw(fields[name]) for name in names}
    if isinstance(options := body.get("options", {}), dict):
        body["options"] = {"num_predict": 8} | options
    if draw(st.integers(0, 3)) == 0:
        body[draw(st.sampled_from(sorted({*fields, "no_such_field"})))] = draw(JUNK)
    return body


def test_every_field_of_the_bodies_is_drawn() -> None:
    assert set(CHAT) == set(OllamaChatBody.__struct_fields__)
    assert set(GENERATE) == set(OllamaGenerateBody.__struct_fields__)
    assert set(SHOW) == set(ShowBody.__struct_fields__)
    embedding = {*OllamaEmbedBody.__struct_fields__, *OllamaEmbeddingBody.__struct_fields__}
    assert set(EMBED) == embedding


def check_answer(response: httpx.Response) -> None:
    if response.status_code != 200:
        assert 400 <= response.status_code <= 501, response.text
        assert response.status_code != 500, response.text
        assert list(response.json()) == ["error"]
        assert response.json()["error"]
    elif response.headers["content-type"] == "application/x-ndjson":
        lines = [json.loads(line) for line in response.text.removesuffix("\n").split("\n")]
        assert [line.get("done") for line in lines[:-1]] == [False] * (len(lines) - 1)
        assert lines[-1].get("done") or lines[-1]["error"]
    else:
        response.json()


async def is_answered(neighbour: Neighbour, path: str, body: dict[str, Any]) -> bool:
    """Return True if a request is answered, False if refused; assert that it harms no other."""
    content = json.dumps(body).encode()
    async with asyncio.timeout(HANG_SECONDS):
        response, _ = await asyncio.gather(
            neighbour.http.post(path, content=content, headers=JSON), neighbour.is_unaffected()
        )
    check_answer(response)
    return response.status_code == 200


@settings(max_examples=EXAMPLES)
@given(body=bodies(CHAT, {"messages": [{"role": "user", "content": "Hello"}]}))
async def test_any_chat_is_answered_or_refused(
    neighbour: Neighbour, answered: Counter[str], body: dict[str, Any]
) -> None:
    answered["chat"] += await is_answered(neighbour, "/api/chat", body)


@settings(max_examples=EXAMPLES)
@given(body=bodies(GENERATE, {"prompt": "x = "}))
async def test_any_generation_is_answered_or_refused(
    neighbour: Neighbour, answered: Counter[str], body: dict[str, Any]
) -> None:
    answered["generate"] += await is_answered(neighbour, "/api/generate", body)


@settings(max_examples=EXAMPLES // 2)
@given(
    asked=st.sampled_from(sorted(PATHS)).flatmap(
        lambda path: st.tuples(st.just(path), bodies(PATHS[path], {}))
    )
)
async def test_any_other_body_is_answered_or_refused(
    neighbour: Neighbour, asked: tuple[str, dict[str, Any]]
) -> None:
    await is_answered(neighbour, *asked)


def test_enough_requests_of_each_kind_are_answered(answered: Counter[str]) -> None:
    """The tests above mean little if the server refuses all."""
    assert_enough_answered(answered)
