"""The requests of Ollama's client for Python, as it sends them."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import httpx
from ollama import Client

from tests.conformance.recorded.call import Call

__all__ = ["ollama_calls"]

_MODEL = "tokenwire-code-6m"
_HELLO = {"role": "user", "content": "Say hello."}
_QUESTION = {"role": "user", "content": "What is the weather in Rome?"}
_SHORT = {"temperature": 0, "num_predict": 6}
_LONG = {"temperature": 0, "num_predict": 80}
_SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}},
    "required": ["colour"],
}
_CALLED = [
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Rome"}}}],
    },
    {"role": "tool", "content": "sunny", "tool_name": "get_weather"},
]
_PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk"
    "+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def get_weather(city: str) -> str:
    """Return the weather.

    Args:
        city: The name of the city

    Returns:
        The weather
    """
    raise NotImplementedError(city)


_CHATS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "a system message": {"messages": [{"role": "system", "content": "Be brief."}, _HELLO]},
    "a continued answer": {"messages": [_HELLO, {"role": "assistant", "content": "Hel"}]},
    "tools": {"messages": [_QUESTION], "tools": [get_weather], "options": _LONG},
    "a history of calls": {"messages": [_QUESTION, *_CALLED], "tools": [get_weather]},
    "a JSON object": {"format": "json", "options": _LONG},
    "a schema": {"format": _SCHEMA, "options": _LONG},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "options": {"options": {**_SHORT, "num_ctx": 256, "top_k": 40, "num_gpu": 1, "stop": ["e"]}},
    "no thinking": {"think": False, "keep_alive": "5m"},
    "no messages": {"messages": []},
}
_GENERATIONS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "a system prompt": {"system": "Be brief."},
    "a raw prompt": {"prompt": "def add(a, b):", "raw": True},
    "infill": {"prompt": "def add(a, b):", "suffix": "\n"},
    "a schema": {"format": _SCHEMA, "options": _LONG},
    "a context": {"context": [5, 6, 7]},
    "no prompt": {"prompt": ""},
}
_REFUSED: Mapping[str, Callable[[Client], Any]] = {
    "a chat with an unknown model": lambda client: client.chat("nobody", [_HELLO]),
    "a generation with an unknown model": lambda client: client.generate("nobody", "x"),
    "an unknown model that is shown": lambda client: client.show("nobody"),
    "thinking": lambda client: client.chat(_MODEL, [_HELLO], think=True),
    "an image": lambda client: client.chat(_MODEL, [{**_HELLO, "images": [_PIXEL]}]),
    "a hot temperature": lambda client: client.chat(_MODEL, [_HELLO], options={"temperature": 9}),
    "a schema that is none": lambda client: client.chat(_MODEL, [_HELLO], format={"type": 5}),
    "vectors of a model without pooling": lambda client: client.embed(_MODEL, ["a", "b"]),
    "a vector by the older route": lambda client: client.embeddings(_MODEL, "a"),
    "a pull": lambda client: client.pull("smollm2"),
    "a removal": lambda client: client.delete(_MODEL),
    "a new model": lambda client: client.create("mine", from_=_MODEL),
    "a copy": lambda client: client.copy(_MODEL, "mine"),
    "a push": lambda client: client.push(_MODEL),
}
_OTHERS: Mapping[str, Callable[[Client], Any]] = {
    "the models": lambda client: client.list(),
    "a model": lambda client: client.show(_MODEL),
    "the models in memory": lambda client: client.ps(),
}


def ollama_calls() -> Iterator[Call]:
    """Yield the requests, of which chats and generations are whole and streamed."""
    for name, fields in _CHATS.items():
        for suffix, stream in (("", False), (", streamed", True)):
            asked = {"messages": [_HELLO], "options": _SHORT, "stream": stream, **fields}
            yield _sent(f"ollama, chat: {name}{suffix}", _chat, asked)
    for name, fields in _GENERATIONS.items():
        for suffix, stream in (("", False), (", streamed", True)):
            asked = {"prompt": "Say hello.", "options": _SHORT, "stream": stream, **fields}
            yield _sent(f"ollama, generate: {name}{suffix}", _generate, asked)
    for name, send in _OTHERS.items():
        yield _sent(f"ollama: {name}", send)
    for name, send in _REFUSED.items():
        yield _sent(f"ollama, refused: {name}", send)
    yield Call("ollama: the version", "GET", "/api/version")
    yield Call("ollama: the server is found", "HEAD", "/")


def _chat(client: Client, **fields: Any) -> Any:
    return client.chat(_MODEL, **fields)


def _generate(client: Client, **fields: Any) -> Any:
    return client.generate(_MODEL, **fields)


class _Request(Exception):  # noqa: N818 - no error
    """Carries the request that the client would send."""

    def __init__(self, request: httpx.Request) -> None:
        super().__init__()
        self.request = request


def _sent(name: str, send: Callable[..., Any], fields: Mapping[str, Any] | None = None) -> Call:
    """Return the request that the client sends."""

    def keep(request: httpx.Request) -> NoReturn:
        raise _Request(request)

    client = Client(host="http://127.0.0.1:1", transport=httpx.MockTransport(keep))
    try:
        list(send(client, **(fields or {})))  # a stream sends its request once it is read
    except _Request as sent:
        request = sent.request
        body = json.loads(request.content) if request.content else None
        return Call(name, request.method, request.url.path, body)
    raise AssertionError(f"{name}: the client sends nothing")
